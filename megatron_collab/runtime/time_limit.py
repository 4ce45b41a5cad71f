"""A time limit of a coroutine, which stands still while the coroutine is paused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar


class _Limit:
    """The clock of a time limit, which stands still while `pauses` are open; tasks of the coroutine share it."""

    def __init__(self, timeout: asyncio.Timeout) -> None:
        self._timeout, self._pauses, self._remaining = timeout, 0, 0.0  # seconds
        self.ended = False

    @property
    def _runs(self) -> bool:
        return not (self._pauses or self.ended or self._timeout.expired())

    def stop(self) -> None:
        end = self._timeout.when()
        if self._runs and end is not None:
            self._remaining = end - asyncio.get_running_loop().time()
            self._timeout.reschedule(None)
        self._pauses += 1

    def go_on(self) -> None:
        self._pauses -= 1
        if self._runs:
            self._timeout.reschedule(asyncio.get_running_loop().time() + self._remaining)


_limit = ContextVar[_Limit | None]("_limit", default=None)


@asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """Like asyncio.timeout; time spent within `uncounted` does not count."""
    async with asyncio.timeout(seconds) as timeout:
        limit = _Limit(timeout)
        token = _limit.set(limit)
        try:
            yield timeout
        finally:
            limit.ended = True
            _limit.reset(token)


@contextmanager
def uncounted() -> Iterator[None]:
    """Stop the innermost time limit, if any, until the block ends; until the last one ends if several overlap."""
    limit = _limit.get()
    if limit is None:
        yield
        return
    limit.stop()
    try:
        yield
    finally:
        limit.go_on()
