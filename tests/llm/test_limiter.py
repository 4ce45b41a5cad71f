from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import RayActorError

from megatron_collab.config import Config
from megatron_collab.llm import limiter as limiters
from megatron_collab.llm.limiter import MINUTE, BudgetSpent, CallQueue, FinishedCall, Limiter, LimiterDied, Reservation
from megatron_collab.runtime.ray_cluster import ray_session
from megatron_collab.settings import LlmConfig

LEDGER = Path("spend.json")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def talk(limiter: Limiter, ended: list[FinishedCall], wishes: list[Reservation]) -> list[int]:
    return asyncio.run(limiter.talk(ended, wishes))


def begun(limiter: Limiter, *tokens: int, seconds: float = 10.0) -> int:
    """How many calls of these tokens the limiter lets begin."""
    return len(talk(limiter, [], [Reservation(count, seconds) for count in tokens]))


def test_without_limits_every_call_begins() -> None:
    assert begun(Limiter(LlmConfig(max_concurrent=10**9), LEDGER), *[10**6] * 5000) == 5000


def test_requests_a_minute() -> None:
    clock = Clock()
    limiter = Limiter(LlmConfig(requests_per_minute=3), LEDGER, clock)
    assert begun(limiter, 1, 1) == 2
    clock.now += 30
    assert begun(limiter, 1, 1) == 1
    clock.now += 29.9
    assert begun(limiter, 1) == 0
    clock.now += 0.1
    assert begun(limiter, 1, 1, 1) == 2


def test_tokens_a_minute_are_reserved_and_then_what_was_used() -> None:
    clock = Clock()
    limiter = Limiter(LlmConfig(tokens_per_minute=1000), LEDGER, clock)
    (first,) = talk(limiter, [], [Reservation(800, 10), Reservation(300, 10)])
    assert (
        len(
            talk(
                limiter,
                [FinishedCall(first, tokens=100)],
                [Reservation(500, 10), Reservation(400, 10), Reservation(1, 10)],
            )
        )
        == 2
    )
    clock.now += MINUTE
    assert begun(limiter, 1000) == 1


def test_a_call_without_a_known_use_keeps_its_reservation() -> None:
    limiter = Limiter(LlmConfig(tokens_per_minute=1000), LEDGER, Clock())
    (first,) = talk(limiter, [], [Reservation(800, 10)])
    assert talk(limiter, [FinishedCall(first)], [Reservation(300, 10)]) == []


def test_a_call_larger_than_the_limit_goes_alone() -> None:
    clock = Clock()
    limiter = Limiter(LlmConfig(tokens_per_minute=100), LEDGER, clock)
    assert begun(limiter, 500, 1) == 1
    clock.now += MINUTE
    assert begun(limiter, 500) == 1


def test_calls_at_once_and_those_of_the_dead() -> None:
    clock = Clock()
    limiter = Limiter(LlmConfig(max_concurrent=2), LEDGER, clock)
    first, _ = talk(limiter, [], [Reservation(1, 10), Reservation(1, 20), Reservation(1, 10)])
    assert begun(limiter, 1) == 0
    assert len(talk(limiter, [FinishedCall(first)], [Reservation(1, 30), Reservation(1, 30)])) == 1
    clock.now += 20  # nobody said that the second ended
    assert begun(limiter, 1, 1) == 1


def test_a_call_that_nobody_reports_counts_as_what_it_wished_and_once() -> None:
    """Its process has died; or it was stuck, and reports after all."""
    clock = Clock()
    limiter = Limiter(LlmConfig(budget_usd=1.0), LEDGER, clock)
    late, _ = talk(limiter, [], [Reservation(100, 10, 0.25), Reservation(50, 10, None)])
    clock.now += 10
    assert begun(limiter, 1) == 1
    assert limiter.spend() == {"calls": 2, "tokens": 150, "usd": 0.25, "unpriced": 1}
    talk(limiter, [FinishedCall(late, 80, 0.2)], [])
    assert limiter.spend()["calls"] == 2 and limiter.spend()["usd"] == 0.25
    (last,) = talk(limiter, [], [Reservation(1, 20, 0.75)])
    clock.now += 20
    with pytest.raises(BudgetSpent, match="4 calls cost 1 USD"):
        talk(limiter, [], [Reservation(1, 10)])
    assert last not in limiter._running


def test_the_budget_stops_every_further_call_and_says_what_to_do() -> None:
    limiter = Limiter(LlmConfig(budget_usd=1.0), LEDGER)
    a, b = talk(limiter, [], [Reservation(1, 10), Reservation(1, 10)])
    assert talk(limiter, [FinishedCall(a, 10, 0.99)], []) == []
    with pytest.raises(BudgetSpent) as stopped:
        talk(limiter, [FinishedCall(b, 10, 0.01)], [Reservation(1, 10)])
    assert str(stopped.value) == (
        "llm.budget_usd=1 is used up: 2 calls cost 1 USD; raise it to continue from the last checkpoint"
    )


def test_what_was_spent_is_in_the_ledger_from_which_the_next_limiter_goes_on() -> None:
    before = Limiter(LlmConfig(), LEDGER)
    calls = talk(before, [], [Reservation(1, 10)] * 3)
    talk(before, [FinishedCall(calls[0], 10, 0.5), FinishedCall(calls[1], 20, None)], [])
    before.write()
    assert json.loads(LEDGER.read_text()) == {"calls": 2, "tokens": 30, "usd": 0.5, "unpriced": 1}
    talk(before, [FinishedCall(calls[2])], [])
    assert before.spend() == json.loads(LEDGER.read_text()) == {"calls": 3, "tokens": 30, "usd": 0.5, "unpriced": 1}
    after = Limiter(LlmConfig(budget_usd=0.4), LEDGER)
    assert after.spend() == before.spend()
    with pytest.raises(BudgetSpent):
        talk(after, [], [Reservation(1, 10)])


def test_a_budget_that_is_used_up_is_written_at_once() -> None:
    clock = Clock()
    limiter = Limiter(LlmConfig(budget_usd=1.0), LEDGER, clock)
    (call,) = talk(limiter, [], [Reservation(1, 10)])
    with pytest.raises(BudgetSpent):
        talk(limiter, [FinishedCall(call, 10, 1.5)], [])
    assert json.loads(LEDGER.read_text())["usd"] == 1.5


def test_the_ledger_is_written_within_a_second_of_every_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """No later message is needed."""

    async def spending() -> None:
        clock = Clock()
        monkeypatch.setattr(asyncio.get_running_loop(), "time", clock)
        limiter = Limiter(LlmConfig(), LEDGER, clock)
        for usd in (0.5, 1.0):
            (call,) = await limiter.talk([], [Reservation(1, 10)])
            await limiter.talk([FinishedCall(call, 10, 0.5)], [])
            clock.now += 1.0
            for _ in range(2):  # timers that are due run behind what was ready before them
                await asyncio.sleep(0)
            assert json.loads(LEDGER.read_text())["usd"] == usd

    asyncio.run(spending())


def test_a_call_of_the_limiter_before_ends_quietly() -> None:
    before, after = (Limiter(LlmConfig(max_concurrent=1, tokens_per_minute=10), LEDGER) for _ in range(2))
    (old,) = talk(before, [], [Reservation(5, 10)])
    (new,) = talk(after, [], [Reservation(5, 10)])
    assert talk(after, [FinishedCall(old, 7, 0.5)], [Reservation(1, 10)]) == []  # the place is that of the new one
    assert after.spend()["usd"] == 0.5
    assert len(talk(after, [FinishedCall(new, 5, 0.5)], [Reservation(1, 10)])) == 1


@pytest.mark.seconds
@given(
    st.lists(st.tuples(st.floats(0, 40), st.integers(0, 60), st.integers(0, 5)), max_size=40),
    st.integers(1, 5),
    st.integers(1, 100),
)
def test_no_minute_holds_more_than_its_limits(steps: list[tuple[float, int, int]], requests: int, tokens: int) -> None:
    """Whenever a minute is looked at; calls take what they reserved, and one may be larger than the limit."""
    clock = Clock()
    limiter = Limiter(LlmConfig(requests_per_minute=requests, tokens_per_minute=tokens), LEDGER, clock)
    log: list[tuple[float, int]] = []
    for pause, size, number in steps:
        clock.now += pause
        log += [(clock.now, size)] * begun(limiter, *[size] * number)
        window = [used for at, used in log if clock.now - at < MINUTE]
        assert len(window) <= requests
        assert sum(window) <= tokens or len([used for used in window if used]) == 1


class Slow:
    """A Limiter's handle without Ray, whose answer comes when `answer` is set."""

    def __init__(self, config: LlmConfig) -> None:
        self.limiter = Limiter(config, LEDGER)
        self.talk = self
        self.answer = asyncio.Event()

    async def remote(self, ended: list[FinishedCall], wishes: list[Reservation]) -> list[int]:
        admission = await self.limiter.talk(ended, wishes)
        await self.answer.wait()
        return admission


async def settled(line: CallQueue) -> None:
    """Until the line has nothing more to say."""
    while line._talking is not None and not line._talking.done():
        await asyncio.sleep(0)


def test_a_call_that_was_cancelled_while_it_was_let_through_holds_no_place() -> None:
    async def cancel_during_the_talk() -> dict[int, float]:
        slow = Slow(LlmConfig())
        line = CallQueue(slow)
        call = asyncio.create_task(line.begin(Reservation(1, 60.0)))
        while not slow.limiter._running:
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.sleep(0)
        slow.answer.set()
        await settled(line)
        return slow.limiter._running

    assert asyncio.run(cancel_during_the_talk()) == {}


def test_a_call_that_was_cancelled_after_it_was_let_through_holds_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    async def cancel_after_the_talk() -> dict[int, float]:
        slow = Slow(LlmConfig())
        slow.answer.set()
        line = CallQueue(slow)
        call = asyncio.create_task(line.begin(Reservation(1, 60.0)))
        exchange = line._exchange

        async def exchange_and_cancel() -> None:
            await exchange()
            call.cancel()

        monkeypatch.setattr(line, "_exchange", exchange_and_cancel)
        with pytest.raises(asyncio.CancelledError):
            await call
        await settled(line)
        return slow.limiter._running

    assert asyncio.run(cancel_after_the_talk()) == {}


def test_a_call_that_was_cancelled_in_the_line_never_begins() -> None:
    async def cancel_in_the_line() -> dict[str, float]:
        slow = Slow(LlmConfig(max_concurrent=1))
        slow.answer.set()
        line = CallQueue(slow)
        first = await line.begin(Reservation(1, 60.0))
        waiting = asyncio.create_task(line.begin(Reservation(1, 60.0)))
        while not line._waiting:
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        line.end(FinishedCall(first, 10))
        await settled(line)
        return slow.limiter.spend()

    assert asyncio.run(cancel_in_the_line()) == {"calls": 1, "tokens": 10, "usd": 0.0, "unpriced": 0}


def test_a_call_whose_limiter_died_fails_with_that() -> None:
    async def lost(*_: Any) -> list[int]:
        raise RayActorError

    async def wait_in_line() -> None:
        await CallQueue(SimpleNamespace(talk=SimpleNamespace(remote=lost))).begin(Reservation(1, 60.0))

    with pytest.raises(LimiterDied, match="the limiter for language model calls died"):
        asyncio.run(asyncio.wait_for(wait_in_line(), 10))


def test_the_limiter_stays_on_its_node_and_is_restarted_however_often_it_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls are then made again; it takes no CPU from others, and its ledger has the same path from any folder."""
    options: dict[str, Any] = {}
    arguments: list[Any] = []

    def start(**settings: Any) -> Any:
        options.update(settings)
        return lambda cls: SimpleNamespace(options=named)

    def named(**settings: Any) -> Any:
        options.update(settings)
        return SimpleNamespace(remote=lambda *values: arguments.extend(values))

    context = SimpleNamespace(get_node_id=lambda: "ab" * 28)
    monkeypatch.setattr(limiters, "ray", SimpleNamespace(remote=start, get_runtime_context=lambda: context))
    limiters.start_limiter(LlmConfig(), LEDGER)
    place = options["scheduling_strategy"]
    assert (place.node_id, place.soft, options["num_cpus"]) == ("ab" * 28, False, 0)
    assert options["max_restarts"] == options["max_task_retries"] == -1, "without an end"
    assert arguments == [LlmConfig(), LEDGER.absolute()]


@pytest.mark.processes
@pytest.mark.parametrize("actor", [LlmConfig(max_concurrent=1)], indirect=True)
def test_a_limiter_that_is_killed_is_started_again_and_goes_on_from_its_ledger(actor: Any) -> None:
    async def calls() -> None:
        line = CallQueue(actor)
        line.end(FinishedCall(await line.begin(Reservation(1, 60.0)), 10, 0.25))
        await settled(line)
        spent = await actor.spend.remote()
        await line.begin(Reservation(1, 60.0))
        waiting = asyncio.create_task(line.begin(Reservation(1, 60.0)))
        below = psutil.Process().children(recursive=True)
        named = psutil.process_iter(["name"])  # which leaves out what has just ended
        (process,) = (p for p in named if p in below and p.info["name"].startswith("ray::Limiter"))
        process.kill()
        line.end(FinishedCall(await waiting, 10, 0.25))  # what the one before let through is forgotten
        await settled(line)
        assert (spent["usd"], (await actor.spend.remote())["usd"]) == (0.25, 0.5)

    asyncio.run(calls())


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    config = Config()
    config.rollout.workers = config.reward.workers = 1
    with ray_session(2):
        yield


@pytest.fixture
def actor(cluster: None, request: pytest.FixtureRequest) -> Iterator[Any]:
    handle = limiters.start_limiter(request.param, LEDGER)
    yield handle
    ray.kill(handle)


@ray.remote(num_cpus=0.01)
class Caller:
    """A process that makes calls, each of which takes 20 ms and 0.01 USD."""

    async def calls(self, count: int) -> int:
        line = CallQueue(ray.get_actor(limiters.NAME))

        async def make_call() -> None:
            call = await line.begin(Reservation(10, 60.0))
            await asyncio.sleep(0.02)
            line.end(FinishedCall(call, 10, 0.01))

        await asyncio.gather(*(make_call() for _ in range(count)))
        while line._finished or not line._talking.done():  # type: ignore[union-attr]
            await asyncio.sleep(0.01)
        return count


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("actor", [LlmConfig(max_concurrent=5)], indirect=True)
def test_processes_share_one_limiter(actor: Any) -> None:
    callers = [Caller.remote() for _ in range(3)]
    assert ray.get([caller.calls.remote(40) for caller in callers]) == [40] * 3
    assert ray.get(actor.spend.remote()) == {"calls": 120, "tokens": 1200, "usd": pytest.approx(1.2), "unpriced": 0}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("actor", [LlmConfig()], indirect=True)
def test_the_last_talk_of_all_is_written_too(actor: Any) -> None:
    (call,) = ray.get(actor.talk.remote([], [Reservation(1, 60.0)]))
    ray.get(actor.talk.remote([FinishedCall(call, 10, 0.5)], []))
    deadline = time.monotonic() + 60
    while not LEDGER.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert json.loads(LEDGER.read_text())["usd"] == 0.5


@pytest.mark.processes
@pytest.mark.parametrize("actor", [LlmConfig(budget_usd=0.05, max_concurrent=2)], indirect=True)
def test_a_spent_budget_comes_through_from_another_process(actor: Any) -> None:
    with pytest.raises(BudgetSpent, match=r"llm.budget_usd=0.05 is used up"):
        ray.get(Caller.remote().calls.remote(50))
    assert ray.get(actor.spend.remote())["calls"] <= 6


@pytest.mark.processes
@pytest.mark.parametrize("actor", [LlmConfig(max_concurrent=1)], indirect=True)
def test_a_dead_limiter_is_said(actor: Any) -> None:
    async def wait_in_line() -> None:
        line = CallQueue(actor)
        await line.begin(Reservation(1, 60.0))
        waiting = asyncio.create_task(line.begin(Reservation(1, 60.0)))
        await asyncio.sleep(0.05)
        ray.kill(actor)
        await waiting

    with pytest.raises(LimiterDied):
        asyncio.run(wait_in_line())


def test_a_queue_serves_one_event_loop_after_the_other(tmp_path: Path) -> None:
    """As of a command that runs twice in a process; calls wait in both."""
    queue = CallQueue(limiters.local_limiter(LlmConfig(max_concurrent=1), tmp_path / "spend.json"))

    async def call() -> None:
        number = await queue.begin(Reservation(1, 5.0))
        await asyncio.sleep(0)
        queue.end(FinishedCall(number, 1))

    async def calls() -> None:
        await asyncio.gather(call(), call())
        assert queue._talking
        await queue._talking

    for _ in range(2):
        asyncio.run(calls())


def test_a_process_has_no_more_calls_than_half_its_open_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, virtual_time: None
) -> None:
    """Without llm.max_concurrent all others begin as soon as one ends, also one that was given up."""
    monkeypatch.setattr(limiters.resource, "getrlimit", lambda kind: (6, 6))
    most = running = 0

    async def call(queue: CallQueue, fails: bool) -> None:
        nonlocal most, running
        number = await queue.begin(Reservation(1, 100.0))
        running += 1
        most = max(most, running)
        await asyncio.sleep(1.0)
        running -= 1
        queue.end(FinishedCall(number, None if fails else 1))

    async def calls() -> float:
        queue = CallQueue(limiters.local_limiter(LlmConfig(), tmp_path / "spend.json"))
        await asyncio.gather(*(call(queue, number % 2 == 0) for number in range(12)))
        return asyncio.get_running_loop().time()

    assert asyncio.run(calls()) == pytest.approx(4.0, abs=0.5) and most == 3
