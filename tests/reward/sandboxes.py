"""What tests of the sandbox share: a run of one program, and what of it is left on the machine."""

from __future__ import annotations

import asyncio
import os
import shutil
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from megatron_collab.reward import sandbox
from megatron_collab.reward.sandbox import Limits, Program, Result

PROJECT = Path(__file__).resolve().parents[2]
LIMITS = Limits(cpu=2, wall=10.0)


def run(source: str, limits: Limits = LIMITS) -> Result:
    return asyncio.run(sandbox.run(Program({"solution": source}), limits))


def unindented(source: str) -> str:
    return textwrap.dedent(source).strip()


def launchers() -> list[psutil.Process]:
    """Processes below this one that are a sandbox's or run in one; other tests have processes of their own."""
    found = programs(psutil.Process())
    for below in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found += [below] if any("sandboxed" in word for word in below.cmdline()) else []
    return found


def programs(process: psutil.Process) -> list[psutil.Process]:
    """Those below `process` that are in a PID namespace of their own."""

    def space(pid: int) -> str:
        return os.readlink(f"/proc/{pid}/ns/pid")

    found = []
    for below in process.children(recursive=True):
        with suppress(FileNotFoundError):  # it has just ended
            found += [below] if space(below.pid) != space(os.getpid()) else []
    return found


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """After every test no process and no mount is left, and a right program still passes.

    Nothing is tried before the trial of the sandbox has passed, which is harmless: a sandbox that somebody broke
    must not let a fork bomb loose on their machine.
    """
    assert sandbox.unavailable() is None
    mounts = Path("/proc/self/mounts").read_text()
    yield
    assert launchers() == []
    assert Path("/proc/self/mounts").read_text() == mounts
    assert run("print('alive')") == Result(True, "", "alive\n")


def assert_ended(processes: list[psutil.Process]) -> None:
    _, running = psutil.wait_procs(processes, timeout=60)
    left = [process for process in running if process.status() != psutil.STATUS_ZOMBIE]
    for process in left:
        process.kill()
    assert left == []


@contextmanager
def changed(folder: Path, file: str, old: str, new: str) -> Iterator[None]:
    """The sandbox with one place of its code changed."""
    shutil.copytree(sandbox._CODE, folder / "sandboxed", ignore=shutil.ignore_patterns("__pycache__"))
    text = (folder / "sandboxed" / file).read_text()
    assert text.count(old) == 1
    (folder / "sandboxed" / file).write_text(text.replace(old, new))
    command = tuple(word.replace(str(sandbox._CODE.parent), str(folder)) for word in sandbox._COMMAND)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sandbox._ways, (), sandbox._Way(command))
        yield
