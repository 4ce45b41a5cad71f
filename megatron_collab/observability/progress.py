"""Progress with rates and time left: a bar on a terminal, a line now and then in a log file."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

LOG_EVERY = 10.0  # seconds


class Log:
    """Stands in for a bar where nobody watches: prints a line at most every `every` seconds."""

    def __init__(self, title: str, total: int, unit: str, done: int, every: float) -> None:
        self.title, self.total, self.unit = title, total, unit
        self._first, self._n, self._every = done, done, every
        self._began = self._printed = time.monotonic()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, n: int) -> None:
        self._n += n
        now = time.monotonic()
        if now - self._printed >= self._every:
            self._printed = now
            elapsed = now - self._began
            shown = tqdm.format_meter(
                self._n, self.total, elapsed, ncols=0, prefix=self.title, unit=self.unit, initial=self._first
            )
            print(shown, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing stays open."""


def progress(
    title: str, total: int, unit: str = "task", done: int = 0, keep: bool = False, every: float = LOG_EVERY
) -> tqdm | Log:
    """What shows how far `total` is done, on stderr: a context manager with `.update(n)` and `.close()`.

    `keep`: the bar stays when it is full; `every`: seconds between the lines of a log file.
    """
    if not sys.stderr.isatty():
        return Log(title, total, unit, done, every)
    return tqdm(total=total, desc=title, unit=unit, initial=done, leave=keep, dynamic_ncols=True, mininterval=0.2)


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
