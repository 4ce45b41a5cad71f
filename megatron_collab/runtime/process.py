"""This process in its run: rank, parent, imports, heartbeat, exit codes and errors that end a run."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from megatron_collab.runtime import signals

_PR_SET_PDEATHSIG = 1
stage = "the start"  # with the number of heartbeats, read by hang_detector.py
beats = 0
POLL_SECONDS = 0.1
LAUNCHER = "MEGATRON_COLLAB_TORCHRUN"  # holds the process id of the torchrun that `megatron_collab.train` became
FINISHED = "result.json"  # written last: a run folder that has it holds a finished run
BEST = "best.json"  # in a run folder: the step whose checkpoint is kept for train.keep_best, and its value

# Exit codes of a run that did not finish.
EXIT_BAD_INPUT = 2  # nothing was started
EXIT_STOPPED = 3  # RunStopped
EXIT_HUNG = 4  # Hung, or no rank made progress for launch.timeout seconds


class RunStopped(RuntimeError):
    """The run cannot continue, for a reason that its user can fix; the training state is saved."""


class Hung(RunStopped):
    """Something that the run waits for did not arrive within its timeout."""


class Preempted(RunStopped):
    """A preemption notice was received: finished work is saved, and the same command resumes the run."""


class Interrupted(Preempted):
    """As Preempted, by SIGINT, once the step was done."""


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def global_rank() -> int:
    """This process's rank over all nodes; 0 outside torchrun."""
    return int(os.environ.get("RANK", "0"))


def first_on_node() -> bool:
    """Whether this is the first rank of its node; True outside torchrun."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def imports_begin() -> None:
    """Before slow imports: collect no garbage. Imports make none, and looking for it takes a quarter of their time."""
    gc.disable()


def imports_done() -> None:
    """Collect garbage again, without what the imports made."""
    gc.freeze()
    gc.enable()


def raise_if_preempted() -> None:
    """Raise Preempted or Interrupted once a notice was received that has to be heeded now."""
    if notice := signals.heeded():
        kind = Preempted if notice.urgent else Interrupted
        raise kind(f"received {notice.signal.name}")


def beat(entered: str = "") -> None:
    """This process makes progress, and enters another stage where that is named; a call costs next to nothing.

    Anything that may take long on a trainer's rank calls it: waits with a deadline at every poll, work after each part.
    """
    global beats, stage
    beats += 1  # not atomic: a beat that is lost to another thread's does not matter
    if entered:  # other threads, which name none, must not put an older one back
        stage = entered


def wait_for(holds: Callable[[], bool], seconds: float) -> bool:
    """Whether it holds within `seconds`; asks at once and then every POLL_SECONDS, with a heartbeat. Preempted."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        beat()
        raise_if_preempted()
        time.sleep(POLL_SECONDS)
    return True


def age(pid: int) -> float:
    """Seconds since the process was started; independent of the wall clock (Linux)."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])  # since the boot; proc(5)
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def die_with_parent(parent: int = 0) -> None:
    """End this process with SIGKILL when its parent ends, however it ends (Linux).

    The children of a parent that is killed would else run on and write into a run that has been started again.
    `parent` is its process id where the child knows it, else 0; with it, one that has ended already is noticed too.
    """
    parent = parent or os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the request was made
        os.kill(os.getpid(), signal.SIGKILL)
