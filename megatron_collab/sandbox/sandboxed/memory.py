"""Memory use of a run, over all of its processes: from a control group, else from /proc.

A control group (cgroup v2, if memory is delegated to this user) counts what the kernel allocated, including shared
pages and socket buffers. Without one, memory shared without a file is refused (`seccomp`), files are limited by their
file system, and every open descriptor counts as a socket with a full buffer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

NAME = "sandbox-"
CGROUP = Path("/proc/self/cgroup")
BUFFER = Path("/proc/sys/net/core/wmem_default")  # bytes that a socket holds for its reader


class Memory:
    """Created before the processes; a process that must not enter the group has to close `entrance`."""

    def __init__(self, limits: Mapping[str, Any], hierarchy: Path = Path("/sys/fs/cgroup")) -> None:
        self._limit = limits["memory"]
        self._buffer = int(BUFFER.read_text()) if BUFFER.exists() else 212992  # the kernel's default
        self.entrance = -1
        self._group: Path | None = None
        with suppress(OSError):  # if any step is refused, memory is not delegated
            if (parent := delegated_group(hierarchy)) is not None:
                self._create_group(parent, limits["memory"] + limits["disk"])

    def _create_group(self, parent: Path, limit: int) -> None:
        for stale in parent.glob(f"{NAME}*"):  # of launchers that were killed
            if not os.path.exists(f"/proc/{stale.name.removeprefix(NAME)}"):
                with suppress(OSError):
                    stale.rmdir()
        group = parent / f"{NAME}{os.getpid()}"
        group.mkdir()
        try:
            (group / "memory.max").write_text(str(limit))
            if (group / "memory.swap.max").exists():
                (group / "memory.swap.max").write_text("0")
            self.entrance = os.open(group / "cgroup.procs", os.O_WRONLY)
        except OSError:
            group.rmdir()
            raise
        self._group = group

    def enter(self) -> None:
        """Count this process and its children from now on. Raises OSError if the kernel refuses."""
        if self.entrance >= 0:
            os.write(self.entrance, b"0")
            os.close(self.entrance)

    def exceeded(self) -> bool:
        if self._group is not None:
            events = dict(line.split() for line in (self._group / "memory.events").read_text().splitlines())
            return int(events["oom_kill"]) > 0
        return sum(map(self._bytes_of, descendants(os.getpid()))) > self._limit

    def _bytes_of(self, process: int) -> int:
        """Bytes of a process; shared pages count for every process that maps them."""
        for thread in threads(process):
            with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                # In bytes: a process chooses its name, which need not be text.
                fields = (line.partition(b":") for line in (thread / "status").read_bytes().split(b"\n"))
                status = {name: value for name, _, value in fields}
                if b"VmRSS" not in status:  # a zombie; it may be the main thread, and others still run
                    continue
                try:
                    descriptors = len(list((thread / "fd").iterdir()))
                except PermissionError:  # the process is not readable: count the size of its descriptor table
                    descriptors = int(status[b"FDSize"])
                kilobytes = sum(int(status[name].split()[0]) for name in (b"VmRSS", b"VmSwap"))
                return 1024 * kilobytes + descriptors * self._buffer
        return 0

    def close(self) -> None:
        """Remove the group, after its processes have ended."""
        if self._group is not None:
            os.close(self.entrance)
            with suppress(OSError):  # a process is still exiting: a later launcher removes the group
                self._group.rmdir()


def delegated_group(hierarchy: Path) -> Path | None:
    """The group in which this process may create groups that count memory: its own or the parent; None without one."""
    if not (hierarchy / "cgroup.controllers").exists():  # it is not version 2
        return None
    (path,) = (line[3:] for line in CGROUP.read_text().splitlines() if line.startswith("0::"))
    group = hierarchy / path.lstrip("/")
    for folder in (group, group.parent):
        controllers = folder / "cgroup.subtree_control"
        if controllers.exists() and "memory" in controllers.read_text().split() and os.access(folder, os.W_OK):
            return folder
    return None


def threads(process: int) -> list[Path]:
    """The folders in /proc of a process's threads; none if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return list(Path(f"/proc/{process}/task").iterdir())
    return []


def descendants(root: int) -> Iterator[int]:
    """All descendant processes of `root`."""
    waiting = [root]
    while waiting:
        process = waiting.pop()
        if process != root:
            yield process
        for thread in threads(process):
            with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                waiting += map(int, (thread / "children").read_bytes().split())
