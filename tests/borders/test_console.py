"""A console that goes away."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_collab.runtime import signals

OUTPUT = """
import logging, sys
from pathlib import Path
from megatron_collab.runtime import console, screen

console.begin()
screen.LOG_EVERY = 0
progress = screen.progress("training", 9, "step")
for step in range(9):
    logging.getLogger("megatron_collab").info("step")
    logging.getLogger("megatron_collab").warning("slow")
    progress.update(1)
    print("a line", flush=True)
    print("a line", file=sys.stderr)
Path(sys.argv[1]).touch()
"""


def closed_pipe() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def closed_terminal() -> int:
    controller, terminal = os.openpty()
    os.close(controller)
    return terminal


@pytest.mark.processes
@pytest.mark.parametrize("console", [closed_pipe, closed_terminal, lambda: os.open("/dev/full", os.O_WRONLY), None])
def test_a_run_goes_on_without_its_console(tmp_path: Path, console: Callable[[], int] | None) -> None:
    """None: its streams were closed before the start."""
    descriptor = console() if console else os.open(os.devnull, os.O_WRONLY)
    command = [sys.executable, "-c", OUTPUT, str(tmp_path / "end")]
    if console is None:
        command = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command]
    ended = subprocess.run(command, stdout=descriptor, stderr=descriptor, timeout=100)
    os.close(descriptor)
    assert ended.returncode == 0 and (tmp_path / "end").exists()


def test_a_signal_from_a_closed_terminal_ends_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")

    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=write, isatty=lambda: True))
    signals.end_at_once(signal.SIGHUP, 0)
    assert codes == [signals.EXIT_TERMINATED]
