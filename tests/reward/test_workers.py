"""RewardWorker, without Ray but for the judge."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from megatron_collab.launch.play_specs import reward_spec
from megatron_collab.llm import limiter
from megatron_collab.llm.served import ServedModel
from megatron_collab.reward.metrics import Metric
from megatron_collab.reward.workers import Job, RewardWorker, Scored, Scores
from megatron_collab.runtime import keys
from megatron_collab.runtime.ray_cluster import start_actor
from megatron_collab.settings import LlmConfig, RewardConfig
from megatron_collab.types import Conversation, Ending, Judgment, Message, Missing, Score, Task
from tests.reward.stand_ins import TASK, WEIGHTS, Process, TestingWorker, ended, settings, worker_of


def score(worker: RewardWorker, *texts: str) -> list[Scores]:
    async def scores() -> list[Scores]:
        jobs = [Job(tuple(worker.metrics), TASK, ended(text)) for text in texts]
        results: dict[int, Scores] = {}
        async for batch in worker.score(jobs):
            assert not results.keys() & batch.keys()
            results |= {index: scored.scores for index, scored in batch.items()}
        return [results[index] for index in range(len(jobs))]

    return asyncio.run(scores())


def test_every_conversation_gets_the_scores_of_every_metric_that_applies() -> None:
    right = "megatron_collab.environments.booking_metrics:BookingRight"
    worker = worker_of(RewardConfig(weights={**WEIGHTS, right: 1.0}))
    assert score(worker, "why?", "so") == [{"asks": 1.0, "token_amount": 4.0}, {"asks": 0.0, "token_amount": 2.0}]


def test_scores_of_turns_come_with_their_sum() -> None:
    worker = worker_of(settings("turns"))
    two = ended("why").add_messages([Message("user", "so")], ()).end(Ending.TURN_LIMIT)
    two = replace(two, token_ids=(1,)).add_turn(ended("short now").turns[0])

    async def scored() -> list[Scored]:
        jobs = [Job(("turns",), TASK, conversation) for conversation in (two, ended("short"))]
        results = {index: of_one async for batch in worker.score(jobs) for index, of_one in batch.items()}
        return [results[0], results[1]]

    first, second = asyncio.run(scored())
    assert (first.scores, first.turn_scores) == ({"turns": 12.0}, {"turns": (3.0, 9.0)})
    message = "metric turns: ValueError: 0 scores of 1 turns; give a number for each"
    assert (second.scores, second.turn_scores) == ({"turns": Missing(message)}, {})
    metric = worker.metrics["turns"]
    assert asyncio.run(metric.score(TASK, two)) == 12.0, "the score is the sum for other callers too"


def test_a_metric_has_the_settings_of_its_name_and_no_judge_where_it_needs_none() -> None:
    config = RewardConfig(weights={"words": 1.0}, metrics={"words": {"metric": "token_amount", "count": "words"}})
    metric = worker_of(config).metrics["words"]
    assert (metric.options.count, metric.judge) == ("words", None)


def test_a_judge_has_the_runs_limits_cache_prices_and_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    actors: list[str] = []
    monkeypatch.setattr(ray, "get_actor", lambda name: actors.append(name) or f"handle of {name}")
    monkeypatch.delenv(keys.FILE, raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-judge")
    keys.put_away()
    assert "OPENAI_API_KEY" not in os.environ
    llm = LlmConfig(prices={"openai/judge": [1.0, 2.0]})
    for folder, options in ((tmp_path / "llm_cache", llm), (tmp_path / "own", replace(llm, cache=f"{tmp_path}/own"))):
        client = RewardWorker(reward_spec(settings("judged")), options, tmp_path).metrics["judged"].judge.client
        assert actors.pop() == limiter.NAME and client._queue._limiter == f"handle of {limiter.NAME}"
        assert list(folder.glob("*.sqlite")) and client._prices.at_most("openai/judge", 1_000_000, 0) == 1.0
    assert actors == [] and os.environ["OPENAI_API_KEY"] == "sk-of-the-judge"


def test_what_the_run_serves_is_asked_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("no_proxy", "NO_PROXY")
    for name in names:
        monkeypatch.setenv(name, "example.org")
    served = {"m": ServedModel("/m", (("http://10.1.0.7:20000", "k"),))}
    worker_of(settings("token_amount"), served=served)
    assert {os.environ[name] for name in names} == {"example.org,localhost,127.0.0.1,::1,10.1.0.7"}


@pytest.mark.usefixtures("virtual_time")
def test_a_metric_that_takes_too_long_is_missing_and_the_others_are_not() -> None:
    worker = worker_of(settings("length", "slow", timeout=0.05))
    late = Missing("no score within reward.timeout=0.05 s")
    assert score(worker, "never", "now") == [{"length": 5.0, "slow": late}, {"length": 3.0, "slow": 1.0}]


@pytest.mark.usefixtures("virtual_time")
def test_waiting_for_others_does_not_count_as_taking_long() -> None:
    worker = worker_of(settings("process", concurrency=1, timeout=1.0))
    assert score(worker, *"abcdef") == [{"process": os.getpid()}] * 6


@pytest.mark.usefixtures("virtual_time")
def test_a_worker_makes_as_many_scores_at_once_as_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    now, most = 0, 0

    async def counting(self: Metric, task: Task, conversation: Conversation) -> Score | None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1
        return 1.0

    monkeypatch.setattr(Process, "score", counting)
    score(worker_of(settings("process", concurrency=3)), *"abcdefgh")
    assert most == 3


@pytest.mark.usefixtures("virtual_time")
def test_a_slow_metric_takes_no_place_from_another() -> None:
    """With one slot per metric, a judge that hangs in one conversation does not block the other metrics."""
    worker = worker_of(settings("slow", "process", concurrency=1))

    async def first() -> dict[int, Scored]:
        jobs = [Job(("slow",), TASK, ended("never")), Job(("process",), TASK, ended("now"))]
        return await anext(worker.score(jobs))

    assert asyncio.run(first()) == {1: Scored({"process": os.getpid()})}


def test_a_metric_of_ones_own_hands_over_its_reason_and_others_need_not() -> None:
    worker = worker_of(settings("length", "reasoned"))

    async def scored() -> dict[int, Scored]:
        jobs = [Job(tuple(worker.metrics), TASK, ended(text)) for text in ("why?", "so")]
        return {index: result async for batch in worker.score(jobs) for index, result in batch.items()}

    assert asyncio.run(scored()) == {
        0: Scored({"length": 4.0, "reasoned": 1.0}, {"reasoned": Judgment("replied why?")}),
        1: Scored({"length": 2.0, "reasoned": 1.0}, {"reasoned": Judgment("replied so")}),
    }


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("key", "metric buggy: KeyError: 'a bug'"),
        ("timeout", "metric buggy: TimeoutError: a bug"),
        ("deep", "metric buggy: RecursionError: maximum recursion depth exceeded"),
        ("nan", "metric buggy: ValueError: a score of nan; give a finite number, None or Missing"),
        ("text", "metric buggy: ValueError: could not convert string to float: 'high'"),
    ],
)
def test_whatever_a_metric_raises_is_a_missing_score_and_the_others_stand(text: str, why: str) -> None:
    worker = worker_of(settings("length", "buggy"))
    bad, good = score(worker, text, "good")
    missing = bad.pop("buggy")
    assert isinstance(missing, Missing) and missing.why.startswith(why)
    assert (bad, good) == ({"length": len(text)}, {"length": 4.0, "buggy": 1.0})
    assert asyncio.run(worker.take_counters()) == {"buggy_failed": 1}


@pytest.mark.slow
@pytest.mark.processes
def test_a_judge_keeps_to_the_limiter_and_remembers(session: None, tmp_path: Path) -> None:
    keeps_alive = limiter.start_limiter(LlmConfig(), tmp_path / "spend.json")
    worker = start_actor(TestingWorker, reward_spec(settings("judged")), LlmConfig(), tmp_path)

    async def scores() -> list[Any]:
        stream = worker.score.remote([Job(("judged",), TASK, ended("one"))])
        return [await item async for item in stream]

    assert asyncio.run(scores()) == [{0: Scored({"judged": 1.0})}]
    assert list((tmp_path / "llm_cache").iterdir())
    del keeps_alive
