"""Metrics through the real judge and LiteLLM, against a real HTTP endpoint."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from megatron_collab.llm.client import LlmClient
from megatron_collab.reward.metrics import Judge
from megatron_collab.types import Missing, Score
from tests.llm.endpoint import Endpoint, fails, says
from tests.reward.fakes import about, metric, play

TASK = about("eighteen apples", goal="how many apples?")
PLAYED = play(TASK, "per box?", "six", "eighteen")

CASES: list[tuple[str, dict[str, Any], dict[str, Any], float]] = [
    ("accuracy", {"judge": True}, {"thought": "same", "accuracy": 1}, 1.0),
    ("interactivity", {}, {"thought": "asks", "interactivity": 0.5}, 0.5),
    (
        "interactivity",
        {"rubric": "parts"},
        {"thought": "asks", "understanding": 1, "clarification": 0.7, "suggestion": 0.1},
        0.6,
    ),
    ("bleu", {}, {"document": "eighteen apples"}, 1.0),
    ("generative", {"prompt": "Is it kind? {conversation}", "high": 5}, {"thought": "so so", "score": 2.5}, 2.5),
]


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a-key-of-the-test")


def judged(endpoint: Endpoint, name: str, settings: dict[str, Any], **changes: Any) -> Score | None:
    async def ask() -> Score | None:
        async with endpoint:
            judge = Judge(LlmClient(), endpoint.config(**changes))
            return await metric(name, judge, **settings).score(TASK, PLAYED)

    return asyncio.run(ask())


@pytest.mark.parametrize(("name", "settings", "answer", "expected"), CASES)
def test_the_judges_answer_is_the_score(
    name: str, settings: dict[str, Any], answer: dict[str, Any], expected: float
) -> None:
    endpoint = Endpoint(says(answer))
    assert judged(endpoint, name, settings) == pytest.approx(expected)
    (request,) = endpoint.requests
    (message,) = request["messages"]
    assert "**User**: six\n**Assistant**: eighteen" in message["content"]
    assert all(f'"{field}": ' in message["content"] for field in answer)


@pytest.mark.parametrize(("name", "settings", "answer", "expected"), CASES)
def test_a_malformed_answer_is_retried_and_a_refusal_is_missing(
    name: str, settings: dict[str, Any], answer: dict[str, Any], expected: float
) -> None:
    bad = json.dumps({field: 77 for field in answer})  # out of range, and a number in place of text
    endpoint = Endpoint(says(bad), says(answer))
    assert judged(endpoint, name, settings) == pytest.approx(expected)
    assert len(endpoint.requests) == 2
    assert isinstance(judged(Endpoint(fails(401)), name, settings), Missing)
