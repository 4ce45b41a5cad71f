"""Calls of a model that the run serves: to which of its servers, with which seed and key, by which name cached."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from megatron_collab.llm import client as clients
from megatron_collab.llm.answer import Field
from megatron_collab.llm.cache import Cache
from megatron_collab.llm.client import LlmClient
from megatron_collab.llm.served import ServedModel
from megatron_collab.settings import EndpointConfig
from tests.helpers import free_port
from tests.llm.endpoint import Endpoint, says

FIELDS = [Field("score", int)]


class Refuses:
    """A limiter that is never to be asked: the run's own servers have no limits."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


def model(*ports: int, path: str = "/models/judge") -> dict[str, ServedModel]:
    return {"judge": ServedModel(path, tuple((f"http://127.0.0.1:{port}", f"key-of-{port}") for port in ports))}


async def ask(client: LlmClient, name: str = "served/judge", about: str = "hi", **options: Any) -> dict[str, Any]:
    endpoint = EndpointConfig(model=name, attempts=1, deadline=20.0)
    return await client.ask(endpoint, [{"role": "user", "content": about}], FIELDS, **options)


def test_calls_go_to_the_servers_with_their_keys_and_seeds_that_follow_from_the_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def play() -> None:
        keys: list[str] = []

        async def reply(request: web.Request) -> web.StreamResponse:
            keys.append(request.headers["Authorization"])
            return await says({"score": 1})(request)

        async with Endpoint(reply) as first, Endpoint(reply) as second:
            client = LlmClient(served=model(first.port, second.port))
            client._queue = Refuses()
            for about in "abcdefgh":
                assert await ask(client, f"served/judge/{about}", about) == {"score": 1}
                await ask(client, f"served/judge/{about}", about)
            await ask(client, "served/judge/other", "a")
            for endpoint in (first, second):
                assert endpoint.requests, "both are asked"
                assert {request["model"] for request in endpoint.requests} == {"default"}
                assert all("response_format" in request for request in endpoint.requests)
            assert set(keys) == {f"Bearer key-of-{first.port}", f"Bearer key-of-{second.port}"}
            seeds: dict[str, set[int]] = {}
            for request in [*first.requests, *second.requests]:
                seeds.setdefault(request["messages"][0]["content"], set()).add(request["seed"])
            assert len(seeds["b"]) == 1 and len(seeds["a"]) == 2, "one for a sample of a question"
            places = [{request["messages"][0]["content"] for request in server.requests} for server in (first, second)]
            assert not places[0] & places[1], "what begins alike goes to one server, which has it in its cache"

    monkeypatch.setattr(clients, "_FIRST_PAUSE", 0.0)
    asyncio.run(play())


@pytest.mark.processes
def test_a_server_without_connection_is_left_alone_while_another_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        gone = free_port()
        async with Endpoint(says({"score": 1})) as endpoint:
            client = LlmClient(served=model(gone, endpoint.port))
            for number in range(8):
                assert await ask(client, about=str(number)) == {"score": 1}
            balance = client._servers.balances["judge"]
            assert balance._away[0] > 0 and balance._in_flight == [0, 0]
            late = LlmClient(served=model(gone))
            waiting = asyncio.create_task(ask(late))
            await asyncio.sleep(0.3)
            assert not waiting.done(), "an attempt without connection does not count"
            async with Endpoint(says({"score": 2}), port=gone):
                assert await waiting == {"score": 2}

    monkeypatch.setattr(clients, "_FIRST_PAUSE", 0.01)
    asyncio.run(play())


def test_a_cached_answer_is_that_of_the_model_and_not_of_its_name(tmp_path: Path) -> None:
    async def play() -> list[dict[str, Any]]:
        async with Endpoint(says({"score": 1}), says({"score": 2})) as endpoint:
            paths = ("/models/a", "/models/a", "/models/b")
            llm_clients = (LlmClient(cache=Cache(tmp_path), served=model(endpoint.port, path=path)) for path in paths)
            return [await ask(client, sample="0") for client in llm_clients]

    assert asyncio.run(play()) == [{"score": 1}, {"score": 1}, {"score": 2}]
