"""Shared by tests of the sandbox: a run of one program, and what it leaves behind on the machine."""

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

from megatron_collab import sandbox
from megatron_collab.sandbox import Limits, Program, Result

PROJECT = Path(__file__).resolve().parents[2]
LIMITS = Limits(cpu=2, wall=60.0)  # programs have a low priority


def run(source: str, limits: Limits = LIMITS) -> Result:
    return asyncio.run(sandbox.run(Program({"solution": source}), limits))


def unindented(source: str) -> str:
    return textwrap.dedent(source).strip()


def launchers() -> list[psutil.Process]:
    """Descendants of this process that launch a sandbox or run in one; other tests have other processes."""
    processes = programs(psutil.Process())
    for below in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            processes += [below] if any("sandboxed" in word for word in below.cmdline()) else []
    return processes


def programs(process: psutil.Process) -> list[psutil.Process]:
    """Descendants of `process` in another PID namespace."""

    def space(pid: int) -> str:
        return os.readlink(f"/proc/{pid}/ns/pid")

    isolated = []
    for below in process.children(recursive=True):
        with suppress(FileNotFoundError):  # it has just ended
            isolated += [below] if space(below.pid) != space(os.getpid()) else []
    return isolated


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """After every test no process and no mount is left, and a correct program still passes.

    A harmless trial of the sandbox runs first: a broken sandbox must not release a fork bomb on a developer's
    machine.
    """
    assert sandbox.unavailable() is None
    mounts = Path("/proc/self/mounts").read_text()
    yield
    assert launchers() == []
    assert Path("/proc/self/mounts").read_text() == mounts
    assert run("print('alive')") == Result(True, "", "alive\n")


def assert_ended(processes: list[psutil.Process]) -> None:
    _, running = psutil.wait_procs(processes, timeout=60)
    remaining = [process for process in running if process.status() != psutil.STATUS_ZOMBIE]
    for process in remaining:
        process.kill()
    assert remaining == []


@contextmanager
def changed(folder: Path, file: str, old: str, new: str) -> Iterator[None]:
    """The sandbox with one change to its code."""
    shutil.copytree(sandbox._CODE, folder / "sandboxed", ignore=shutil.ignore_patterns("__pycache__"))
    text = (folder / "sandboxed" / file).read_text()
    assert text.count(old) == 1
    (folder / "sandboxed" / file).write_text(text.replace(old, new))
    command = tuple(word.replace(str(sandbox._CODE.parent), str(folder)) for word in sandbox._COMMAND)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sandbox._ways, (), sandbox._Way(command))
        yield
