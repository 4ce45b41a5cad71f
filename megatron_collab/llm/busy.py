"""When the run's own servers have calls in flight, and for what share of a time they have none."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

Span = tuple[float, float]  # begin and end, in seconds since the epoch
Spans = Mapping[str, Sequence[Span]]  # by the URL of a server
_GAP = 0.05  # seconds between two calls that are not idle: spans with less between them are one
_MOST = 100_000  # spans of a server that are kept, with more than an hour between them; a chat never asks for them


class BusySpans:
    """By server, the spans of time in which at least one call of this process is in flight, in one event loop."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since the epoch, since the spans of processes on several nodes are laid over each other."""
        self._clock = clock
        self._in_flight, self._since = Counter[str](), dict[str, float]()
        self._spans = defaultdict[str, deque[Span]](lambda: deque(maxlen=_MOST))

    @contextmanager
    def call(self, url: str) -> Iterator[None]:
        """A call to the server at `url`, in flight within the block."""
        if not self._in_flight[url]:
            self._since[url] = self._clock()
        self._in_flight[url] += 1
        try:
            yield
        finally:
            self._in_flight[url] -= 1
            if not self._in_flight[url]:
                spans, begin = self._spans[url], self._since[url]
                if spans and 0 <= begin - spans[-1][1] < _GAP:
                    begin, _ = spans.pop()
                spans.append((begin, self._clock()))

    def since(self, begin: float) -> dict[str, list[Span]]:
        """The spans that end after `begin`, in order, also those that go on; earlier ones are forgotten."""
        for spans in self._spans.values():
            while spans and spans[0][1] <= begin:
                spans.popleft()
        now = self._clock()
        open_spans = {url: [(self._since[url], now)] for url in +self._in_flight}
        urls = {url for url, spans in self._spans.items() if spans} | {*open_spans}
        return {url: [*self._spans[url], *open_spans.get(url, ())] for url in urls}


def idle_share(processes: Sequence[Spans], urls: Sequence[str], begin: float, end: float) -> float:
    """Share of the time from `begin` to `end`, of all servers in `urls`, in which no process had a call in flight.

    1 - sum of |union of the spans of server s| / (servers * (end - begin)), a number from 0 to 1. `processes`: the
    spans of each process; `begin` < `end`, in seconds since the epoch.
    """
    busy = sum(_length([span for spans in processes for span in spans.get(url, ())], begin, end) for url in urls)
    return 1 - busy / (len(urls) * (end - begin))


def _length(spans: Sequence[Span], begin: float, end: float) -> float:
    """Seconds from `begin` to `end` that are in at least one of the spans."""
    seconds, covered = 0.0, begin  # until when
    for first, last in sorted(spans):
        first, last = max(first, covered), min(last, end)
        if last > first:
            seconds, covered = seconds + last - first, last
    return seconds
