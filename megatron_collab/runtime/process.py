"""This process in its run: rank, parent, imports, heartbeat, preemption notice, exit codes and errors that end a run.

Preemption: the scheduler sends SIGUSR1 some time before it ends everything. Every process of a run blocks the signal
from its first line on, and its children inherit that, so it ends none of them; it stays pending until a thread waits
for it. Rank 0 checks wherever it waits, and every rank raises with it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

PREEMPTION_SIGNAL = signal.SIGUSR1
_PR_SET_PDEATHSIG = 1
_noticed: float | None = None  # time.monotonic() at which the preemption notice was received
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
EXIT_PREEMPTED = 75  # Preempted: start the same command again (EX_TEMPFAIL of sysexits.h)


class RunStopped(RuntimeError):
    """The run cannot continue, for a reason that its user can fix; the training state is saved."""


class Hung(RunStopped):
    """Something that the run waits for did not arrive within its timeout."""


class Preempted(RunStopped):
    """A preemption notice was received: finished work is saved, and the same command resumes the run."""


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
    """Before slow imports: block the preemption notice, which would end the process, and collect no garbage.

    Imports make none, and looking for it takes a quarter of their time.
    """
    block_preemption_signal()
    gc.disable()


def imports_done() -> None:
    """Collect garbage again, without what the imports made."""
    gc.freeze()
    gc.enable()


def take_signals(rank: int) -> None:
    """Rank 0 watches for the preemption notice, and shuts its servers and workers down on SIGTERM.

    The other ranks end with Ctrl-C at once: Python would see it only after the collective that they wait in.
    """
    if rank == 0:
        watch_for_preemption()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    else:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def block_preemption_signal() -> None:
    """Block the signal in this thread and in all threads and processes that it starts from now on."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {PREEMPTION_SIGNAL})


def watch_for_preemption() -> None:
    """From now on record the signal; one that arrived since `block_preemption_signal` too."""

    def wait() -> None:
        global _noticed
        signal.sigwait({PREEMPTION_SIGNAL})
        _noticed = time.monotonic()

    threading.Thread(target=wait, name="preemption", daemon=True).start()


def raise_if_preempted() -> None:
    """Raise Preempted once a notice was received."""
    if _noticed is not None:
        raise Preempted(f"received a preemption notice ({PREEMPTION_SIGNAL.name})")


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


def seconds_since_notice() -> float:
    """How long ago the notice was received."""
    assert _noticed is not None
    return time.monotonic() - _noticed


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
