"""Stack dumps on SIGUSR2: each process of a run writes the stacks of its threads to a file in run.dir/stacks.

This runs no Python code, so it works in a process that hangs. SGLang's processes and Ray's workers import this module
before torch, so torch is not imported here.
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

import psutil

FOLDER = "stacks"  # in run.dir
SIGNAL = signal.SIGUSR2  # Ray's agents also dump stacks on it; SGLang and its libraries do not use it
_PACKAGE = str(Path(__file__).parents[1])
_COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")


def register(folder: Path, name: str) -> None:
    """From now on SIGUSR2 dumps the stacks of this process to `folder`/NAME-HOST-PID.txt; call again after a fork."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}-{socket.gethostname()}-{os.getpid()}.txt"
    faulthandler.register(SIGNAL, file.open("a"), chain=False)  # faulthandler keeps the file open


def ask(folder: Path, seconds: float = 2.0) -> None:
    """Make every registered process of this machine dump its stacks; wait at most `seconds` until they have begun."""
    living = [(pid, file, file.stat().st_size) for pid, file in _registered(folder) if pid is not None]
    for pid, _, _ in living:
        with suppress(ProcessLookupError):
            os.kill(pid, SIGNAL)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(file.stat().st_size == size for _, file, size in living):
        time.sleep(0.05)


def clear(folder: Path) -> None:
    """Remove empty files of processes of this machine that have ended."""
    for pid, file in _registered(folder):
        if pid is None and file.stat().st_size == 0:
            file.unlink(missing_ok=True)


def _registered(folder: Path) -> Iterator[tuple[int | None, Path]]:
    """Process id (None if it has ended) and file of each process of this machine."""
    for file in sorted(folder.glob(f"*-{socket.gethostname()}-*.txt")):
        pid = int(file.stem.rpartition("-")[2])
        try:  # another process may have reused the id, but it does not have the file open
            opened = [entry.path for entry in psutil.Process(pid).open_files()]
        except psutil.Error:
            opened = []
        yield (pid if str(file.resolve()) in opened else None), file


def innermost() -> tuple[str, str]:
    """Position of the main thread: the innermost frame of this package, and the collective that it called, or ""."""
    main = sys._current_frames()[threading.main_thread().ident or 0]
    frames = [frame for frame, _ in traceback.walk_stack(main)]  # innermost first
    files = [frame.f_code.co_filename for frame in frames]
    call = max((n for n, file in enumerate(files) if file.endswith(_COLLECTIVES)), default=-1)
    caller = next((n for n, file in enumerate(files) if n > call and file.startswith(_PACKAGE)), len(frames) - 1)
    file = os.path.relpath(files[caller], os.path.dirname(_PACKAGE))
    name = f"torch.distributed.{frames[call].f_code.co_name}" if call >= 0 else ""
    return f"{file}:{frames[caller].f_lineno} ({frames[caller].f_code.co_name})", name
