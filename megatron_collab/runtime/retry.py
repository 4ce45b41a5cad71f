"""One retry loop for HTTP clients: jittered exponential backoff.

llm/client.py has its own: it honours Retry-After, corrects malformed answers and keeps to a deadline.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

_Result = TypeVar("_Result")


async def retried(
    call: Callable[[], Awaitable[_Result]], transient: type[Exception], attempts: int, backoff: float
) -> _Result:
    """The result of `call`, made up to `attempts` times while it raises `transient`; other errors are raised at once.

    The pauses double from `backoff` seconds on, each times a random factor from 0.5 to 1.5.
    """
    for attempt in range(1, attempts):
        try:
            return await call()
        except transient:
            await asyncio.sleep(backoff * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))
    return await call()
