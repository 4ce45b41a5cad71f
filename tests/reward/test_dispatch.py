"""RewardClient, with workers in this process and on Ray."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from megatron_collab.launch.play_specs import reward_spec
from megatron_collab.llm.limiter import BudgetSpent
from megatron_collab.reward.workers import Job, RewardClient, Scored, Scores
from megatron_collab.runtime.ray_cluster import start_actor
from megatron_collab.settings import LlmConfig, RewardConfig
from megatron_collab.types import Ending, Judgment, Message, Missing, Score
from tests.reward.stand_ins import TASK, WEIGHTS, Asker, TestingWorker, ended, settings

ALL = settings("length", "process", "slow", concurrency=4)


@pytest.fixture(scope="module")
def started(session: None) -> list[Any]:
    return [start_actor(TestingWorker, reward_spec(ALL), LlmConfig(), Path("unused")) for _ in range(2)]


@pytest.fixture
def workers(started: list[Any]) -> list[Any]:
    """Two running workers; Ray restarts each at most three times."""
    ray.get([worker.ready.remote() for worker in started], timeout=60)
    return started


def ask_all(client: RewardClient, *texts: str) -> list[Scores]:
    async def scores() -> list[Scores]:
        return await asyncio.gather(*(client.score(TASK, ended(text)) for text in texts))

    return asyncio.run(scores())


# With workers in this process


class LocalWorker:
    """The handle of a RewardWorker without Ray; it raises `fault` if set, and never answers if `silent`."""

    def __init__(self, fault: Exception | None = None, silent: bool = False) -> None:
        self.fault = fault
        self.silent = silent
        self.requests: list[list[Job]] = []
        self.judgments: dict[str, Judgment] = {}
        self.score = self.ready = self

    def remote(self, jobs: Sequence[Job] = ()) -> Any:
        return self._score(list(jobs)) if jobs else self._ready()

    async def _ready(self) -> None:
        await asyncio.sleep(3600 if self.silent else 0)
        if self.fault:
            raise self.fault

    async def _score(self, jobs: list[Job]) -> AsyncIterator[Any]:
        self.requests.append(jobs)
        await asyncio.sleep(3600 if self.silent else 0)
        if self.fault:
            raise self.fault
        for index, job in enumerate(jobs):
            reply = asyncio.get_running_loop().create_future()
            scores: Scores = {name: float(len(job.conversation.replies[-1])) for name in job.names}
            reply.set_result({index: Scored(scores, self.judgments)})
            yield reply


def test_a_future_has_its_judgments_and_metrics_see_no_private_notes() -> None:
    worker = LocalWorker()
    worker.judgments = {"length": Judgment("short", "{}")}
    client = RewardClient([worker], reward_spec(settings("length")))
    notes = {"thought": "a secret"}
    played = ended("hi")
    played = replace(played, messages=(*played.messages, Message("user", "bye", private=notes)))
    opened = TASK.play_on(Message("user", "hello", private=notes))
    future = asyncio.run(client.future(opened, played))
    assert (future.scores, future.judgments) == ({"length": 2.0}, worker.judgments)
    assert future.conversation.messages[-1].private == notes
    ((job,),) = worker.requests
    assert (job.task, job.conversation) == (opened, played), "all else"
    assert "a secret" not in f"{pickle.dumps(job)!r}"


def test_conversations_that_end_together_share_requests_and_keep_their_scores() -> None:
    workers, texts = [LocalWorker(), LocalWorker()], ["x" * n for n in range(1, 41)]
    client = RewardClient(workers, reward_spec(settings("slow", "length")))
    assert ask_all(client, *texts) == [dict.fromkeys(("length", "slow"), n) for n in range(1, 41)]
    assert [[len(request) for request in worker.requests] for worker in workers] == [[20], [20]]


@pytest.mark.usefixtures("virtual_time")
def test_no_more_is_sent_than_the_workers_make_within_four_rounds() -> None:
    worker = LocalWorker(silent=True)
    client = RewardClient([worker], reward_spec(settings("length", concurrency=2)))

    async def scores() -> None:
        waiting = [asyncio.create_task(client.score(TASK, ended(str(i)))) for i in range(20)]
        await asyncio.sleep(0.05)
        for task in waiting:
            task.cancel()

    asyncio.run(scores())
    assert [len(request) for request in worker.requests] == [8]


def test_half_a_conversation_has_no_scores_and_costs_no_call() -> None:
    worker = LocalWorker()
    client = RewardClient([worker], reward_spec(RewardConfig(weights=WEIGHTS)))
    scores = asyncio.run(client.score(TASK, ended("why?", Ending.ERROR, "user is down")))
    assert scores == {"asks": Missing("user is down"), "token_amount": Missing("user is down")}
    assert worker.requests == []


@pytest.mark.usefixtures("virtual_time")
def test_the_worker_with_the_least_to_do_gets_the_next_request() -> None:
    busy, idle = LocalWorker(silent=True), LocalWorker()
    client = RewardClient([busy, idle], reward_spec(settings("slow")))

    async def scores() -> None:
        waiting = asyncio.create_task(client.score(TASK, ended("first")))
        await asyncio.sleep(0.01)
        for text in "abcde":
            await client.score(TASK, ended(text))
        waiting.cancel()

    asyncio.run(scores())
    assert (len(busy.requests), len(idle.requests)) == (1, 5)


def test_idle_workers_take_turns() -> None:
    three = [LocalWorker(), LocalWorker(), LocalWorker()]
    client = RewardClient(three, reward_spec(RewardConfig(weights=WEIGHTS)))

    async def scores() -> None:
        for text in "abcdef":
            await client.score(TASK, ended(text))

    asyncio.run(scores())
    assert [len(worker.requests) for worker in three] == [2, 2, 2]


@pytest.mark.usefixtures("virtual_time")
@pytest.mark.parametrize(
    ("worker", "why"),
    [
        (LocalWorker(fault=RayActorError()), "the RewardWorkers died"),
        (LocalWorker(silent=True), "no heartbeat within 0.1 s (twice reward.timeout)"),
    ],
)
def test_without_a_worker_scores_are_missing(worker: LocalWorker, why: str) -> None:
    client = RewardClient([worker], reward_spec(RewardConfig(weights=WEIGHTS, timeout=0.05)))
    (scores,) = ask_all(client, "one")
    assert set(scores) == set(WEIGHTS)
    assert all(isinstance(score, Missing) and why in score.why for score in scores.values())


@pytest.mark.usefixtures("virtual_time")
def test_a_stuck_worker_gets_no_more_requests() -> None:
    stuck, other = LocalWorker(silent=True), LocalWorker()
    client = RewardClient([stuck, other], reward_spec(RewardConfig(weights=WEIGHTS, timeout=0.05)))

    async def scores() -> list[Scores]:
        return [await client.score(TASK, ended(text)) for text in ("one", "two", "three", "four")]

    first, *later = asyncio.run(scores())
    assert all(isinstance(score, Missing) for score in first.values())
    assert later == [dict.fromkeys(WEIGHTS, n) for n in (3, 5, 4)]


# On Ray


@pytest.mark.processes
def test_a_slow_judge_does_not_block_other_scores(workers: list[Any]) -> None:
    """Not even the scores that were requested in the same call."""
    client = RewardClient(workers, reward_spec(settings("length", "slow", concurrency=4)))

    async def scores() -> tuple[list[Scores], bool]:
        slow = asyncio.create_task(client.score(TASK, ended("never")))
        fast = await asyncio.gather(*(client.score(TASK, ended("x" * n)) for n in range(1, 100)))
        waits = not slow.done()
        slow.cancel()
        return fast, waits

    assert asyncio.run(scores()) == ([{"length": n, "slow": 1.0} for n in range(1, 100)], True)


@pytest.mark.processes
@pytest.mark.parametrize("for_good", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_work_of_a_worker_that_dies_is_done_elsewhere(workers: list[Any], for_good: bool) -> None:
    """One of two workers is killed while it holds half of the work: every score arrives, from the living one."""
    dies = start_actor(TestingWorker, reward_spec(ALL), LlmConfig(), Path("unused")) if for_good else workers[0]
    doomed, other = ray.get([worker.pid.remote() for worker in (dies, workers[1])], timeout=60)
    client = RewardClient([dies, workers[1]], reward_spec(settings("process", concurrency=4)))

    async def scores() -> list[Scores]:
        tasks = [asyncio.create_task(client.score(TASK, ended(str(i)))) for i in range(80)]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if for_good:
            ray.kill(dies)
        else:
            os.kill(doomed, signal.SIGKILL)
        return await asyncio.gather(*tasks)

    counts = Counter(score for scores in asyncio.run(scores()) for score in scores.values())
    assert counts.total() == 80
    assert not any(isinstance(score, Missing) for score in counts)
    assert counts[doomed] < 40 < counts[other]


@pytest.mark.slow
@pytest.mark.processes
def test_a_worker_that_ray_starts_again_is_waited_for(workers: list[Any]) -> None:
    alone = workers[:1]
    client = RewardClient(alone, reward_spec(settings("length", concurrency=4)))
    before = ray.get(alone[0].pid.remote())
    os.kill(before, signal.SIGKILL)
    assert ask_all(client, "a", "bb") == [{"length": 1.0}, {"length": 2.0}]
    assert ray.get(alone[0].pid.remote()) != before


@pytest.mark.slow
@pytest.mark.processes
def test_a_paused_worker_gets_requests_again_once_it_resumes(workers: list[Any]) -> None:
    client = RewardClient(workers, reward_spec(settings("process", timeout=2.0)))
    still, other = ray.get([worker.pid.remote() for worker in workers])

    async def scores() -> tuple[list[Scores], set[Score]]:
        os.kill(still, signal.SIGSTOP)
        during = await asyncio.gather(*(client.score(TASK, ended(str(i))) for i in range(6)))
        os.kill(still, signal.SIGCONT)
        await asyncio.wait(client._down)
        after = await asyncio.gather(*(client.score(TASK, ended(str(i))) for i in range(6)))
        return during, {scores["process"] for scores in after}

    during, after = asyncio.run(scores())
    missing = [scores["process"] for scores in during if isinstance(scores["process"], Missing)]
    assert len(missing) == 3
    assert "no heartbeat within 4 s" in missing[0].why
    assert after == {still, other}


@pytest.mark.processes
def test_a_spent_budget_reaches_the_trainer(session: None) -> None:
    """From the RewardWorker through the ConversationWorker; it does not count as a failure of one task."""
    config = settings("length", "broke")
    scorer = start_actor(TestingWorker, reward_spec(config), LlmConfig(), Path("unused"), name="scores-broke")
    asker = start_actor(Asker, ["scores-broke"], config)
    with pytest.raises(BudgetSpent, match=r"llm\.budget_usd=1 is used up"):
        ray.get(asker.score.remote("one"), timeout=60)
    del scorer
