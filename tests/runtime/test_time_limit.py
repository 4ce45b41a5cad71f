"""Time limits that stand still while a coroutine is paused."""

from __future__ import annotations

import asyncio

import pytest

from megatron_collab.runtime.time_limit import time_limit, uncounted


async def worked(*seconds: float, paused: float = 0.0) -> float:
    """The time after pieces of work of so many seconds, within 10 in all, with a pause after the first."""
    async with time_limit(10.0):
        for number, piece in enumerate(seconds):
            await asyncio.sleep(piece)
            if not number:
                with uncounted():
                    await asyncio.sleep(paused)
    return asyncio.get_running_loop().time()


def test_a_pause_does_not_count(virtual_time: None) -> None:
    assert asyncio.run(worked(4.0, 5.0, paused=100.0)) == 109.0


def test_what_is_not_paused_counts(virtual_time: None) -> None:
    for pieces in ((11.0,), (4.0, 7.0)):
        with pytest.raises(TimeoutError):
            asyncio.run(worked(*pieces, paused=100.0))


def test_a_pause_that_is_canceled_ends_the_work(virtual_time: None) -> None:
    async def canceled() -> None:
        async with asyncio.timeout(50.0):
            await worked(4.0, 5.0, paused=100.0)

    with pytest.raises(TimeoutError):
        asyncio.run(canceled())


def test_without_a_limit_a_pause_is_a_pause(virtual_time: None) -> None:
    async def paused() -> float:
        with uncounted():
            await asyncio.sleep(3.0)
        return asyncio.get_running_loop().time()

    assert asyncio.run(paused()) == 3.0


async def paused_for(*seconds: float) -> None:
    with uncounted():
        await asyncio.sleep(seconds[0])
    for piece in seconds[1:]:
        await asyncio.sleep(piece)


def test_several_pauses_end_with_the_last_one(virtual_time: None) -> None:
    async def at_once(after: float) -> float:
        async with time_limit(10.0):
            await asyncio.sleep(4.0)
            short, long = asyncio.create_task(paused_for(20.0)), asyncio.create_task(paused_for(100.0))
            await asyncio.sleep(1.0)
            short.cancel()
            await long
            await asyncio.sleep(after)
        return asyncio.get_running_loop().time()

    assert asyncio.run(at_once(5.0)) == 109.0
    with pytest.raises(TimeoutError):
        asyncio.run(at_once(7.0))


def test_a_task_that_outlives_its_limit_pauses_nothing(virtual_time: None) -> None:
    async def outlived() -> float:
        async with time_limit(10.0):
            task = asyncio.create_task(paused_for(3.0))
            await asyncio.sleep(1.0)
        await task
        late = asyncio.create_task(paused_for(3.0))
        await late
        return asyncio.get_running_loop().time()

    assert asyncio.run(outlived()) == 6.0
