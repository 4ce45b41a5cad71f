"""Signals that end a run: who takes them, in every phase of it.

SIGUSR1 is a preemption notice, sent some time before the scheduler ends everything. SIGTERM and SIGHUP are one that
leaves launch.grace seconds. SIGINT (Ctrl-C) stops the run after the step, a second one at once. And SIGTERM from the
launcher (launch/torchrun.py) says that another rank has failed.

Every process of a run blocks them from its first line on, and its children inherit that: sent to all processes of a job
they end none of them, and no handler of a library comes in between. They stay pending until a thread of ours takes
them: that of the launcher passes them on to its ranks, that of rank 0 keeps the notice, and the run looks for it
wherever it waits (process.raise_if_preempted). A notice that reaches other ranks only, as those of another node, they
tell rank 0 (exchange). Before there is a run, the process ends at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

PREEMPTION = signal.SIGUSR1
# SIGTERM and SIGHUP as the launcher passes them on: its own SIGTERM means something else.
GRACE = signal.SIGHUP
LAUNCHER = "MEGATRON_COLLAB_LAUNCHER"  # holds the process id of our torchrun in its ranks

EXIT_PREEMPTED = 75  # start the same command again (EX_TEMPFAIL of sysexits.h)
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM
_CODES = {PREEMPTION: EXIT_PREEMPTED, signal.SIGINT: EXIT_INTERRUPTED}  # others: EXIT_TERMINATED


@dataclass(frozen=True)
class Notice:
    """What has to end this run, and since when."""

    signal: signal.Signals
    received: float = field(default_factory=time.monotonic)

    @property
    def urgent(self) -> bool:
        """Whether it does not wait for the end of a step."""
        return self.signal != signal.SIGINT


notice: Notice | None = None  # of rank 0
_elsewhere: list[signal.Signals] = []  # that another rank got, and has yet to tell rank 0
_in_step = False
Take = Callable[[signal.Signals, int], None]  # a signal and its sender's process id


def begin() -> None:
    """First of all in a program of a run: block the signals in all threads and children, and end with one at once.

    What this process was told to ignore, as nohup does with SIGHUP, it goes on ignoring, but for what its launcher
    passes on. Called in the main thread.
    """
    signals = {PREEMPTION, signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    ignored = {number for number in signals if signal.getsignal(number) is signal.SIG_IGN}
    taken = signals if launcher() else signals - ignored
    signal.pthread_sigmask(signal.SIG_BLOCK, taken)
    for number in ignored & taken:
        signal.signal(number, signal.SIG_DFL)  # ignored, it would not become pending everywhere

    def wait() -> None:
        while True:
            found = signal.sigwaitinfo(taken)
            if found.si_signo not in ignored or found.si_pid == launcher():
                _take(signal.Signals(found.si_signo), found.si_pid)

    threading.Thread(target=wait, name="signals", daemon=True).start()


def give_to(take: Take) -> None:
    """From now on signals are taken by `take`, in a thread."""
    global _take
    _take = take


def end_at_once(number: signal.Signals, sender: int) -> None:
    """There is no run yet: this process ends; of ranks the first one, for all, which the launcher then ends."""
    from_launcher = sender == launcher()
    if from_launcher and number == signal.SIGTERM:
        os._exit(EXIT_TERMINATED)
    if os.environ.get("RANK", "0") == "0":
        number = signal.SIGTERM if from_launcher and number == GRACE else number
        print(f"megatron-collab: {number.name} before the run had begun: ended", file=sys.stderr, flush=True)
        os._exit(_CODES.get(number, EXIT_TERMINATED))


_take: Take = end_at_once


def keep_notices(rank: int, grace: float) -> None:
    """The run has begun: rank 0 keeps a notice, and ends it `grace` seconds after SIGTERM, saved or not.

    The other ranks end only with the launcher's word, and tell rank 0 what they got: see `exchange`.
    """

    def take(number: signal.Signals, sender: int) -> None:
        if number == signal.SIGTERM and sender == launcher():
            os._exit(EXIT_TERMINATED)
        number = signal.SIGTERM if number == GRACE else number
        if rank == 0:
            _keep(number, grace)
        elif number not in _elsewhere:
            _elsewhere.append(number)

    give_to(take)


def exchange(store: Any, rank: int) -> None:
    """Tell rank 0 of what this rank got, through a `store` of all ranks; on rank 0: keep what others tell.

    Called every second. A notice that the launcher repeats is told again, which changes nothing.
    """
    if rank:
        while _elsewhere:
            store.set(_elsewhere.pop().name, "")
        return
    for number in (signal.SIGTERM, PREEMPTION, signal.SIGINT):
        if store.check([number.name]):
            _take(number, os.getpid())


def _keep(number: signal.Signals, grace: float) -> None:
    """The launcher repeats what it passes on; a notice that waits for the end of a step gives way to others."""
    global notice
    before, now = notice, Notice(number)
    if before and (before.urgent or not now.urgent):
        return
    notice = now
    if number == signal.SIGTERM:
        timer = threading.Timer(grace, _end_unsaved, [grace])
        timer.daemon = True
        timer.start()
    elif not now.urgent and _in_step:
        print("megatron-collab: SIGINT: stops after this step; again: at once", file=sys.stderr, flush=True)


def _end_unsaved(grace: float) -> None:
    said = f"SIGTERM: not saved within launch.grace={grace:g} s; the last checkpoint counts"
    print(f"megatron-collab: {said}", file=sys.stderr, flush=True)
    os._exit(EXIT_TERMINATED)


def heeded() -> Notice | None:
    """The notice that has to be heeded now: SIGINT waits for the end of a step."""
    return notice if notice and (notice.urgent or not _in_step) else None


def in_step(inside: bool) -> None:
    """Whether a step is under way, which SIGINT waits for."""
    global _in_step
    _in_step = inside


def launcher() -> int:
    """The process id of our torchrun where it started this process, else 0."""
    return int(os.environ.get(LAUNCHER, "0"))
