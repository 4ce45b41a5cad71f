"""The metrics here stand in for registered ones: in this process and in the workers alike."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from megatron_collab.config import Config, LlmConfig, RewardConfig, RunConfig
from megatron_collab.llm import limiter
from megatron_collab.llm.limiter import BudgetSpent
from megatron_collab.reward import metrics
from megatron_collab.reward import workers as loop
from megatron_collab.reward.metrics import Metric, NoOptions
from megatron_collab.reward.workers import Job, RewardClient, RewardWorker, Scores, chunks, ray_session, start_actor
from megatron_collab.runtime.process import RunStopped
from megatron_collab.types import Conversation, Ending, Finish, Message, Missing, Score, Task, Turn

TASK = Task("t", (Message("user", "hi"),), "goal", "answer", "testing")
WEIGHTS = {"asks": 1.0, "token_amount": -0.1}


def ended(text: str, ending: Ending = Ending.TURN_LIMIT, error: str = "") -> Conversation:
    ids = tuple(range(len(text)))
    turn = Turn((1,), ids, (-1.0,) * len(ids), (0,) * len(ids), Finish.STOP, text)
    return Conversation(TASK.messages, (1,)).add_turn(turn).end(ending, error)


class Length(Metric):
    """Characters of the reply, at once."""

    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        return float(len(conversation.replies[-1]))


class Process(Metric):
    """The process that scores, a little later."""

    seconds = 0.3

    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        await asyncio.sleep(self.seconds)
        return float(os.getpid())


class Careless(Metric):
    """Says that it costs nothing, and takes an hour for a reply that begins with "never"."""

    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        if conversation.replies[-1].startswith("never"):
            await asyncio.sleep(3600)
        return 1.0


class Slow(Careless):
    """The same, but known to take long."""

    seconds = 5.0


class Buggy(Metric):
    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        raise TimeoutError("a bug") if conversation.replies[-1] == "timeout" else KeyError("a bug")


class Broke(Metric):
    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        raise BudgetSpent("llm.budget_usd=1 is used up")


class Judged(Metric):
    """Whether there is a judge with a limiter."""

    @classmethod
    def judged(cls, options: Any) -> bool:
        return True

    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        return float(self.judge.client._line is not None)


METRICS = (Length, Process, Careless, Slow, Buggy, Broke, Judged)


def split(name: str, settings: dict[str, Any]) -> tuple[type[Metric], Any]:
    return {kind.__name__.lower(): kind for kind in METRICS}[name], NoOptions()


class TestingWorker(RewardWorker):
    """A RewardWorker, of a class that pytest leaves alone, with the metrics of this file."""

    __test__ = False

    def __init__(self, config: Config) -> None:
        metrics.split = split
        super().__init__(config)

    async def pid(self) -> int:
        return os.getpid()


class Asker:
    """Asks as a ConversationWorker does: from a Ray actor."""

    def __init__(self, workers: list[str], config: RewardConfig) -> None:
        metrics.split = split
        self.client = RewardClient([ray.get_actor(name) for name in workers], config)

    async def score(self, text: str) -> Scores:
        return await self.client.score(TASK, ended(text))


def settings(*names: str, **options: Any) -> RewardConfig:
    return RewardConfig(weights=dict.fromkeys(names, 1.0), **options)


@pytest.fixture
def of_this_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "split", split)


@pytest.mark.parametrize("failures", [2, loop.STARTS])
def test_a_start_of_ray_that_fails_is_tried_again_and_leaves_no_process(
    failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def init(address: str, **options: object) -> None:
        started.append(subprocess.Popen(["sleep", "600"]))
        if len(started) <= failures:
            raise Exception("the current node timed out during startup")

    monkeypatch.setattr(loop, "ray", SimpleNamespace(init=init, shutdown=lambda: None))
    before = subprocess.Popen(["sleep", "600"])
    try:
        with nullcontext() if failures < loop.STARTS else pytest.raises(RunStopped, match=r"3 times .* timed out"):
            loop._start_ray(num_cpus=1)
        assert [process.wait(30) for process in started[:failures]] == [-signal.SIGKILL] * failures
        assert all(process.poll() is None for process in [before, *started[failures:]])
    finally:
        for process in [before, *started]:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def session() -> Iterator[None]:
    with ray_session(Config(reward=RewardConfig(workers=2))):
        yield


def test_workers_have_the_priority_of_who_started_ray(session: None) -> None:
    assert ray.get(ray.remote(lambda: os.nice(0)).options(num_cpus=0).remote()) == os.nice(0)


ALL = settings("length", "process", "careless", "slow", concurrency=4)


@pytest.fixture(scope="module")
def started(session: None) -> list[Any]:
    return [start_actor(TestingWorker, Config(reward=ALL)) for _ in range(2)]


@pytest.fixture
def workers(started: list[Any], of_this_file: None) -> list[Any]:
    """Two of them, up; Ray starts each again three times in all."""
    ray.get([worker.ready.remote() for worker in started], timeout=60)
    return started


def ask_all(client: RewardClient, *texts: str) -> list[Scores]:
    async def scores() -> list[Scores]:
        return await asyncio.gather(*(client.score(TASK, ended(text)) for text in texts))

    return asyncio.run(scores())


# Requests


def test_jobs_are_put_in_requests_by_their_cost() -> None:
    assert chunks([]) == []
    assert chunks([1 / 64] * 128) == [list(range(64)), list(range(64, 128))]
    assert chunks([0.3] * 7) == [[0, 1, 2], [3, 4, 5], [6]]
    assert chunks([10.0, 10.0]) == [[0], [1]], "a judge's score goes alone"
    assert chunks([1 / 64, 10.0, 1 / 64, 0.5, 10.0]) == [[1], [4], [3, 0, 2]], "what costs nothing stays together"


# The worker, without Ray


def score(worker: RewardWorker, *texts: str) -> list[Scores]:
    async def scores() -> list[Scores]:
        jobs = [Job(tuple(worker.metrics), TASK, ended(text)) for text in texts]
        found: dict[int, Scores] = {}
        async for some in worker.score(jobs):
            assert not found.keys() & some.keys()
            found |= some
        return [found[index] for index in range(len(jobs))]

    return asyncio.run(scores())


def test_every_conversation_gets_the_scores_of_every_metric_that_applies() -> None:
    worker = RewardWorker(Config(reward=RewardConfig(weights={**WEIGHTS, "booking_right": 1.0})))
    assert score(worker, "why?", "so") == [{"asks": 1.0, "token_amount": 4.0}, {"asks": 0.0, "token_amount": 2.0}]


def test_a_metric_has_the_settings_of_its_name_and_no_judge_where_it_needs_none() -> None:
    config = RewardConfig(weights={"words": 1.0}, metrics={"words": {"metric": "token_amount", "count": "words"}})
    metric = RewardWorker(Config(reward=config)).metrics["words"]
    assert (metric.options.count, metric.judge) == ("words", None)


def test_a_metric_that_takes_too_long_is_missing_and_the_others_are_not(of_this_file: None) -> None:
    worker = RewardWorker(Config(reward=settings("length", "slow", timeout=0.05)))
    late = Missing("no score within reward.timeout=0.05 s")
    assert score(worker, "never", "now") == [{"length": 5.0, "slow": late}, {"length": 3.0, "slow": 1.0}]


def test_waiting_for_others_does_not_count_as_taking_long(of_this_file: None) -> None:
    worker = RewardWorker(Config(reward=settings("process", concurrency=1, timeout=1.0)))
    assert score(worker, *"abcdef") == [{"process": os.getpid()}] * 6


def test_a_worker_makes_as_many_scores_at_once_as_it_may(of_this_file: None, monkeypatch: pytest.MonkeyPatch) -> None:
    now, most = 0, 0

    async def counting(self: Metric, task: Task, conversation: Conversation) -> Score | None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1
        return 1.0

    monkeypatch.setattr(Process, "score", counting)
    score(RewardWorker(Config(reward=settings("process", concurrency=3))), *"abcdefgh")
    assert most == 3


def test_a_slow_metric_takes_no_place_from_another(of_this_file: None) -> None:
    """With one place each, a judge that hangs in one conversation leaves the other metrics of all others alone."""
    worker = RewardWorker(Config(reward=settings("slow", "process", concurrency=1)))

    async def first() -> dict[int, Scores]:
        jobs = [Job(("slow",), TASK, ended("never")), Job(("process",), TASK, ended("now"))]
        return await anext(worker.score(jobs))

    assert asyncio.run(first()) == {1: {"process": os.getpid()}}


@pytest.mark.parametrize(("text", "kind"), [("key", KeyError), ("timeout", TimeoutError)])
def test_a_bug_in_a_metric_is_raised(of_this_file: None, text: str, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="a bug"):
        score(RewardWorker(Config(reward=settings("length", "buggy"))), text)


# The client, with workers that are none


class LocalWorker:
    """The handle of a RewardWorker without Ray; with a fault it raises that, silent it never says anything."""

    def __init__(self, fault: Exception | None = None, silent: bool = False) -> None:
        self.fault = fault
        self.silent = silent
        self.requests: list[list[Job]] = []
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
            reply.set_result({index: {name: float(len(job.conversation.replies[-1])) for name in job.names}})
            yield reply


def test_conversations_that_end_together_share_requests_and_keep_their_scores(of_this_file: None) -> None:
    worker, texts = LocalWorker(), ["x" * n for n in range(1, 40)]
    client = RewardClient([worker], settings("slow", "length", "careless"))
    assert ask_all(client, *texts) == [dict.fromkeys(("length", "careless", "slow"), n) for n in range(1, 40)]
    names = [[job.names for job in request] for request in worker.requests]
    assert names == [[("slow",)]] * 39 + [[("length", "careless")] * 39]


def test_half_a_conversation_has_no_scores_and_costs_no_call() -> None:
    worker = LocalWorker()
    client = RewardClient([worker], RewardConfig(weights=WEIGHTS))
    scores = asyncio.run(client.score(TASK, ended("why?", Ending.ERROR, "user is down")))
    assert scores == {"asks": Missing("user is down"), "token_amount": Missing("user is down")}
    assert worker.requests == []


def test_the_worker_with_the_least_to_do_gets_the_next_request(of_this_file: None) -> None:
    busy, idle = LocalWorker(silent=True), LocalWorker()
    client = RewardClient([busy, idle], settings("slow"))

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
    client = RewardClient(three, RewardConfig(weights=WEIGHTS))

    async def scores() -> None:
        for text in "abcdef":
            await client.score(TASK, ended(text))

    asyncio.run(scores())
    assert [len(worker.requests) for worker in three] == [2, 2, 2]


@pytest.mark.parametrize(
    ("worker", "why"),
    [
        (LocalWorker(fault=RayActorError()), "the RewardWorkers died"),
        (LocalWorker(silent=True), "no sign of life within 0.1 s (twice reward.timeout)"),
    ],
)
def test_without_a_worker_scores_are_missing(worker: LocalWorker, why: str) -> None:
    client = RewardClient([worker], RewardConfig(weights=WEIGHTS, timeout=0.05))
    (scores,) = ask_all(client, "one")
    assert set(scores) == set(WEIGHTS)
    assert all(isinstance(score, Missing) and why in score.why for score in scores.values())


def test_a_worker_that_is_stuck_is_not_asked_again() -> None:
    stuck, other = LocalWorker(silent=True), LocalWorker()
    client = RewardClient([stuck, other], RewardConfig(weights=WEIGHTS, timeout=0.05))

    async def scores() -> list[Scores]:
        return [await client.score(TASK, ended(text)) for text in ("one", "two", "three", "four")]

    first, *rest = asyncio.run(scores())
    assert all(isinstance(score, Missing) for score in first.values())
    assert rest == [dict.fromkeys(WEIGHTS, n) for n in (3, 5, 4)]


# On Ray


@pytest.mark.parametrize("name", ["slow", "careless"])
def test_a_slow_judge_blocks_nobody(workers: list[Any], name: str) -> None:
    """Not even those whose scores were asked for in the same request."""
    client = RewardClient(workers, settings("length", name, concurrency=4))

    async def scores() -> tuple[list[Scores], bool]:
        slow = asyncio.create_task(client.score(TASK, ended("never")))
        others = await asyncio.gather(*(client.score(TASK, ended("x" * n)) for n in range(1, 100)))
        waits = not slow.done()
        slow.cancel()
        return others, waits

    assert asyncio.run(scores()) == ([{"length": n, name: 1.0} for n in range(1, 100)], True)


@pytest.mark.parametrize("for_good", [False, True])
def test_the_work_of_a_worker_that_dies_is_done_elsewhere(workers: list[Any], for_good: bool) -> None:
    """One of two is killed with half of the work in its hands: every score arrives, from one that lives."""
    dies = start_actor(TestingWorker, Config(reward=ALL)) if for_good else workers[0]
    doomed, other = ray.get([worker.pid.remote() for worker in (dies, workers[1])], timeout=60)
    client = RewardClient([dies, workers[1]], settings("process", concurrency=4))

    async def scores() -> list[Scores]:
        asked = [asyncio.create_task(client.score(TASK, ended(str(i)))) for i in range(80)]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        if for_good:
            ray.kill(dies)
        else:
            os.kill(doomed, signal.SIGKILL)
        return await asyncio.gather(*asked)

    made = Counter(score for scores in asyncio.run(scores()) for score in scores.values())
    assert made.total() == 80
    assert not any(isinstance(score, Missing) for score in made)
    assert made[doomed] < 40 < made[other]


def test_a_worker_that_ray_starts_again_is_waited_for(workers: list[Any]) -> None:
    alone = workers[:1]
    client = RewardClient(alone, settings("length", concurrency=4))
    before = ray.get(alone[0].pid.remote())
    os.kill(before, signal.SIGKILL)
    assert ask_all(client, "a", "bb") == [{"length": 1.0}, {"length": 2.0}]
    assert ray.get(alone[0].pid.remote()) != before


def test_a_worker_that_stood_still_is_asked_again_once_it_goes_on(workers: list[Any]) -> None:
    client = RewardClient(workers, settings("process", timeout=1.0))
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
    assert "no sign of life within 2 s" in missing[0].why
    assert after == {still, other}


@pytest.mark.parametrize(("name", "error"), [("buggy", KeyError), ("broke", BudgetSpent)])
def test_what_a_metric_raises_reaches_the_trainer(session: None, of_this_file: None, name: str, error: type) -> None:
    """From the RewardWorker through the ConversationWorker: neither a bug nor a spent budget is an outage."""
    config = settings("length", name)
    scorer = start_actor(TestingWorker, Config(reward=config), name=f"scores-{name}")
    asker = start_actor(Asker, [f"scores-{name}"], config)
    with pytest.raises(error, match=r"a bug|llm\.budget_usd=1 is used up"):
        ray.get(asker.score.remote("one"), timeout=60)
    del scorer


def test_a_judge_keeps_to_the_limiter_and_remembers(session: None, tmp_path: Path) -> None:
    keeps_alive = limiter.start(LlmConfig(), tmp_path / "spend.json")
    config = Config(reward=settings("judged"), run=RunConfig(dir=str(tmp_path)))
    worker = start_actor(TestingWorker, config)

    async def scores() -> list[Any]:
        stream = worker.score.remote([Job(("judged",), TASK, ended("one"))])
        return [await some async for some in stream]

    assert asyncio.run(scores()) == [{0: {"judged": 1.0}}]
    assert list((tmp_path / "llm_cache").iterdir())
    del keeps_alive
