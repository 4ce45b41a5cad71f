"""The machine is wanted back: SIGUSR1 says so, some time before everything is ended.

Every process of a run blocks the signal from its first line on, and the processes that it starts inherit that. So it
ends none of them, whoever it is sent to and however early; it stays pending until somebody waits for it. Rank 0
decides: the trainer asks `check` wherever it waits, and every rank raises with it.
"""

from __future__ import annotations

import signal
import threading
import time

from megatron_collab.runtime.process import Preempted

SIGNAL = signal.SIGUSR1
_came: float | None = None  # time.monotonic()


def block() -> None:
    """Let the signal wait, in this thread and in all threads and processes that it starts from now on."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})


def heed() -> None:
    """From now on take note of the signal; one that came since `block` too."""
    threading.Thread(target=_await, name="preemption", daemon=True).start()


def check() -> None:
    """Raise Preempted where the signal has come."""
    if _came is not None:
        raise Preempted(f"{SIGNAL.name}: the machine is wanted back")


def seconds() -> float:
    """How long ago the signal was noticed."""
    assert _came is not None
    return time.monotonic() - _came


def _await() -> None:
    global _came
    signal.sigwait({SIGNAL})
    _came = time.monotonic()
