"""`python -m megatron_collab.view.speaker_program RUN MODEL…`: serves models of a run for a talk (speaker.py)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from megatron_collab.config import ConfigError
from megatron_collab.runtime import console
from megatron_collab.runtime.process import RunStopped
from megatron_collab.runtime.redact import redacted
from megatron_collab.runtime.text import one_line
from megatron_collab.talk import ChatError
from megatron_collab.talk.session import Chat, Talk, TaskSet
from megatron_collab.view.speaker import END_SECONDS

LISTED_TASKS, LISTED_CHARACTERS = 200, 80  # of a set, and of a task's first message
Request = Mapping[str, Any]
Tell = Callable[..., None]


def main() -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background process ignores
    requests = SimpleQueue[Request | None]()
    tell = _streams(requests)
    console.begin()
    folder, *names = sys.argv[1:]
    try:
        talk = Talk(Path(folder), names, progress=lambda line: tell(progress=one_line(line)))
        tell(sets=[_listed(task_set) for task_set in talk.task_sets])
        with talk:
            asyncio.run(_converse(talk, requests, tell))
    except (ConfigError, RunStopped) as error:
        tell(fault=one_line(str(error)))
    except KeyboardInterrupt:  # the end of the requests
        pass
    return 0


def _streams(requests: SimpleQueue[Request | None]) -> Tell:
    """Read requests from standard input in a thread; returns what writes parts of the state to standard output.

    The end of the input interrupts the main thread. What libraries print goes to standard error.
    """
    source, output = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def read() -> None:
        for line in source:
            requests.put(json.loads(line))
        requests.put(None)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(END_SECONDS)
        os._exit(1)  # something hangs, and the command may have ended, so that nobody else would end it

    def tell(**part: Any) -> None:
        print(json.dumps(redacted(part)), file=output, flush=True)

    Thread(target=read, daemon=True).start()
    return tell


def _listed(task_set: TaskSet) -> dict[str, Any]:
    """The first tasks of a set, for the page's list."""
    tasks, total = [], len(task_set.tasks)
    for number in range(min(total, LISTED_TASKS)):
        with suppress(ValueError):  # of a row that the run has left out too
            task = task_set.tasks[number]
            opening = next((message.content for message in task.messages if message.role != "system"), task.goal)
            tasks.append({"id": task.id, "text": opening[:LISTED_CHARACTERS]})
    return {"name": task_set.name, "tasks": tasks, "total": total}


async def _converse(talk: Talk, requests: SimpleQueue[Request | None], tell: Tell) -> None:
    """Do what is requested, in all conversations at once, until the end of the requests."""
    sides = [_Side(talk, number) for number in range(len(talk.models))]

    def show(**more: str) -> None:
        tell(chats=[side.state for side in sides], progress="", **more)

    while (request := await asyncio.to_thread(requests.get)) is not None:
        await asyncio.gather(*(side.act(request, show) for side in sides))
        show(doing="")


class _Side:
    """A model's conversation. `state` is an entry of `chats` (view.talk.TalkSession)."""

    def __init__(self, talk: Talk, number: int) -> None:
        self._talk, self._number = talk, number
        self._chat: Chat | None = None
        self.state: dict[str, Any] = {"prompt": 0, "row": None, "futures": [], "fault": "", "busy": False}

    async def act(self, request: Request, show: Callable[[], None]) -> None:
        """Do what is requested, and `show` it at its beginning and its end."""
        self.state |= {"futures": [], "fault": "", "busy": True}
        if request["action"] == "begin":
            self.state["row"] = None
        show()
        try:
            self.state |= await self._result(**request)
        except (ChatError, ConfigError) as error:
            self.state |= {"fault": one_line(str(error))}
        self.state |= {"busy": False}
        show()

    async def _result(self, action: str, task: str = "", text: str = "", count: int = 0) -> dict[str, Any]:
        """The new parts of the state."""
        if action == "begin":
            if self._chat is not None:
                await self._chat.close()
            self._chat = None
            about = self._talk.find_task(task) if task else None
            self._chat = await self._talk.begin(self._number, about)
            return {"row": self._chat.row, "prompt": len(about.messages) if about else 0}
        if self._chat is None:
            raise ChatError("there is no conversation; begin another one")
        match action:
            case "futures":
                return {"futures": await self._chat.futures(count)}
            case "say":
                row = await self._chat.say(text)
            case "user":
                row = await self._chat.let_user()
            case "undo":
                row = await self._chat.undo()
        return {"row": row}


if __name__ == "__main__":
    sys.exit(main())
