from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.llm import client as clients
from megatron_collab.llm.answer import Field
from megatron_collab.llm.cache import Cache
from megatron_collab.llm.client import LlmClient
from megatron_collab.llm.limiter import BudgetSpent
from megatron_collab.reward.explanations import explained
from megatron_collab.reward.metrics import THOUGHT, Judge
from megatron_collab.runtime.redact import LONGEST_EXCERPT
from megatron_collab.types import Judgment, Missing
from tests.helpers import free_port
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


@pytest.mark.processes
def test_an_unreachable_endpoint_is_retried_until_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """More often than `attempts` allows: refused connections do not count as attempts."""
    monkeypatch.setattr(clients, "_FIRST_PAUSE", 0.2)
    monkeypatch.setattr(clients, "_LONGEST_PAUSE", 0.4)

    async def run() -> tuple[Any, Any]:
        async with Endpoint(says({"score": 1}), port=free_port()) as before:  # which nobody takes meanwhile
            lasting, short = (Judge(LlmClient(), before.config(attempts=1, deadline=s)) for s in (60.0, 2.0))
            await lasting.ask("Do you know LiteLLM by now?", SCORE)
        pending = [asyncio.create_task(lasting.ask(f"Good, {i}?", SCORE)) for i in range(8)]
        gave_up = await short.ask("Good?", SCORE)
        async with Endpoint(says({"score": 1}), port=before.port):
            return await asyncio.gather(*pending), gave_up

    scores, gave_up = asyncio.run(run())
    assert scores == [{"score": 1.0}] * 8
    assert isinstance(gave_up, Missing)


def explanations(*clients: LlmClient, replies: Sequence[Reply]) -> list[tuple[Any, Judgment | None]]:
    """For each client, the judge's values, and what explains the score that follows from them."""

    async def run() -> list[tuple[Any, Judgment | None]]:
        results = []
        async with Endpoint(*replies) as endpoint:
            for client in clients:
                with explained() as judgment:
                    values = await Judge(client, endpoint.config(attempts=2)).ask("Good?", [THOUGHT, *SCORE])
                results.append((values, judgment()))
        return results

    return asyncio.run(run())


def explanation(*replies: Reply) -> tuple[Any, Judgment | None]:
    return explanations(LlmClient(), replies=replies)[0]


RAW = 'So:\n{"thought": "is kind", "score": 0.50}\nBye.'


def test_the_judges_thought_and_raw_answer_explain_the_score() -> None:
    values, judgment = explanation(says("no JSON"), says(RAW))
    assert values == {"thought": "is kind", "score": 0.5}
    assert judgment == Judgment("is kind", RAW, ("m",)), "the answer that counts"


def test_a_cached_answer_explains_the_score_as_at_first(tmp_path: Path) -> None:
    clients = [LlmClient(cache=Cache(tmp_path)) for _ in range(2)]
    first, cached = explanations(*clients, replies=[says(RAW), says({"thought": "no", "score": 0})])
    assert first == cached == ({"thought": "is kind", "score": 0.5}, Judgment("is kind", RAW, ("m",)))


def test_an_answer_that_an_earlier_version_cached_has_only_a_reason(tmp_path: Path) -> None:
    old = Cache(tmp_path)
    put = old.put
    old.put = lambda key, answer: put(key, {"thought": "is kind", "score": 0.5})  # type: ignore[method-assign]
    clients = LlmClient(cache=old), LlmClient(cache=Cache(tmp_path))
    _, cached = explanations(*clients, replies=[says(RAW), fails(401)])
    assert cached == ({"thought": "is kind", "score": 0.5}, Judgment("is kind", ""))


def test_an_unusable_answer_is_kept_with_the_missing_score() -> None:
    values, judgment = explanation(says('{"score": 3}'), says('{"score": 2}'))
    assert isinstance(values, Missing) and judgment == Judgment("", '{"score": 2}')
    assert explanation(fails(401))[1] is None
    too_long = "{" * (clients.LONGEST_TEXT + 1)
    values, judgment = explanation(says(too_long))
    assert isinstance(values, Missing) and judgment is not None
    assert len(judgment.answer) == LONGEST_EXCERPT and judgment.answer.endswith("{… [cut]")


def test_no_key_is_in_an_explanation(monkeypatch: pytest.MonkeyPatch) -> None:
    key = "sk-proj-0123456789abcdef0123456789"
    monkeypatch.setenv("OPENAI_API_KEY", key)
    _, judgment = explanation(says({"thought": f"it is {key}", "score": 1}))
    assert judgment is not None and judgment.reason == "it is ***" and key not in judgment.answer
