"""Signals that end a run, and how each process handles them in every phase.

SIGUSR1 is a preemption notice, sent some time before the scheduler kills the job. SIGTERM and SIGHUP are notices that
leave launch.grace seconds. SIGINT (Ctrl-C) stops the run after the step, a second one at once. SIGTERM from the
launcher (launch/torchrun.py) means that another rank has failed.

Every process of a run blocks these signals from its first line on, and its children inherit the mask. If the signals
are sent to all processes of a job, none of them ends, and no library's handler runs. They stay pending until a thread
of this module accepts them: the launcher passes them on to its ranks, rank 0 keeps the notice, and the run checks for
it whenever it waits (process.raise_if_preempted). If only other ranks receive a notice, for example those of another
node, they forward it to rank 0 (exchange). Before the run begins, a signal ends the process at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from megatron_collab.runtime import screen

PREEMPTION = signal.SIGUSR1
# The launcher passes SIGTERM and SIGHUP on as this one: SIGTERM from the launcher itself means that a rank failed.
GRACE = signal.SIGHUP
LAUNCHER = "MEGATRON_COLLAB_LAUNCHER"  # process id of torchrun, set in its ranks

EXIT_PREEMPTED = 75  # start the same command again (EX_TEMPFAIL of sysexits.h)
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM
_CODES = {PREEMPTION: EXIT_PREEMPTED, signal.SIGINT: EXIT_INTERRUPTED}  # others: EXIT_TERMINATED


@dataclass(frozen=True)
class Notice:
    """A signal that must end this run, and when it was received."""

    signal: signal.Signals
    received: float = field(default_factory=time.monotonic)

    @property
    def urgent(self) -> bool:
        """Whether it is obeyed within a step, without waiting for its end."""
        return self.signal != signal.SIGINT


notice: Notice | None = None  # of rank 0
_unsent: list[signal.Signals] = []  # received by another rank, not yet forwarded to rank 0
_in_step = False
Take = Callable[[signal.Signals, int], None]  # a signal and its sender's process id


def begin() -> None:
    """First call in a program of a run: block the signals in all threads and children; a signal ends it at once.

    Signals that were ignored before, as SIGHUP under nohup, stay ignored unless they come from the launcher. Called in
    the main thread.
    """
    signals = {PREEMPTION, signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    ignored = {number for number in signals if signal.getsignal(number) is signal.SIG_IGN}
    accepted = signals if launcher() else signals - ignored
    signal.pthread_sigmask(signal.SIG_BLOCK, accepted)
    for number in ignored & accepted:
        signal.signal(number, signal.SIG_DFL)  # an ignored signal would not become pending

    def wait() -> None:
        while True:
            received = signal.sigwaitinfo(accepted)
            if received.si_signo not in ignored or received.si_pid == launcher():
                _take(signal.Signals(received.si_signo), received.si_pid)

    threading.Thread(target=wait, name="signals", daemon=True).start()


def give_to(take: Take) -> None:
    """From now on `take` handles signals, in a thread."""
    global _take
    _take = take


def end_commands() -> None:
    """SIGTERM ends a command that is no program of a run as Ctrl-C does: what it has entered is left in order."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(EXIT_TERMINATED))


def end_at_once(number: signal.Signals, sender: int) -> None:
    """Default handler before a run exists: exit at once. Of all ranks only rank 0 exits; the launcher ends others."""
    from_launcher = sender == launcher()
    if from_launcher and number == signal.SIGTERM:
        os._exit(EXIT_TERMINATED)
    if os.environ.get("RANK", "0") == "0":
        number = signal.SIGTERM if from_launcher and number == GRACE else number
        with suppress(OSError):  # its terminal may be closed, which sent the signal
            screen.restore()
            print(f"megatron-collab: received {number.name} before the run began; exiting", file=sys.stderr, flush=True)
        os._exit(exit_code(number))


def exit_code(number: signal.Signals) -> int:
    """The exit code of a program that the signal has ended."""
    return _CODES.get(number, EXIT_TERMINATED)


_take: Take = end_at_once


def keep_notices(rank: int, grace: float) -> None:
    """The run has begun: rank 0 keeps a notice, and exits `grace` seconds after SIGTERM even if nothing was saved.

    Other ranks exit only if the launcher tells them, and forward their signals to rank 0: see `exchange`.
    """

    def take(number: signal.Signals, sender: int) -> None:
        if number == signal.SIGTERM and sender == launcher():
            os._exit(EXIT_TERMINATED)
        number = signal.SIGTERM if number == GRACE else number
        if rank == 0:
            _keep(number, grace)
        elif number not in _unsent:
            _unsent.append(number)

    give_to(take)


def exchange(store: Any, rank: int) -> None:
    """Forward this rank's signals to rank 0 through `store`, which all ranks share; on rank 0, keep them.

    Called every second. If the launcher repeats a notice, it is forwarded again without effect.
    """
    if rank:
        while _unsent:
            store.set(_unsent.pop().name, "")
        return
    for number in (signal.SIGTERM, PREEMPTION, signal.SIGINT):
        if store.check([number.name]):
            _take(number, os.getpid())


def _keep(number: signal.Signals, grace: float) -> None:
    """Keep the notice unless one is kept already (the launcher repeats them); urgent ones replace a SIGINT."""
    global notice
    previous, current = notice, Notice(number)
    if previous and (previous.urgent or not current.urgent):
        return
    notice = current
    if number == signal.SIGTERM:
        timer = threading.Timer(grace, _end_unsaved, [grace])
        timer.daemon = True
        timer.start()
    elif not current.urgent and _in_step:
        print("megatron-collab: SIGINT: stopping after this step; repeat to stop at once", file=sys.stderr, flush=True)


def _end_unsaved(grace: float) -> None:
    message = f"SIGTERM: not saved within launch.grace={grace:g} s; a restart resumes from the last checkpoint"
    print(f"megatron-collab: {message}", file=sys.stderr, flush=True)
    os._exit(EXIT_TERMINATED)


def due_notice() -> Notice | None:
    """The notice that must be obeyed now; SIGINT waits for the end of a step."""
    return notice if notice and (notice.urgent or not _in_step) else None


def in_step(inside: bool) -> None:
    """Record whether a step is running; SIGINT waits for its end."""
    global _in_step
    _in_step = inside


def launcher() -> int:
    """The process id of torchrun if launch/torchrun.py started this process, else 0."""
    return int(os.environ.get(LAUNCHER, "0"))
