"""Simulated time: an event loop whose clock jumps, also for tests, and Ray actors that are objects of this process."""

from __future__ import annotations

import asyncio
import inspect
import selectors
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any

CALL_SECONDS = 1e-3  # of a message to an actor


class VirtualLoop(asyncio.SelectorEventLoop):
    """Whatever can run does so before any time passes; then the clock jumps to the next timer.

    So a pause takes no time, and a busy machine misses no deadline. What a thread, a process or a socket does counts as
    taking no time, and a timer may go off before it.
    """

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


class _Jumping(selectors.DefaultSelector):
    """Instead of waiting, `select` adds the seconds to `now`."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0 if timeout else timeout)
        if timeout and not ready:
            self.now += timeout
        return ready


class VirtualRay:
    """`wait` and `get` as Ray's, for the calls of actors on `loop`."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop

    def actor(self, instance: object) -> Actor:
        return Actor(self.loop, instance)

    def get(self, call: asyncio.Task[Any]) -> Any:
        return self.loop.run_until_complete(call)

    def wait(
        self, calls: Sequence[asyncio.Task[Any]], num_returns: int, timeout: float
    ) -> tuple[list[asyncio.Task[Any]], list[asyncio.Task[Any]]]:
        """The calls that have ended and the others, after `num_returns` (one or all) ended or `timeout` seconds."""
        until = asyncio.FIRST_COMPLETED if num_returns == 1 else asyncio.ALL_COMPLETED
        if timeout:
            self.loop.run_until_complete(asyncio.wait(calls, timeout=timeout, return_when=until))
        ended = [call for call in calls if call.done()][:num_returns]
        return ended, [call for call in calls if call not in set(ended)]


class Actor:
    """A handle of `instance`: `handle.method.remote(…)` is a task, or yields awaitables if the method yields."""

    def __init__(self, loop: VirtualLoop, instance: object) -> None:
        self._loop, self._instance = loop, instance

    def __getattr__(self, name: str) -> Method:
        return Method(self._loop, getattr(self._instance, name))


class Method:
    def __init__(self, loop: VirtualLoop, function: Callable[..., Any]) -> None:
        self.loop, self.function = loop, function

    def remote(self, *arguments: Any) -> Any:
        if inspect.isasyncgenfunction(self.function):
            return self._items(self.function(*arguments))
        return self.loop.create_task(self._later(arguments))

    async def _later(self, arguments: Sequence[Any]) -> Any:
        await asyncio.sleep(CALL_SECONDS)
        result = self.function(*arguments)
        return await result if inspect.isawaitable(result) else result

    async def _items(self, results: AsyncIterator[Any]) -> AsyncIterator[Awaitable[Any]]:
        await asyncio.sleep(CALL_SECONDS)
        async for item in results:
            yield _of(item)


def _of(item: Any) -> Coroutine[Any, Any, Any]:
    async def value() -> Any:
        return item

    return value()
