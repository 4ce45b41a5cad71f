"""This process in its run: its rank, how it ends with its parent, and the exit codes and errors that end a run."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
LAUNCHER = "MEGATRON_COLLAB_TORCHRUN"  # holds the process id of the torchrun that `megatron_collab.train` became
FINISHED = "result.json"  # written last: a run folder that has it holds a finished run

# How a run ends other than well, for whoever started it.
EXIT_BAD_INPUT = 2  # nothing was started
EXIT_STOPPED = 3  # RunStopped
EXIT_HUNG = 4  # Hung, or nothing has moved for launch.timeout seconds
EXIT_PREEMPTED = 75  # Preempted: start the same command again (EX_TEMPFAIL of sysexits.h)


class RunStopped(RuntimeError):
    """The run cannot go on, for a reason that its user can remove; what was learned so far is saved."""


class Hung(RunStopped):
    """Something that the run waits for has not come in all the time that it may take."""


class Preempted(RunStopped):
    """The machine is wanted back: what was finished is saved, and the same command goes on."""


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def global_rank() -> int:
    """This process's rank over all nodes; 0 outside torchrun."""
    return int(os.environ.get("RANK", "0"))


def first_on_node() -> bool:
    """Whether this is the first rank of its node; True outside torchrun."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def parent() -> int | None:
    """Process id of the torchrun that `megatron_collab.train` became; None where torchrun was started by hand."""
    return int(os.environ[LAUNCHER]) if LAUNCHER in os.environ else None


def age(pid: int) -> float:
    """Seconds since the process was started, whatever happens to the wall clock (Linux)."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])  # since the boot; proc(5)
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def die_with_parent(parent: int | None = None) -> None:
    """End this process with SIGKILL when its parent ends, however it ends (Linux).

    A parent that is killed cannot clean up after itself; without this, its children would run on and write
    into a run that has been started again. `parent` is its process id where the child knows it: then one that
    has ended before this call is noticed too.
    """
    parent = parent or os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the request was made
        os.kill(os.getpid(), signal.SIGKILL)
