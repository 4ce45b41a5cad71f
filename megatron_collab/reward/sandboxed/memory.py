"""How much memory a run has taken, all of its processes together: by a control group, else by what can be seen of them.

What a control group (cgroup v2, where memory is delegated to us) counts is what the kernel gave out, shared pages and
buffers of sockets too. Elsewhere, memory shared without a file is refused (`seccomp`), files are limited by their file
system, and every open descriptor counts as a socket whose buffer is full.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

NAME = "sandbox-"
OWN = Path("/proc/self/cgroup")
BUFFER = Path("/proc/sys/net/core/wmem_default")  # bytes that a socket holds for its reader


class Memory:
    """Made before the processes are; `entrance` is to be closed by those that shall not enter the group."""

    def __init__(self, limits: Mapping[str, Any], hierarchy: Path = Path("/sys/fs/cgroup")) -> None:
        self._limit = limits["memory"]
        self._buffer = int(BUFFER.read_text()) if BUFFER.exists() else 212992  # the kernel's default
        self.entrance = -1
        self._group: Path | None = None
        with suppress(OSError):  # where anything of it is refused, it is not delegated
            if (parent := delegated(hierarchy)) is not None:
                self._found(parent, limits["memory"] + limits["disk"])

    def _found(self, parent: Path, most: int) -> None:
        for left in parent.glob(f"{NAME}*"):  # by launchers that were killed
            if not os.path.exists(f"/proc/{left.name.removeprefix(NAME)}"):
                with suppress(OSError):
                    left.rmdir()
        group = parent / f"{NAME}{os.getpid()}"
        group.mkdir()
        try:
            (group / "memory.max").write_text(str(most))
            if (group / "memory.swap.max").exists():
                (group / "memory.swap.max").write_text("0")
            self.entrance = os.open(group / "cgroup.procs", os.O_WRONLY)
        except OSError:
            group.rmdir()
            raise
        self._group = group

    def enter(self) -> None:
        """Count this process and its children from here on; OSError where the kernel refuses."""
        if self.entrance >= 0:
            os.write(self.entrance, b"0")
            os.close(self.entrance)

    def exceeded(self) -> bool:
        if self._group is not None:
            events = dict(line.split() for line in (self._group / "memory.events").read_text().splitlines())
            return int(events["oom_kill"]) > 0
        return sum(map(self._of, below(os.getpid()))) > self._limit

    def _of(self, process: int) -> int:
        """Bytes of a process; what it shares with others counts for each."""
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            with open(f"/proc/{process}/status") as file:
                said = dict(line.split(":", 1) for line in file)
            if "VmRSS" not in said:  # it has ended, and nobody has waited for it yet
                return 0
            try:
                descriptors = len(os.listdir(f"/proc/{process}/fd"))
            except PermissionError:  # it does not let itself be looked at: as many as its table has room for
                descriptors = int(said["FDSize"])
            return 1024 * sum(int(said[name].split()[0]) for name in ("VmRSS", "VmSwap")) + descriptors * self._buffer
        return 0

    def close(self) -> None:
        """Remove the group, whose processes have ended."""
        if self._group is not None:
            os.close(self.entrance)
            with suppress(OSError):  # one is still ending: a later launcher removes it
                self._group.rmdir()


def delegated(hierarchy: Path) -> Path | None:
    """A folder of the hierarchy in which we may make groups that count memory: our own group, or the one above."""
    if not (hierarchy / "cgroup.controllers").exists():  # it is not version 2
        return None
    (own,) = (line[3:] for line in OWN.read_text().splitlines() if line.startswith("0::"))
    group = hierarchy / own.lstrip("/")
    for folder in (group, group.parent):
        controllers = folder / "cgroup.subtree_control"
        if controllers.exists() and "memory" in controllers.read_text().split() and os.access(folder, os.W_OK):
            return folder
    return None


def below(root: int) -> Iterator[int]:
    """All processes that descend from `root`."""
    waiting = [root]
    while waiting:
        process = waiting.pop()
        if process != root:
            yield process
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            for thread in os.listdir(f"/proc/{process}/task"):
                with open(f"/proc/{process}/task/{thread}/children") as file:
                    waiting += map(int, file.read().split())
