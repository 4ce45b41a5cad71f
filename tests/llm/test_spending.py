"""Tokens and USD of calls, the budget, and how many calls run at once."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import litellm
import pytest
from aiohttp import web

from megatron_collab.llm import limiter as limiters
from megatron_collab.llm.answer import LlmError
from megatron_collab.llm.client import LlmClient
from megatron_collab.llm.limiter import BudgetSpent
from megatron_collab.settings import LlmConfig
from tests.llm.endpoint import Endpoint, Reply, fails, hangs, resets, says, writes
from tests.llm.questions import GOOD, QUESTION, SCORE, play, with_limiter

pytestmark = pytest.mark.usefixtures("no_waiting")


def test_tokens_and_price_of_every_try_are_counted() -> None:
    async def question(client: LlmClient, endpoint: Endpoint) -> Any:
        return await client.ask(endpoint.config(model="openai/gpt-4o-mini"), QUESTION, SCORE)

    answer, limiter = with_limiter(LlmConfig(), question, fails(500), says("no", tokens=1020), GOOD)
    assert answer == {"score": 0.5}
    assert limiter.spend() == {
        "calls": 3,
        "tokens": 1020 + 120,
        "usd": pytest.approx((1000 + 100) * 0.15e-6 + 40 * 0.6e-6),
        "unpriced": 0,
    }


def test_a_model_without_a_price_is_counted_as_such() -> None:
    async def question(client: LlmClient, endpoint: Endpoint) -> Any:
        return await client.ask(endpoint.config(), QUESTION, SCORE)

    assert with_limiter(LlmConfig(), question, GOOD)[1].spend() == {"calls": 1, "tokens": 120, "usd": 0, "unpriced": 1}


PRICED = LlmConfig(prices={"openai/m": [1.0, 1000.0]})  # USD per million tokens
MOST = 120 * 1e-3  # USD for an answer of 120 tokens


def spent(*replies: Reply, config: LlmConfig = PRICED, **changes: Any) -> dict[str, float]:
    """What one question costs that is given up after one try."""

    async def question(client: LlmClient, endpoint: Endpoint) -> None:
        with suppress(LlmError):
            once: dict[str, Any] = {"attempts": 1, "timeout": 10.0, "max_tokens": 120, **changes}
            await client.ask(endpoint.config(**once), QUESTION, SCORE)

    return with_limiter(config, question, *replies)[1].spend()


@pytest.mark.parametrize(
    "fault", [hangs(), resets, writes("<html>"), writes("{}")], ids=["hang", "reset", "html", "{}"]
)
def test_a_try_of_which_nobody_says_what_it_took_costs_the_most_it_may(fault: Reply) -> None:
    totals = spent(fault, timeout=0.3)  # which no answer meets, however long it may take
    assert (totals["calls"], totals["unpriced"]) == (1, 0)
    assert MOST < totals["usd"] < 1.01 * MOST
    assert 120 < totals["tokens"] < 500


@pytest.mark.parametrize("status", [400, 401, 404, 408, 429, 500, 503])
def test_a_try_that_was_refused_costs_nothing(status: int) -> None:
    assert spent(fails(status))["usd"] == 0


def test_a_try_without_a_connection_costs_nothing() -> None:
    """With `others` to ask they are `attempts`, else as many as the deadline gives time for."""

    async def question(client: LlmClient, endpoint: Endpoint) -> None:
        nobody = endpoint.config(api_base="http://127.0.0.1:9/v1", attempts=2, max_tokens=120)
        with pytest.raises(LlmError, match="Connection error"):
            await client.ask(nobody, QUESTION, SCORE, has_fallback=True)

    totals = with_limiter(PRICED, question, GOOD)[1].spend()
    assert (totals["calls"], totals["usd"]) == (2, 0)


def test_a_cancelled_try_costs_the_most_it_may() -> None:
    async def question(client: LlmClient, endpoint: Endpoint) -> None:
        call = client.ask(endpoint.config(max_tokens=120), QUESTION, SCORE)
        task = asyncio.create_task(call)
        while not endpoint.requests:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])

    assert MOST < with_limiter(PRICED, question, hangs())[1].spend()["usd"] < 1.01 * MOST


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}])
def test_an_answer_without_tokens_costs_what_its_text_may(usage: Any) -> None:
    """At least what a tokenizer counts, in any language, and less than what it might have been."""
    text = json.dumps({"score": 0.5, "why": "because 因为它很好谢谢你 весьма хорошо " * 20}, ensure_ascii=False)

    async def reply(request: web.Request) -> web.Response:
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        body = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        return web.json_response({**body, "usage": usage})

    counted = litellm.token_counter(text=text)
    assert counted * 1e-3 < spent(reply, max_tokens=5000)["usd"] < 2.5 * counted * 1e-3


def test_a_price_that_is_given_is_taken_before_that_of_litellm() -> None:
    totals = spent(GOOD, model="openai/gpt-4o-mini", config=LlmConfig(prices={"openai/gpt-4o-mini": [10.0, 100.0]}))
    assert totals["usd"] == pytest.approx((100 * 10 + 20 * 100) * 1e-6)


@pytest.mark.seconds
def test_timeouts_use_the_budget_up() -> None:
    async def questions(client: LlmClient, endpoint: Endpoint) -> None:
        with pytest.raises(BudgetSpent):
            await client.ask(endpoint.config(max_tokens=120, timeout=0.2, attempts=99), QUESTION, SCORE)
        assert len(endpoint.requests) <= 3

    with_limiter(replace(PRICED, budget_usd=2.5 * MOST), questions, hangs())


def test_a_spent_budget_is_told_to_every_later_call() -> None:
    async def questions(client: LlmClient, endpoint: Endpoint) -> list[str]:
        settings = endpoint.config(model="openai/gpt-4o-mini")
        await client.ask(settings, QUESTION, SCORE)
        reasons = []
        for _ in range(2):
            with pytest.raises(BudgetSpent) as caught:
                await client.ask(settings, QUESTION, SCORE)
            reasons.append(str(caught.value))
        assert len(endpoint.requests) == 1
        return reasons

    reasons, _ = with_limiter(LlmConfig(budget_usd=1e-6), questions, GOOD)
    assert all("llm.budget_usd=1e-06 is used up: 1 calls cost 2.7e-05 USD" in reason for reason in reasons)


@pytest.mark.slow
@pytest.mark.seconds
def test_calls_at_once_are_limited_and_waiting_is_not_held_against_them() -> None:
    running = most = 0

    async def busy(request: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.4)
        running -= 1
        return await GOOD(request)

    async def questions(client: LlmClient, endpoint: Endpoint) -> Any:
        await client.ask(endpoint.config(), QUESTION, SCORE)  # LiteLLM's first call imports
        settings = endpoint.config(deadline=3.5)  # all of them take 4 s, one 0.4 s
        return await asyncio.gather(*(client.ask(settings, QUESTION, SCORE) for _ in range(30)))

    answers, limiter = with_limiter(LlmConfig(max_concurrent=3), questions, busy)
    assert answers == [{"score": 0.5}] * 30
    assert most == 3
    assert limiter.spend()["calls"] == 31


def test_a_place_that_is_free_is_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limiters, "_POLL", 3600.0)

    async def questions(client: LlmClient, endpoint: Endpoint) -> Any:
        async with asyncio.timeout(60):
            return await asyncio.gather(*(client.ask(endpoint.config(), QUESTION, SCORE) for _ in range(3)))

    assert with_limiter(LlmConfig(max_concurrent=1), questions, GOOD)[0] == [{"score": 0.5}] * 3


@pytest.mark.seconds
def test_calls_share_the_talks_to_the_limiter() -> None:
    async def questions(client: LlmClient, endpoint: Endpoint) -> Any:
        return await asyncio.gather(*(client.ask(endpoint.config(), QUESTION, SCORE) for _ in range(100)))

    _, limiter = with_limiter(LlmConfig(), questions, GOOD)
    assert limiter.talks[0] == (0, 100)
    assert sum(ended for ended, _ in limiter.talks) == 100


def test_a_cancelled_call_gives_its_place_back() -> None:
    async def questions(client: LlmClient, endpoint: Endpoint) -> Any:
        tasks = [asyncio.create_task(client.ask(endpoint.config(), QUESTION, SCORE)) for _ in range(5)]
        while not endpoint.requests:
            await asyncio.sleep(0.01)
        for task in tasks[:4]:  # one that is under way, three that wait
            task.cancel()
        return await tasks[4]

    assert with_limiter(LlmConfig(max_concurrent=1), questions, hangs(), GOOD)[0] == {"score": 0.5}


def test_a_fault_of_the_limiter_reaches_everybody_who_waits() -> None:
    async def broken(*_: Any) -> list[int]:
        raise KeyError("bug")

    async def questions(endpoint: Endpoint) -> list[Any]:
        client = LlmClient(SimpleNamespace(talk=SimpleNamespace(remote=broken)))
        calls = [client.ask(endpoint.config(), QUESTION, SCORE) for _ in range(3)]
        return await asyncio.gather(*calls, return_exceptions=True)

    errors, requests = play(GOOD, with_=questions)
    assert [type(error) for error in errors] == [KeyError] * 3
    assert requests == []
