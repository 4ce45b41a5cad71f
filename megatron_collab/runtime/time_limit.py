"""A time limit of a coroutine, which stands still while the coroutine is paused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar

_limit = ContextVar[asyncio.Timeout | None]("_limit", default=None)


@asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """As asyncio.timeout; what is done within `uncounted` does not count."""
    async with asyncio.timeout(seconds) as limit:
        token = _limit.set(limit)
        try:
            yield limit
        finally:
            _limit.reset(token)


@contextmanager
def uncounted() -> Iterator[None]:
    """Stop the innermost time limit, if there is one, for the length of the block."""
    limit, now = _limit.get(), asyncio.get_running_loop().time
    end = limit.when() if limit else None
    if limit is None or end is None:
        yield
        return
    remaining = end - now()
    limit.reschedule(None)
    try:
        yield
    finally:
        limit.reschedule(now() + remaining)
