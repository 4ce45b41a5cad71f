"""Answers that are kept, so that a question is paid once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.llm.answer import Field, LlmError
from megatron_collab.llm.cache import Cache
from megatron_collab.llm.client import LlmClient
from megatron_collab.settings import LlmConfig
from tests.llm.endpoint import Endpoint, fails, hangs, says
from tests.llm.questions import GOOD, QUESTION, SCORE, LocalLimiter, play

pytestmark = pytest.mark.usefixtures("no_waiting")


def test_an_answer_is_paid_once_and_kept(tmp_path: Path) -> None:
    async def questions(endpoint: Endpoint) -> list[Any]:
        limiter = LocalLimiter(LlmConfig(budget_usd=1.0))
        answers = []
        for _ in range(2):  # as after a restart
            client = LlmClient(limiter, Cache(tmp_path))
            answers.append(await client.ask(endpoint.config(), QUESTION, SCORE, sample="0"))
        while limiter._running:
            await asyncio.sleep(0.01)
        return [*answers, limiter.spend()["calls"]]

    values, requests = play(GOOD, says({"score": 0.9}), with_=questions)
    assert values == [{"score": 0.5}, {"score": 0.5}, 1]
    assert len(requests) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "openai/n"},
        {"temperature": 0.1},
        {"max_tokens": 5},
        {"messages": []},
        {"fields": [Field("score", int)]},
    ],
    ids=str,
)
def test_another_question_is_another_answer(changes: dict[str, Any], tmp_path: Path) -> None:
    async def two(endpoint: Endpoint) -> tuple[Any, Any]:
        client = LlmClient(cache=Cache(tmp_path))
        first = await client.ask(endpoint.config(), QUESTION, SCORE, sample="0")
        settings = {name: value for name, value in changes.items() if name not in ("messages", "fields")}
        question = [changes.get("messages", QUESTION), changes.get("fields", SCORE)]
        return first, await client.ask(endpoint.config(**settings), *question, sample="0")

    assert play(GOOD, says({"score": 1}), with_=two)[0] == ({"score": 0.5}, {"score": 1})


def test_samples_of_the_same_question_differ_and_without_one_nothing_is_kept(tmp_path: Path) -> None:
    async def questions(endpoint: Endpoint) -> list[Any]:
        client = LlmClient(cache=Cache(tmp_path))
        samples = ["0", "1", "0", None, None]
        answers = [await client.ask(endpoint.config(), QUESTION, SCORE, sample=sample) for sample in samples]
        return [answer["score"] for answer in answers]

    replies = [says({"score": score}) for score in (0.1, 0.2, 0.3, 0.4)]
    assert play(*replies, with_=questions)[0] == [0.1, 0.2, 0.1, 0.3, 0.4]


def test_a_failure_is_not_kept(tmp_path: Path) -> None:
    async def twice(endpoint: Endpoint) -> Any:
        client = LlmClient(cache=Cache(tmp_path))
        with pytest.raises(LlmError):
            await client.ask(endpoint.config(), QUESTION, SCORE, sample="0")
        return await client.ask(endpoint.config(), QUESTION, SCORE, sample="0")

    assert play(fails(401), GOOD, with_=twice)[0] == {"score": 0.5}


def test_the_same_question_at_the_same_time_is_one_call(tmp_path: Path) -> None:
    async def questions(endpoint: Endpoint) -> list[Any]:
        client = LlmClient(cache=Cache(tmp_path))
        return await asyncio.gather(*(client.ask(endpoint.config(), QUESTION, SCORE, sample="0") for _ in range(20)))

    answers, requests = play(GOOD, with_=questions)
    assert answers == [{"score": 0.5}] * 20
    assert len(requests) == 1


def test_who_gives_up_does_not_take_the_answer_from_others(tmp_path: Path) -> None:
    async def questions(endpoint: Endpoint) -> Any:
        client = LlmClient(cache=Cache(tmp_path))
        impatient = asyncio.create_task(client.ask(endpoint.config(), QUESTION, SCORE, sample="0"))
        patient = asyncio.create_task(client.ask(endpoint.config(), QUESTION, SCORE, sample="0"))
        while not endpoint.requests:
            await asyncio.sleep(0.01)
        impatient.cancel()
        return await patient

    assert play(hangs(), GOOD, with_=questions)[0] == {"score": 0.5}
