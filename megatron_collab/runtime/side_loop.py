"""Threads for foreign code that may block: it delays neither other code nor the end of the process.

Objects that keep what belongs to an event loop get one, a `SideLoop`; a plain function runs `in_thread`.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread
from typing import Any

from megatron_collab.runtime.process import ends_caller

LOOPS = 64  # threads; conversations share them if there are more
HUNG = 256  # limit of threads that a call blocks after its time-out; at the limit no other is started
_STEERING = (SystemExit, KeyboardInterrupt, asyncio.CancelledError)  # would end a loop, or cancel the caller
_loops: list[SideLoop] = []
_late = set[Thread]()  # of calls in threads of their own
for _threads in (_loops, _late):
    os.register_at_fork(after_in_child=_threads.clear)  # a child has none of them


class HungCalls(RuntimeError):
    """HUNG threads are still blocked by calls that have timed out."""


class LateCall(RuntimeError):
    """A call has not ended in time; its thread may hang."""


class SideLoop:
    """An event loop in a daemon thread. Functions and coroutines run there, so objects may keep what belongs to a loop.

    `users`: how many objects have acquired it.
    """

    def __init__(self) -> None:
        self.users = 0
        self._hung = False
        self._loop = asyncio.new_event_loop()
        Thread(target=self._loop.run_forever, name="side loop", daemon=True).start()

    @classmethod
    def acquire(cls) -> SideLoop:
        """The least used loop that is not blocked; `release` it at the end. Raises HungCalls."""
        _check_hung()
        usable = [loop for loop in _loops if not loop._hung]
        loop = min(usable, key=lambda loop: loop.users, default=None)
        if loop is None or (loop.users and len(usable) < LOOPS):
            loop = cls()
            _loops.append(loop)
        loop.users += 1
        return loop

    def release(self) -> None:
        self.users -= 1

    async def run(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """The result of a function, which may be async. If the caller is cancelled, so is the coroutine."""
        result = asyncio.run_coroutine_threadsafe(_result(function, *args, **keywords), self._loop)
        try:
            return await asyncio.wrap_future(result)
        except asyncio.CancelledError:
            self._await_response()
            raise

    def wait_for(self, seconds: float, function: Callable[..., Any], *args: Any) -> Any:
        """As `run`, for callers without an event loop. Raises LateCall after `seconds`."""
        result = asyncio.run_coroutine_threadsafe(_result(function, *args), self._loop)
        if not wait([result], seconds).done:
            result.cancel()
            self._await_response()
            raise LateCall(f"does not end within {seconds:g} s")
        return result.result()

    def _await_response(self) -> None:
        """Counts as hung until the loop runs again."""
        self._hung = True
        self._loop.call_soon_threadsafe(self._respond)

    def _respond(self) -> None:
        self._hung = False


async def in_thread(function: Callable[[], Any]) -> Any:
    """The function's result, called in a new thread without a loop, where it may start one. Raises HungCalls."""
    _check_hung()
    outcome = Future[Any]()
    outcome.set_running_or_notify_cancel()

    def work() -> None:
        try:
            outcome.set_result(function())
        except _STEERING as error:
            outcome.set_exception(_fault(error))
        except BaseException as error:
            outcome.set_exception(error)

    thread = Thread(target=work, name="call", daemon=True)
    thread.start()
    try:
        return await asyncio.wrap_future(outcome)
    except asyncio.CancelledError:
        _late.add(thread)
        raise


def _check_hung() -> None:
    _late.difference_update([thread for thread in _late if not thread.is_alive()])
    if len(_late) + sum(loop._hung for loop in _loops) >= HUNG:
        raise HungCalls(f"{HUNG} calls have timed out and still hang in their threads; give them time limits")


async def _result(function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    try:
        result = function(*args, **keywords)
        return await result if inspect.isawaitable(result) else result
    except _STEERING as error:
        if ends_caller(error):
            raise
        raise _fault(error) from error


def _fault(error: BaseException) -> RuntimeError:
    return RuntimeError(f"it raised {type(error).__name__}: {error}")
