"""Programs side by side, in one thread: each after those that it needs, a limited number at once."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from megatron_collab.runtime.process import die_with_parent

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


async def side_by_side[Item](
    prerequisites: Mapping[Item, Collection[Item]], jobs: int, run: Callable[[Item], Coroutine[Any, Any, int]]
) -> int:
    """`run` every item after its prerequisites, in the order of `prerequisites`, at most `jobs` at once.

    Returns 0, or the first other code of an item. After that code or an exception no item is started; the running ones
    finish, so that no work is lost, and then the exception is raised.
    """
    waiting, running, failures = list(prerequisites), dict[asyncio.Task[int], Item](), list[asyncio.Task[int]]()
    while waiting or running:
        unfinished = {*waiting, *running.values()}
        ready = [item for item in waiting if unfinished.isdisjoint(prerequisites[item])]
        for item in ready[: jobs - len(running)]:
            waiting.remove(item)
            running[asyncio.create_task(run(item))] = item
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            del running[task]
            if task.exception() or task.result():
                failures.append(task)
                waiting.clear()
    return failures[0].result() if failures else 0


class Programs:
    """Runs programs, which get the signals of this process and end with it. `received`: the first signal."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._running = set[Process]()

    @contextmanager
    def forwarding(self) -> Iterator[None]:
        """Signals are forwarded within the block."""
        loop = asyncio.get_running_loop()
        for number in _FORWARDED:
            loop.add_signal_handler(number, self._forward, number)
        try:
            yield
        finally:
            for number in _FORWARDED:
                loop.remove_signal_handler(number)

    async def run(self, arguments: Sequence[str], log: Path | None = None) -> int:
        """Run Python with these arguments and return its exit code; what it prints is appended to `log`, if any."""
        with log.open("ab") if log else nullcontext() as stream:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *arguments,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self._running.add(process)
        if self.received:  # while it was started
            self._forward(self.received)
        code = await process.wait()
        self._running.discard(process)
        return code

    def _forward(self, number: signal.Signals) -> None:
        self.received = self.received or number
        for process in self._running:
            with suppress(ProcessLookupError):  # it has just ended
                process.send_signal(number)
