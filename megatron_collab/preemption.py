"""The machine is wanted back: SIGUSR1 says so, some time before everything is ended.

Rank 0 decides: the trainer asks `check` wherever it waits, and every rank raises with it.
"""

from __future__ import annotations

import signal
from types import FrameType

from megatron_collab.processes import Preempted

SIGNAL = signal.SIGUSR1
_wanted = False


def heed() -> None:
    """From now on take note of the signal; main thread only."""
    signal.signal(SIGNAL, _note)


def check() -> None:
    """Raise Preempted where the signal has come."""
    if _wanted:
        raise Preempted(f"{SIGNAL.name}: the machine is wanted back; what was finished is saved")


def _note(number: int, frame: FrameType | None) -> None:
    global _wanted
    _wanted = True
