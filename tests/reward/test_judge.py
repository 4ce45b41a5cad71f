from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.llm import client as clients
from megatron_collab.llm.answer import Field
from megatron_collab.llm.cache import Cache
from megatron_collab.llm.client import LlmClient
from megatron_collab.llm.limiter import BudgetSpent
from megatron_collab.reward.metrics import Judge
from megatron_collab.types import Missing
from tests.llm.endpoint import Endpoint, Reply, fails, says

SCORE = [Field("score", float, 0.0, 1.0)]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "dummy")
    monkeypatch.setattr(clients, "_FIRST_PAUSE", 0.0)


def judge(client: LlmClient, *replies: Reply, **options: Any) -> tuple[Any, list[dict[str, Any]]]:
    """The judge's answer to "Good?", and the requests that arrived."""

    async def run() -> tuple[Any, list[dict[str, Any]]]:
        async with Endpoint(*replies) as endpoint:
            return await Judge(client, endpoint.config(attempts=2)).ask("Good?", SCORE, **options), endpoint.requests

    return asyncio.run(run())


def test_a_judge_is_asked_in_one_message() -> None:
    scores, (request,) = judge(LlmClient(), says({"score": 0}))
    assert scores == {"score": 0.0}
    assert request["messages"] == [{"role": "user", "content": "Good?"}]


def test_a_metric_may_ask_another_model() -> None:
    _, (request,) = judge(LlmClient(), says({"score": 0}), model="openai/other")
    assert request["model"] == "other"


@pytest.mark.parametrize("reply", [fails(503, "out of order"), fails(401, "out of order"), says("out of order")])
def test_an_outage_is_missing_with_its_reason_and_no_score(reply: Reply) -> None:
    score, _ = judge(LlmClient(), reply)
    assert isinstance(score, Missing)
    assert score.why.startswith("openai/m: ")


def test_judgments_are_kept(tmp_path: Path) -> None:
    async def run() -> list[Any]:
        async with Endpoint(says({"score": 0.1}), says({"score": 0.2})) as endpoint:
            cached = Judge(LlmClient(cache=Cache(tmp_path)), endpoint.config())
            return [await cached.ask(question, SCORE) for question in ("Good?", "Better?", "Good?")]

    assert asyncio.run(run()) == [{"score": 0.1}, {"score": 0.2}, {"score": 0.1}]


def test_a_spent_budget_is_not_a_missing_score() -> None:
    class Spent:
        def __init__(self) -> None:
            self.talk = self

        async def remote(self, *_: Any) -> list[int]:
            raise BudgetSpent("used up")

    with pytest.raises(BudgetSpent, match="used up"):
        judge(LlmClient(Spent()), says({"score": 0}))


def test_an_unreachable_endpoint_is_retried_until_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """More often than `attempts` allows: refused connections do not count as attempts."""
    monkeypatch.setattr(clients, "_FIRST_PAUSE", 0.2)
    monkeypatch.setattr(clients, "_LONGEST_PAUSE", 0.4)

    async def run() -> tuple[Any, Any]:
        async with Endpoint(says({"score": 1})) as before:
            lasting, short = (Judge(LlmClient(), before.config(attempts=1, deadline=s)) for s in (60.0, 2.0))
            await lasting.ask("Do you know LiteLLM by now?", SCORE)
        pending = [asyncio.create_task(lasting.ask(f"Good, {i}?", SCORE)) for i in range(8)]
        gave_up = await short.ask("Good?", SCORE)
        async with Endpoint(says({"score": 1}), port=before.port):
            return await asyncio.gather(*pending), gave_up

    scores, gave_up = asyncio.run(run())
    assert scores == [{"score": 1.0}] * 8
    assert isinstance(gave_up, Missing)
