"""The process that serves models of a run for a talk in the page: what the page's server sees of it, and its program.

Lines of JSON: requests on standard input, changes of the session's state on standard output. It ends when standard
input does, so also with the command.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryFile
from threading import Thread
from typing import TYPE_CHECKING, Any

from megatron_collab.observability.records import parsed
from megatron_collab.runtime import console
from megatron_collab.runtime.process import RunStopped
from megatron_collab.runtime.redact import redact, redacted
from megatron_collab.runtime.text import one_line
from megatron_collab.settings import ConfigError

if TYPE_CHECKING:  # the page's server does without what it imports
    from megatron_collab.talk.session import Talk, TaskSet

END_SECONDS = 30  # for servers to end, after which the process is killed
LISTED_TASKS, LISTED_CHARACTERS = 200, 80  # of a set, and of a task's first message
_LAST_BYTES = 1 << 14  # of its log, in which a fault is looked for
Request = Mapping[str, Any]
Tell = Callable[..., None]


class SpeakerProcess:
    """A process that serves `models` of the run in `folder` (view/talk.py's Speaker), on a GpuShare of the GPUs."""

    def __init__(self, folder: Path, models: Sequence[str], part: int, parts: int) -> None:
        self._log = TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(part), str(parts), str(folder), *models],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C in the terminal is for the command, and this process ends with it
        )

    def send(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin
        with suppress(OSError, ValueError):  # it has ended, as `updates` says too
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    def updates(self) -> Iterator[Mapping[str, Any]]:
        assert self._process.stdout
        has_fault = False
        for line in self._process.stdout:
            if (part := parsed(line.decode())) is None:
                break  # half a line: it was killed while it wrote
            has_fault = has_fault or bool(part.get("fault"))
            yield part
        self.end()
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            code = self._process.wait()
        with self._log:
            if not has_fault:
                yield {"fault": f"the process ended with code {code}{self._last_line()}"}

    def end(self) -> None:
        assert self._process.stdin
        with suppress(OSError):
            self._process.stdin.close()

    def _last_line(self) -> str:
        """The last line of its log, which names an error that it did not expect."""
        self._log.seek(max(0, self._log.seek(0, 2) - _LAST_BYTES))
        lines = self._log.read().decode(errors="replace").split("\n")
        return next((f": {one_line(redact(line))}" for line in reversed(lines) if line.strip()), "")


def main() -> int:
    """The program: serves models of a run. Arguments: its part of the GPUs and of how many, the run, the models."""
    from megatron_collab.talk.session import Talk
    from megatron_collab.talk.settings import GpuShare

    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background process ignores
    requests = SimpleQueue[Request | None]()
    tell = _streams(requests)
    console.begin()
    part, parts, folder, *names = sys.argv[1:]
    try:
        share = GpuShare(int(part), int(parts))
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
