"""Where the processes of a run stand: on SIGUSR2 each writes the stacks of its threads to a file in run.dir/stacks.

Nothing of Python is needed for that, so it works in a process that hangs. A file stays empty until somebody asks.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType

import psutil

FOLDER = "stacks"  # in run.dir
SIGNAL = signal.SIGUSR2  # Ray's agents take it for the same; SGLang and its libraries do not use it
_PACKAGE = str(Path(__file__).parents[1])
_COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")


def register(folder: Path, name: str) -> None:
    """From now on SIGUSR2 writes the stacks of this process to `folder`/NAME-HOST-PID.txt; again after a fork."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}-{socket.gethostname()}-{os.getpid()}.txt"
    faulthandler.register(SIGNAL, file.open("a"), chain=False)  # which keeps the file open


def ask(folder: Path, seconds: float = 2.0) -> list[Path]:
    """Have every registered process of this machine write; the files of those that did not within `seconds`."""
    sizes = {}
    for pid, file in _registered(folder):
        if _holds(pid, file):
            sizes[file] = file.stat().st_size
            with suppress(ProcessLookupError):
                os.kill(pid, SIGNAL)
    deadline = time.monotonic() + seconds
    while waiting := [file for file, size in sizes.items() if file.stat().st_size == size]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return waiting


def clear(folder: Path) -> None:
    """Remove what processes of this machine that have ended left empty."""
    for pid, file in _registered(folder):
        if file.stat().st_size == 0 and not _holds(pid, file):
            file.unlink(missing_ok=True)


def _registered(folder: Path) -> Iterator[tuple[int, Path]]:
    for file in sorted(folder.glob(f"*-{socket.gethostname()}-*.txt")):
        yield int(file.stem.rpartition("-")[2]), file


def _holds(pid: int, file: Path) -> bool:
    """Whether that process lives and has the file: ours, and no other that has got its number since."""
    try:
        return str(file.resolve()) in [opened.path for opened in psutil.Process(pid).open_files()]
    except psutil.Error:
        return False


def innermost() -> tuple[str, str]:
    """Where the main thread stands: our innermost frame, and the collective that it has called there, or ""."""
    return _place(sys._current_frames()[threading.main_thread().ident or 0])


def _place(frame: FrameType) -> tuple[str, str]:
    frames = [found for found, _ in traceback.walk_stack(frame)]  # from the inside out
    files = [found.f_code.co_filename for found in frames]
    call = max((n for n, file in enumerate(files) if file.endswith(_COLLECTIVES)), default=-1)
    ours = next((n for n, file in enumerate(files) if n > call and file.startswith(_PACKAGE)), len(frames) - 1)
    file = os.path.relpath(files[ours], os.path.dirname(_PACKAGE))
    name = f"torch.distributed.{frames[call].f_code.co_name}" if call >= 0 else ""
    return f"{file}:{frames[ours].f_lineno} ({frames[ours].f_code.co_name})", name
