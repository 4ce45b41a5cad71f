"""Progress bars with rates and time left, on a terminal; a log file has the lines of the steps."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm


def progress(title: str, total: int, unit: str = "task", done: int = 0, keep: bool = False) -> tqdm:
    """A bar (context manager, `.update(n)`) on stderr; nothing where stderr is no terminal."""
    return tqdm(
        total=total,
        desc=title,
        unit=unit,
        initial=done,
        leave=keep,
        dynamic_ncols=True,
        mininterval=0.2,
        disable=not sys.stderr.isatty(),
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
