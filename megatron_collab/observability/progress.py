"""Progress with rates and time left: a bar on a terminal, a line now and then in a log file."""

from __future__ import annotations

import sys
import time
from functools import partial

from tqdm import tqdm

LOG_EVERY = 10.0  # seconds


class Log:
    """A bar's stand-in for log files: prints a line at most every LOG_EVERY seconds."""

    def __init__(self, title: str, total: int, unit: str, done: int) -> None:
        self._n = done
        self._shown = partial(tqdm.format_meter, total=total, ncols=0, prefix=title, unit=unit, initial=done)
        self._began = self._printed = time.monotonic()

    def update(self, n: int) -> None:
        self._n += n
        now = time.monotonic()
        if now - self._printed >= LOG_EVERY:
            self._printed = now
            print(self._shown(self._n, elapsed=now - self._began), file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing stays open."""


def progress(title: str, total: int, unit: str = "task", done: int = 0, keep: bool = False) -> tqdm | Log:
    """Progress towards `total`, of which `done` is done, on stderr; `keep`: the bar stays when it is full."""
    if not sys.stderr.isatty():
        return Log(title, total, unit, done)
    return tqdm(total=total, desc=title, unit=unit, initial=done, leave=keep, dynamic_ncols=True, mininterval=0.2)


class Stopwatch:
    """Seconds by stage of one step."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._laps: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        """Count the time since the last lap as `stage`."""
        now = time.monotonic()
        self._laps[stage] = self._laps.get(stage, 0.0) + now - self._last
        self._last = now

    def read(self) -> dict[str, float]:
        """The laps since the last reading, as `seconds/STAGE`."""
        laps, self._laps = self._laps, {}
        return {f"seconds/{stage}": seconds for stage, seconds in laps.items()}
