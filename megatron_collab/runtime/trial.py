"""Work that may fail, crash or never end, tried in a child process before this one does it."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import NoReturn

from megatron_collab.runtime import process

_ROOM = 4 << 30  # bytes that it may take beyond what this process has
_RAYON = "TOKENIZERS_PARALLELISM"


class TrialError(Exception):
    """Why the work came to no end, in a few words."""


def tried(work: Callable[[], object], seconds: float) -> None:
    """Do `work` in a fork of this process, which ends with it; TrialError unless it ends well within `seconds`.

    A ValueError within it is raised here. What only a limit of the kernel stops, as a power of large numbers, is
    stopped too.
    """
    receiver, sender = Pipe(duplex=False)
    with _quiet_tokenizers():
        parent, child = os.getpid(), os.fork()
    if child == 0:
        _try(work, sender, parent)
    sender.close()
    answer: tuple[type[Exception] | None, str] | None = None
    try:
        ended = receiver.poll(seconds)
        with suppress(EOFError):  # it ended without a word
            answer = receiver.recv() if ended else None
    finally:
        receiver.close()
        os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if answer is None:
        raise TrialError(f"ends the process with code {code}" if ended else f"does not end within {seconds:g} s")
    failed, said = answer
    if failed:
        raise failed(said)


def _try(work: Callable[[], object], sender: Connection, parent: int) -> NoReturn:
    """In the child, which ends here: nothing of what it shares with its parent is flushed or removed by both."""
    try:
        process.die_with_parent(parent)
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + _ROOM, held + _ROOM))
        work()
        sender.send((None, ""))
    except ValueError as error:
        sender.send((ValueError, str(error)))
    except Exception as error:
        sender.send((TrialError, f"fails ({' '.join(f'{type(error).__name__}: {error}'.split())[:300]})"))
    finally:
        os._exit(0)


@contextmanager
def _quiet_tokenizers() -> Iterator[None]:
    """Within it tokenizers do not warn of a fork; the child needs none of their threads."""
    before = os.environ.get(_RAYON)
    os.environ[_RAYON] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_RAYON]
        else:
            os.environ[_RAYON] = before
