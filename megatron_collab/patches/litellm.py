"""Patches of LiteLLM: no network access at import, no advice on standard output, limited response bodies."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from functools import cache, partial
from typing import Any

import httpx

from megatron_collab.patches import Patch


def be_quiet() -> None:
    """Stop LiteLLM from printing advice on standard output when it raises an error."""
    import litellm

    litellm.suppress_debug_info = True


class BodyTooLong(RuntimeError):
    """A response body is longer than `limit_bodies` allows."""


@cache
def limit_bodies(longest: int) -> None:
    """Make LiteLLM's calls fail, with BodyTooLong in the chain of causes, if a body has more than `longest` bytes."""
    from litellm.llms.custom_httpx.http_handler import AsyncHTTPHandler

    class Limited(httpx.Response):
        async def aiter_bytes(self, chunk_size: int | None = None) -> AsyncIterator[bytes]:
            size = 0
            async for part in super().aiter_bytes(chunk_size):
                size += len(part)
                if size > longest:
                    raise BodyTooLong(f"the response exceeds {longest} bytes")
                yield part

    make = AsyncHTTPHandler.create_async_transport

    def limited(*arguments: Any, **options: Any) -> Any:
        transport = make(*arguments, **options)
        if transport is not None:  # None if LiteLLM is set not to use aiohttp: httpx then creates its own
            transport.handle_async_request = partial(handled, transport.handle_async_request)
        return transport

    async def handled(handle: Callable[..., Any], request: httpx.Request) -> httpx.Response:
        response: httpx.Response = await handle(request)
        response.__class__ = Limited
        return response

    AsyncHTTPHandler.create_async_transport = limited


_litellm = partial(Patch, "litellm")

PATCHES = (
    _litellm(
        "prices from the package",
        why="At its import LiteLLM would download the prices of models, and wait if there is no network.",
        upstream="litellm_core_utils/get_model_cost_map.py:383 (environment variable)",
        until="LiteLLM downloads prices only on request",
        test="tests/patches/test_litellm.py::test_importing_litellm_opens_no_connection",
        apply=lambda: os.environ.update(LITELLM_LOCAL_MODEL_COST_MAP="True"),
    ),
    _litellm(
        "no advice on standard output",
        why="Before it raises an error, LiteLLM prints where to ask for help: lines in the logs for every failed call.",
        upstream="litellm_core_utils/exception_mapping_utils.py:2386; issue 5942",
        until="LiteLLM logs instead of printing",
        test="tests/patches/test_litellm.py::test_an_error_prints_nothing",
        uses=("litellm.suppress_debug_info",),
    ),
    _litellm(
        "bodies have an end",
        why="An endpoint that sends without an end would fill the memory of the process that asks it.",
        upstream="llms/custom_httpx/http_handler.py:1193 (create_async_transport)",
        until="LiteLLM limits what it reads of an answer, as its get does",
        test="tests/llm/test_client.py::test_an_answer_that_is_too_long_is_not_read",
        uses=("litellm.llms.custom_httpx.http_handler.AsyncHTTPHandler.create_async_transport",),
    ),
)
