"""Memory of code in the sandbox: every way to allocate some is counted or refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.sandbox import Limits
from megatron_collab.sandbox.sandboxed import memory
from tests.sandbox.sandboxes import nothing_is_left, run, unindented

SMALL = Limits(memory=200 << 20, wall=60.0)
pytestmark = [pytest.mark.processes, pytest.mark.usefixtures(nothing_is_left.__name__)]


def test_ten_gigabytes_are_refused() -> None:
    result = run("x = bytearray(10 << 30)")
    assert result.why == "exit 1"
    assert "MemoryError" in result.output


def test_the_memory_of_all_processes_together_is_limited() -> None:
    source = """
        import os, signal
        for _ in range(20):
            if os.fork() == 0:
                kept = b"x" * (50 << 20)
                signal.pause()
        signal.pause()
    """
    assert run(unindented(source), SMALL).why == "memory"


def test_the_memory_of_processes_without_their_main_thread_counts() -> None:
    """500 MB were kept there under a limit of 200 MB: such a process looks like one that has ended."""
    source = """
        import ctypes, os, threading, time
        def fill():
            kept = b"x" * (50 << 20)
            time.sleep(9)
        for _ in range(9):
            if os.fork() == 0:
                break
        threading.Thread(target=fill).start()
        ctypes.CDLL(None).syscall(60, 0)
    """
    assert run(unindented(source), SMALL).why == "memory"


@pytest.mark.parametrize("call", ["os.memfd_create('x')", "libc.shmget(0, 1 << 20, 0o1600)"])
def test_memory_that_no_limit_counts_is_refused(call: str) -> None:
    result = run(f"import ctypes, os\nlibc = ctypes.CDLL(None)\nassert {call} != -1\n")
    assert not result.passed
    assert "PermissionError" in result.output or "AssertionError" in result.output


def test_shared_memory_without_a_file_is_refused() -> None:
    """Its pages outlive a process that unmaps them, and no process is charged: 650 MB under a limit of 200 MB."""
    result = run("import mmap\nkept = mmap.mmap(-1, 650 << 20)\nkept.madvise(mmap.MADV_DONTNEED)\n", SMALL)
    assert "PermissionError" in result.output
    assert "FileNotFoundError" in run("open('/dev/zero', 'r+b')").output


def test_shared_memory_in_a_file_takes_from_the_disk() -> None:
    source = """
        import mmap
        with open("x", "w+b") as file:
            file.truncate(20 << 20)
            with mmap.mmap(file.fileno(), 0) as kept:
                for at in range(0, 20 << 20, 4096):
                    kept[at] = 1
    """
    assert run(unindented(source), Limits(file=32 << 20)).passed
    assert run(unindented(source), Limits(file=32 << 20, disk=10 << 20)).why == "signal 7"  # SIGBUS


def test_buffers_of_sockets_count() -> None:
    """478 MB were kept there under a limit of 200 MB."""
    source = """
        import os, signal, socket
        for _ in range(24):
            if os.fork() == 0:
                kept = []
                try:
                    while True:
                        kept.append(socket.socketpair())
                        for end in kept[-1]:
                            end.setblocking(False)
                            try:
                                while True:
                                    end.send(bytes(1 << 16))
                            except BlockingIOError:
                                pass
                except OSError:
                    signal.pause()
        signal.pause()
    """
    assert run(unindented(source), SMALL).why == "memory"


def group(folder: Path, monkeypatch: pytest.MonkeyPatch, controllers: str) -> Path:
    """A hierarchy of control groups, made of files, with this process in /mine."""
    (folder / "own").write_text("1:cpu:/\n0::/mine\n")
    monkeypatch.setattr(memory, "CGROUP", folder / "own")
    mine = folder / "hierarchy" / "mine"
    mine.mkdir(parents=True)
    for above in (mine, mine.parent):
        (above / "cgroup.controllers").write_text("cpu memory\n")
        (above / "cgroup.subtree_control").write_text(controllers if above == mine else "cpu\n")
    make = Path.mkdir

    def mkdir(self: Path, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        if self.name.startswith(memory.NAME):
            for name in ("memory.max", "memory.swap.max", "cgroup.procs"):
                (self / name).write_text("max\n")
            (self / "memory.events").write_text("low 0\noom 0\noom_kill 0\n")

    monkeypatch.setattr(Path, "mkdir", mkdir)
    return mine


def test_a_control_group_counts_where_memory_is_delegated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = group(tmp_path, monkeypatch, "cpu memory\n")
    limit = memory.Memory({"memory": 1000, "disk": 24}, tmp_path / "hierarchy")
    (folder,) = mine.glob("sandbox-*")
    assert ((folder / "memory.max").read_text(), (folder / "memory.swap.max").read_text()) == ("1024", "0")
    assert not limit.exceeded()
    limit.enter()
    assert (folder / "cgroup.procs").read_text() == "0ax\n"  # written over "max"
    (folder / "memory.events").write_text("low 0\noom 1\noom_kill 1\n")
    assert limit.exceeded()


def test_where_memory_is_not_delegated_processes_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = group(tmp_path, monkeypatch, "cpu\n")
    limit = memory.Memory({"memory": 1, "disk": 24}, tmp_path / "hierarchy")
    assert [*mine.glob("sandbox-*")] == []
    if (alone := os.fork()) == 0:  # other tests may have processes of their own below this one
        before = limit.exceeded()
        child = os.fork()
        if child == 0:
            os.read(os.pipe()[0], 1)
        counted = limit.exceeded()
        os.kill(child, 9)
        os._exit((before, counted) != (False, True))
    assert os.waitstatus_to_exitcode(os.waitpid(alone, 0)[1]) == 0
