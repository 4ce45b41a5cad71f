"""Runs work that may fail, crash or never end in a child process first."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NoReturn, cast

from megatron_collab.runtime import process

_ROOM = 4 << 30  # bytes that the child may allocate beyond the memory of this process; files that it maps do not count
_RAYON = "TOKENIZERS_PARALLELISM"
_POLL_SECONDS = 0.1
_STEP = struct.Struct("q504s")  # the number of a row, a name


class TrialError(Exception):
    """The work failed, crashed or timed out; the message is the reason in a few words."""


class Steps:
    """The step that the child of a trial is in, which the parent reads from memory that both share.

    A step is the number of a row and the name of what is done with it; without a name, it has no limit.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _STEP.size)

    def enter(self, number: int, name: str = "") -> None:
        """In the child: begin a step."""
        _STEP.pack_into(self._memory, 0, number, name.encode(errors="replace"))

    @property
    def current(self) -> tuple[int, str]:
        """The number and name of the step that was begun last."""
        number, name = _STEP.unpack(self._memory[:])
        return number, name.rstrip(b"\0").decode(errors="replace")


def run_trial[Result](
    work: Callable[[], Result],
    seconds: float,
    room: int = _ROOM,
    steps: Steps | None = None,
    progress: Callable[[int], None] = lambda number: None,
) -> Result:
    """The result of `work`, which is done in a fork of this process and pickled.

    Raises TrialError if it fails, or takes more than `seconds` or `room` bytes. A ValueError of the work is raised
    here. What it prints goes to stderr: stdout may be read by a script. The child is killed, so even work that Python
    cannot interrupt is stopped, such as a power of large numbers.

    If the work enters `steps`, the seconds limit each step with a name, and `progress` gets the number of the current
    one several times a second.
    """
    receiver, sender = Pipe(duplex=False)
    with _quiet_tokenizers():
        parent, child = os.getpid(), os.fork()
    if child == 0:
        _try(work, sender, parent, room)
    sender.close()
    answer: tuple[type[Exception] | None, Any] | None = None
    try:
        ended = receiver.poll(seconds) if steps is None else _wait(receiver, seconds, steps, progress)
        with suppress(EOFError):  # it ended without an answer
            answer = receiver.recv() if ended else None
    finally:
        receiver.close()
        os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if answer is None:
        raise TrialError(f"ends the process with code {code}" if ended else f"does not finish within {seconds:g} s")
    error_type, result = answer
    if error_type:
        raise error_type(result)
    return cast(Result, result)


def _wait(receiver: Connection, seconds: float, steps: Steps, progress: Callable[[int], None]) -> bool:
    """Whether the child answers or ends before a step with a name has taken more than `seconds`."""
    step, began = steps.current, time.monotonic()
    while not receiver.poll(_POLL_SECONDS):
        if (current := steps.current) != step:
            step, began = current, time.monotonic()
            progress(current[0])
        elif step[1] and time.monotonic() - began > seconds:
            return False
    return True


def _try(work: Callable[[], object], sender: Connection, parent: int, room: int) -> NoReturn:
    """In the child: do the work and exit without cleanup, so that nothing shared is flushed or removed twice."""
    try:
        process.die_with_parent(parent)
        os.dup2(2, 1)
        sys.stdout = sys.stderr  # not a copy of what the parent has not flushed yet
        room, original = _limit_memory(room)
        sender.send((None, work()))
    except ValueError as error:
        sender.send((ValueError, str(error)))
    except BaseException as error:  # an extension may raise anything
        reason = f"fails ({' '.join(f'{type(error).__name__}: {error}'.split())[:300]})"
        if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
            resource.setrlimit(resource.RLIMIT_DATA, original)
            reason = f"takes more than {room / 2**30:.3g} GiB of memory"
        sender.send((TrialError, reason))
    finally:
        os._exit(0)


def _limit_memory(room: int) -> tuple[int, tuple[int, int]]:
    """The bytes that this process may allocate from now on, `room` or what `ulimit` leaves, and its original limits."""
    pages = [int(count) * resource.getpagesize() for count in Path("/proc/self/statm").read_text().split()]
    size, data = pages[0], pages[5]
    for limit, used in ((resource.RLIMIT_AS, size), (resource.RLIMIT_DATA, data)):
        original = resource.getrlimit(limit)
        if original[0] != resource.RLIM_INFINITY:
            room = max(0, min(room, original[0] - used))
    resource.setrlimit(resource.RLIMIT_DATA, (data + room, original[1]))
    return room, original


@contextmanager
def _quiet_tokenizers() -> Iterator[None]:
    """Within the block, tokenizers do not warn about a fork; the child does not need their threads."""
    original = os.environ.get(_RAYON)
    os.environ[_RAYON] = "false"
    try:
        yield
    finally:
        if original is None:
            del os.environ[_RAYON]
        else:
            os.environ[_RAYON] = original
