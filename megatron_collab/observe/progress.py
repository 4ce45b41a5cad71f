"""Progress bars with rates and time left; in a log file, a line now and then instead."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm


def progress(title: str, total: int, unit: str = "task", done: int = 0, keep: bool = False) -> tqdm:
    """A bar (context manager, `.update(n)`) on stderr; without a terminal it prints every 10 seconds at most."""
    interactive = sys.stderr.isatty()
    return tqdm(
        total=total,
        desc=title,
        unit=unit,
        initial=done,
        leave=keep,
        dynamic_ncols=interactive,
        mininterval=0.2 if interactive else 10.0,
        maxinterval=10.0,
        delay=0.0 if interactive else 10.0,
    )


class Stopwatch:
    """Seconds by stage of one step."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._laps: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        """What passed since the last lap belongs to `stage`."""
        now = time.monotonic()
        self._laps[stage] = self._laps.get(stage, 0.0) + now - self._last
        self._last = now

    def read(self) -> dict[str, float]:
        """The laps since the last reading, as `seconds/STAGE`."""
        laps, self._laps = self._laps, {}
        return {f"seconds/{stage}": seconds for stage, seconds in laps.items()}
