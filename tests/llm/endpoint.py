"""A real HTTP server on loopback that speaks OpenAI's chat completions as a test tells it to."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from aiohttp import web

from megatron_collab.settings import EndpointConfig

Reply = Callable[[web.Request], Awaitable[web.StreamResponse]]


def says(content: str | Mapping[str, Any], tokens: int = 120, **more: Any) -> Reply:
    """An answer; an object is written as JSON. `tokens`: what it says that it took; `more`: fields of the response."""
    text = content if isinstance(content, str) else json.dumps(content)

    async def reply(request: web.Request) -> web.Response:
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        usage = {"prompt_tokens": tokens - 20, "completion_tokens": 20, "total_tokens": tokens}
        body = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        return web.json_response({**body, "usage": usage, **more})

    return reply


def fails(status: int, message: str = "no", **headers: str) -> Reply:
    async def reply(request: web.Request) -> web.Response:
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.json_response({"error": {"message": message}}, status=status, headers=fields)

    return reply


def writes(body: str) -> Reply:
    """Status 200 with a body that is no chat completion."""

    async def reply(request: web.Request) -> web.Response:
        return web.Response(text=body, content_type="application/json")

    return reply


def hangs(seconds: float = 60.0) -> Reply:
    async def reply(request: web.Request) -> web.Response:
        await asyncio.sleep(seconds)
        return web.Response()

    return reply


async def resets(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


@contextmanager
def in_thread(endpoint: Endpoint) -> Iterator[Endpoint]:
    """Serve on an event loop in a thread of its own, for a program that runs in this one."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(endpoint.__aenter__(), loop).result()
        yield endpoint
        asyncio.run_coroutine_threadsafe(endpoint.__aexit__(None, None, None), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


class Endpoint:
    """Gives the replies one after the other, the last one for ever; `requests` are the bodies it was sent."""

    def __init__(self, *replies: Reply, port: int = 0, host: str = "127.0.0.1") -> None:
        self.host, self.port = host, port
        self.replies = list(replies)
        self.requests: list[dict[str, Any]] = []
        application = web.Application()
        application.router.add_post("/v1/chat/completions", self._answer)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1, handler_cancellation=True)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(await request.json())
        reply = self.replies[min(len(self.requests), len(self.replies)) - 1]
        return await reply(request)

    async def __aenter__(self) -> Endpoint:
        await self._runner.setup()
        await web.TCPSite(self._runner, self.host, self.port).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    def config(self, **changes: Any) -> EndpointConfig:
        """How to reach it; `changes` replace what EndpointConfig has by default."""
        return EndpointConfig(**{"model": "openai/m", "api_base": f"http://{self.host}:{self.port}/v1", **changes})
