"""Loops in threads for code that may block."""

from __future__ import annotations

import asyncio
from threading import Event, current_thread

import pytest

from megatron_collab.runtime import side_loop
from megatron_collab.runtime.process import wait_for
from megatron_collab.runtime.side_loop import HungCalls, SideLoop, in_thread
from megatron_collab.runtime.trial import run_trial


def test_a_blocked_loop_is_left_alone_until_it_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_loop, "_loops", [])
    monkeypatch.setattr(side_loop, "HUNG", 1)
    began, ends = Event(), Event()
    loop = SideLoop.acquire()

    def hang() -> None:
        began.set()
        ends.wait()

    async def block() -> None:
        call = asyncio.create_task(loop.run(hang))
        assert await asyncio.to_thread(began.wait, 60)
        call.cancel()
        await call

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(block())
    with pytest.raises(HungCalls, match="1 calls have timed out and still hang"):
        SideLoop.acquire()
    ends.set()
    assert wait_for(lambda: not loop._hung, 30)
    loop.release()
    assert SideLoop.acquire() is loop


def test_an_object_keeps_its_loop_and_at_the_limit_loops_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_loop, "_loops", [])
    monkeypatch.setattr(side_loop, "LOOPS", 2)
    first, second, third = (SideLoop.acquire() for _ in range(3))
    assert first is not second and third in (first, second)

    async def thread() -> str:
        assert await first.run(lambda: current_thread().name) == "side loop"
        return await first.run(asyncio.sleep, 0, "slept")

    assert asyncio.run(thread()) == "slept"


def cancel() -> None:
    raise asyncio.CancelledError("mine")


@pytest.mark.parametrize("how", ["in a loop", "in a thread", "before the start"])
def test_a_cancellation_by_foreign_code_is_its_fault(how: str) -> None:
    loop = SideLoop.acquire()

    async def call() -> None:
        task = asyncio.current_task()
        with pytest.raises(RuntimeError, match="it raised CancelledError: mine"):
            await (loop.run(cancel) if how == "in a loop" else in_thread(cancel))
        assert task is not None and not task.cancelled()

    if how == "before the start":
        with pytest.raises(RuntimeError, match="it raised CancelledError: mine"):
            loop.wait_for(60, cancel)
    else:
        asyncio.run(call())
    assert not loop._hung
    loop.release()


def test_a_forked_process_has_loops_of_its_own() -> None:
    SideLoop.acquire().release()
    assert run_trial(lambda: SideLoop.acquire().wait_for(60, lambda: 7), 60) == 7
