"""Heartbeat and current stage of this process, read by hang_detector.py; a call costs next to nothing.

Anything that may take long on a trainer's rank calls it: waits with a deadline at every poll, work after every part.
"""

from __future__ import annotations

stage = "the start"
beats = 0


def beat() -> None:
    """This process makes progress."""
    global beats
    beats += 1  # not atomic: a beat that is lost to another thread's does not matter


def at(new_stage: str) -> None:
    """This process makes progress and enters another stage."""
    global stage
    stage = new_stage
    beat()
