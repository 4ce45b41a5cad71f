"""Heartbeat and current stage of this process, read by hang_detector.py; a call costs next to nothing.

Whatever may take long on a trainer's rank calls it: a wait with its own deadline at every poll, work after every part.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Position:
    """What this process does, and how many heartbeats it has sent."""

    stage: str = "the start"
    beats: int = 0


here = Position()


def beat() -> None:
    """This process makes progress."""
    here.beats += 1  # not atomic: a beat that is lost to another thread's does not matter


def at(stage: str) -> None:
    """This process makes progress and enters `stage`."""
    here.stage = stage
    beat()
