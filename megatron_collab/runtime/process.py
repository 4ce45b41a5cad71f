"""State of this process: rank, parent, imports, heartbeat; exit codes and errors that end a run."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megatron_collab.runtime import signals

_PR_SET_PDEATHSIG = 1
stage = "the start"  # with the number of heartbeats, read by hang_detector.py
beats = 0
POLL_SECONDS = 0.1
LAUNCHER = "MEGATRON_COLLAB_TORCHRUN"  # process id of torchrun, which replaced `megatron_collab.train` by exec
STEPS = "MEGATRON_COLLAB_STEPS"  # train.steps by train.epochs, for the ranks of a LAUNCHER, which survey no data
FINISHED = "result.json"  # written last: its presence in a run folder means that the run has finished
_OF_RANK = ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_OF_MASTER = ("MASTER_ADDR", "MASTER_PORT")
_OF_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # whether torchrun itself holds the store at the master's address
_OF_TORCHRUN = "PET_"  # PET_NNODES=2 stands for torchrun's --nnodes=2, and would change the ranks of a run
RESUMES = "the same command resumes from the last checkpoint"
_REASON_LENGTH = 400  # characters of Ray's errors, which may have stacks
_MASTER_SECONDS = 10.0  # time for the store of torchrun to answer
BEST = "best.json"  # in a run folder: the step whose checkpoint is kept for train.keep_best, and its value

# Exit codes of a run that did not finish.
EXIT_BAD_INPUT = 2  # nothing was started
EXIT_STOPPED = 3  # RunStopped
EXIT_HUNG = 4  # Hung, or no rank made progress for launch.timeout seconds


class RunStopped(RuntimeError):
    """The run cannot continue, for a reason that its user can fix; the training state is saved."""


class Hung(RunStopped):
    """A wait of the run exceeded its timeout."""


class Preempted(RunStopped):
    """A preemption notice was received: finished work is saved, and the same command resumes the run."""


class Interrupted(Preempted):
    """Like Preempted, but by SIGINT, after the current step."""


def ends_caller(error: BaseException) -> bool:
    """Whether an error out of an extension must go on: the run stops, or the current task is cancelled or closed.

    Everything else is a failure of the extension, also SystemExit and a CancelledError that it raises by itself.
    """
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    return isinstance(error, RunStopped | GeneratorExit)


def lost_process(error: BaseException) -> RunStopped | None:
    """What `error` means if Ray has lost a worker for good, or a process of its cluster; None for any other error.

    An error that a worker itself has raised is another one.
    """
    ray = sys.modules.get("ray.exceptions")  # slow to import, and only rank 0 uses it
    if ray is None or not isinstance(error, ray.RayError) or isinstance(error, ray.RayTaskError):
        return None
    reason = " ".join(str(error).split())[:_REASON_LENGTH]
    return RunStopped(f"Ray has lost a process of the run; {RESUMES}: {reason}")


def under_torchrun() -> bool:
    """Whether torchrun started this process; see `leftover_rank`."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def leftover_rank() -> str | None:
    """Why this process is no rank although it has variables of a rank or of torchrun, left over; else None.

    A rank has all of them, and torchrun, which has met the other nodes, answers at the master's address. If torchrun
    lets rank 0 hold the store, nothing answers there yet.
    """
    defaults = sorted(name for name in os.environ if name.startswith(_OF_TORCHRUN))
    present = [name for name in (*_OF_RANK, LAUNCHER, signals.LAUNCHER, *defaults) if name in os.environ]
    if not present:
        return None
    missing = [name for name in (*_OF_RANK, *_OF_MASTER, _OF_STORE) if name not in os.environ]
    reason = f"{missing[0]} is not set" if missing else _unreachable_master()
    return reason and f"{', '.join(present)}: set, but torchrun did not start this process ({reason}); unset them"


def _unreachable_master() -> str | None:
    """Why no store answers at the master's address; None if one does, or if torchrun itself holds none."""
    host, port = (os.environ[name] for name in _OF_MASTER)
    if os.environ[_OF_STORE] != "True":
        return None
    try:
        socket.create_connection((host, int(port)), _MASTER_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:
        return f"MASTER_ADDR={host}, MASTER_PORT={port}: {error}"
    return None


def global_rank() -> int:
    """This process's rank over all nodes; 0 outside torchrun."""
    return int(os.environ.get("RANK", "0"))


def first_on_node() -> bool:
    """Whether this is the first rank of its node; True outside torchrun."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def imports_begin() -> None:
    """Disable garbage collection before slow imports: it takes a quarter of their time and finds nothing."""
    gc.disable()


def imports_done() -> None:
    """Enable garbage collection again; objects of the imports are exempt."""
    gc.freeze()
    gc.enable()


def raise_if_preempted() -> None:
    """Raise Preempted or Interrupted if a notice was received that must be obeyed now."""
    if notice := signals.due_notice():
        kind = Preempted if notice.urgent else Interrupted
        raise kind(f"received {notice.signal.name}")


def beat(entered: str = "") -> None:
    """Heartbeat: record progress of this process and, if given, the stage that it `entered`. Cheap.

    Anything that may take long on a trainer rank calls it: waits with a deadline at every poll, work after each part.
    """
    global beats, stage
    beats += 1  # not atomic: a beat lost in a race between threads does not matter
    if entered:  # calls without a stage, from other threads, must not restore an older one
        stage = entered


def wait_for(holds: Callable[[], bool], seconds: float) -> bool:
    """Whether `holds()` becomes true within `seconds`; polls every POLL_SECONDS with a heartbeat. Raises Preempted."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        beat()
        raise_if_preempted()
        time.sleep(POLL_SECONDS)
    return True


def age(pid: int) -> float:
    """Seconds since process `pid` was started; independent of the wall clock (Linux)."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])  # since the boot; proc(5)
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def die_with_parent(parent: int = 0) -> None:
    """End this process with SIGKILL when its parent ends, for whatever reason (Linux).

    Otherwise children of a killed parent would keep running and write into a run that was started again. `parent`: its
    process id if the child knows it, else 0; if given, a parent that has already ended is detected too.
    """
    parent = parent or os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # the parent ended before the request
        os.kill(os.getpid(), signal.SIGKILL)
