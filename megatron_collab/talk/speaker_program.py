"""`python -m megatron_collab.talk.speaker_program PART PARTS RUN MODEL…`: serves models of a run (speaker.py).

PART and PARTS: its share of the GPUs (settings.Share).
"""

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
from megatron_collab.talk.session import Talk, TaskSet
from megatron_collab.talk.settings import Share
from megatron_collab.talk.speaker import END_SECONDS

LISTED_TASKS, LISTED_CHARACTERS = 200, 80  # of a set, and of a task's first message
Request = Mapping[str, Any]
Tell = Callable[..., None]


def main() -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background process ignores
    requests = SimpleQueue[Request | None]()
    tell = _streams(requests)
    console.begin()
    part, parts, folder, *names = sys.argv[1:]
    try:
        share = Share(int(part), int(parts))
        talk = Talk(Path(folder), names, progress=lambda line: tell(progress=one_line(line)), share=share)
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
    """Do what is requested, in the chats with all models at once, until the end of the requests."""

    def show(**more: str) -> None:
        tell(chats=[vars(chat) for chat in talk.chats], progress="", **more)

    while (request := await asyncio.to_thread(requests.get)) is not None:
        action, *values = request.values()
        if action == "begin":
            try:
                values = [talk.find_task(values[0]) if values[0] else None]
            except ConfigError as error:
                action, values = "refuse", [str(error)]
        await talk.act(action, show, *values)
        show(doing="")


if __name__ == "__main__":
    sys.exit(main())
