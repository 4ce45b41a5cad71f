"""An event loop whose clock jumps, for coroutines that wait only for each other and for timers."""

from __future__ import annotations

import asyncio
import selectors


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Whatever can run does so before any time passes; then the clock jumps to the next timer.

    So a pause takes no time, and a busy machine misses no deadline. What a thread, a process or a socket does counts as
    taking no time, and a timer may go off before it: tests of those need the usual loop.
    """

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


class _Jumping(selectors.DefaultSelector):
    """Selects without waiting; `now` moves by what it was to wait."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:  # there is no timer
            return super().select(None)
        ready = super().select(0)
        if not ready:
            self.now += timeout
        return ready
