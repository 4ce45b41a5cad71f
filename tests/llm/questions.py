"""Questions of a client to an endpoint of tests, also through a limiter without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_collab.llm.answer import Field, LlmError
from megatron_collab.llm.client import LlmClient, Messages
from megatron_collab.llm.limiter import FinishedCall, Limiter, Reservation
from megatron_collab.settings import LlmConfig
from tests.llm.endpoint import Endpoint, Reply, says

SCORE = [Field("score", float, 0.0, 1.0)]
QUESTION: Messages = [{"role": "user", "content": "How good is this?"}]
GOOD = says({"score": 0.5})


class LocalLimiter(Limiter):
    """A Limiter's handle without Ray: `limiter.talk.remote(...)` can be awaited."""

    def __init__(self, config: LlmConfig) -> None:
        super().__init__(config, Path("spend.json"))
        self.talks: list[tuple[int, int]] = []
        self.local_talk = self.talk
        self.talk = SimpleNamespace(remote=self._remote)

    async def _remote(self, ended: list[FinishedCall], wishes: list[Reservation]) -> list[int]:
        self.talks.append((len(ended), len(wishes)))
        return await self.local_talk(ended, wishes)


def play(*replies: Reply, with_: Callable[[Endpoint], Coroutine[Any, Any, Any]]) -> tuple[Any, list[dict[str, Any]]]:
    """What `with_` returns at an endpoint with these replies, and the requests that came in."""

    async def run() -> tuple[Any, list[dict[str, Any]]]:
        async with Endpoint(*replies) as endpoint:
            return await with_(endpoint), endpoint.requests

    return asyncio.run(run())


def ask(*replies: Reply, client: LlmClient | None = None, **changes: Any) -> tuple[Any, list[dict[str, Any]]]:
    """One question; an LlmError is returned."""

    async def question(endpoint: Endpoint) -> Any:
        try:
            return await (client or LlmClient()).ask(endpoint.config(**changes), QUESTION, SCORE)
        except LlmError as error:
            return error

    return play(*replies, with_=question)


def with_limiter(config: LlmConfig, questions: Callable[[LlmClient, Endpoint], Awaitable[Any]], *replies: Reply) -> Any:
    """What the questions come to at a limiter, and the limiter."""

    async def run(endpoint: Endpoint) -> tuple[Any, LocalLimiter]:
        limiter = LocalLimiter(config)
        value = await questions(LlmClient(limiter, prices=config.prices), endpoint)
        while limiter._running:
            await asyncio.sleep(0.01)
        return value, limiter

    return play(*replies, with_=run)[0]
