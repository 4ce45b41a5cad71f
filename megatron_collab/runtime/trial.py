"""Runs work that may fail, crash or never end in a child process first."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NoReturn, cast

from megatron_collab.runtime import process

_ROOM = 4 << 30  # bytes that the child may allocate beyond the memory of this process
_RAYON = "TOKENIZERS_PARALLELISM"


class TrialError(Exception):
    """The work failed, crashed or timed out; the message is the reason in a few words."""


def run_trial[Result](work: Callable[[], Result], seconds: float, room: int = _ROOM) -> Result:
    """The result of `work`, which is done in a fork of this process and pickled.

    Raises TrialError if it fails, or takes more than `seconds` or `room` bytes. A ValueError of the work is raised
    here. The child is killed, so even work that Python cannot interrupt is stopped, such as a power of large numbers.
    """
    receiver, sender = Pipe(duplex=False)
    with _quiet_tokenizers():
        parent, child = os.getpid(), os.fork()
    if child == 0:
        _try(work, sender, parent, room)
    sender.close()
    answer: tuple[type[Exception] | None, Any] | None = None
    try:
        ended = receiver.poll(seconds)
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


def _try(work: Callable[[], object], sender: Connection, parent: int, room: int) -> NoReturn:
    """In the child: do the work and exit without cleanup, so that nothing shared is flushed or removed twice."""
    try:
        process.die_with_parent(parent)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
        sender.send((None, work()))
    except ValueError as error:
        sender.send((ValueError, str(error)))
    except BaseException as error:  # an extension may raise anything
        sender.send((TrialError, f"fails ({' '.join(f'{type(error).__name__}: {error}'.split())[:300]})"))
    finally:
        os._exit(0)


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
