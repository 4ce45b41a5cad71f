"""Heartbeat and current stage of this process, read by hang_detector.py; a call costs next to nothing.

Whatever may take long on a trainer's rank says so: a wait with a deadline of its own each time it looks, work each time
a part of it is done.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Position:
    place: str = "the start"
    moves: int = 0


here = Position()


def beat() -> None:
    """This rank has moved."""
    here.moves += 1  # threads may count at once: one move that is lost is none too few


def at(place: str) -> None:
    """This rank has moved, and is at `place` until it is somewhere else."""
    here.place = place
    beat()
