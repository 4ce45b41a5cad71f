"""The client against a server that fails in every way a server can."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from megatron_collab.rollout import sglang
from megatron_collab.rollout.sglang import EngineError, SGLangClient
from megatron_collab.types import Finish, Turn

ANSWER = {
    "text": "hello",
    "output_ids": [7, 8, 2],
    "meta_info": {
        "weight_version": "12",
        "finish_reason": {"type": "stop", "matched": 2},
        "output_token_logprobs": [[-0.5, 7, None], [-0.25, 8, None], [-0.125, 2, None]],
    },
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "BACKOFF_SECONDS", 0.01)


def ask(handler: Handler, timeout: float = 5.0) -> Turn:
    async def run() -> Turn:
        application = web.Application()
        application.router.add_post("/generate", handler)
        async with TestServer(application) as server:
            client = SGLangClient(str(server.make_url("")).rstrip("/"), "secret", timeout)
            try:
                return await client.generate((4, 5, 6), max_new_tokens=9, temperature=0.7, seed=-3)
            finally:
                await client.close()

    return asyncio.run(run())


def test_a_turn_is_what_the_engine_says() -> None:
    seen: list[object] = []

    async def handler(request: web.Request) -> web.Response:
        seen.extend([request.headers["Authorization"], await request.json()])
        return web.json_response(ANSWER)

    turn = ask(handler)
    assert turn == Turn((4, 5, 6), (7, 8, 2), (-0.5, -0.25, -0.125), 12, Finish.STOP, "hello")
    sampling = {"max_new_tokens": 9, "temperature": 0.7, "top_p": 1.0, "top_k": -1, "sampling_seed": -3}
    assert seen == ["Bearer secret", {"input_ids": [4, 5, 6], "return_logprob": True, "sampling_params": sampling}]


def test_what_passes_is_tried_again() -> None:
    calls = []

    async def handler(request: web.Request) -> web.Response:
        calls.append(1)
        if len(calls) == 1:
            return web.Response(status=503, text="busy")
        if len(calls) == 2:
            assert request.transport is not None
            request.transport.close()
        return web.json_response(ANSWER)

    assert ask(handler).version == 12
    assert len(calls) == 3


def test_what_does_not_pass_is_an_engine_error() -> None:
    calls = []

    async def handler(request: web.Request) -> web.Response:
        calls.append(1)
        return web.Response(status=500, text="broken\nfor good")

    with pytest.raises(EngineError, match="status 500: broken for good"):
        ask(handler)
    assert len(calls) == sglang.ATTEMPTS


def test_a_refused_request_is_not_repeated() -> None:
    calls = []

    async def handler(request: web.Request) -> web.Response:
        calls.append(1)
        return web.Response(status=400, text="too long")

    with pytest.raises(EngineError, match="status 400: too long"):
        ask(handler)
    assert len(calls) == 1


def test_silence_is_an_engine_error_that_names_the_setting() -> None:
    async def handler(request: web.Request) -> web.Response:
        await asyncio.sleep(5)
        return web.json_response(ANSWER)

    with pytest.raises(EngineError, match=r"rollout\.turn_timeout=0\.2"):
        ask(handler, timeout=0.2)


def test_no_server_is_an_engine_error() -> None:
    async def run() -> None:
        client = SGLangClient("http://127.0.0.1:9", "secret", 1.0)
        try:
            await client.generate((4,), max_new_tokens=1, temperature=1.0, seed=0)
        finally:
            await client.close()

    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9"):
        asyncio.run(run())
