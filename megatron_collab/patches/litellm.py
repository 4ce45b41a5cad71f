"""Patches of LiteLLM: no network access at import, no advice on standard output, limited and plain response bodies."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import AsyncIterator, Callable
from functools import cache, partial
from typing import Any

import httpx

from megatron_collab.patches import Patch


def be_quiet() -> None:
    """Stop LiteLLM from printing advice on standard output when it raises an error."""
    import litellm

    litellm.suppress_debug_info = True


_PIECE = 1 << 16  # bytes
_WINDOWS = {"identity": 0, "": 0, "gzip": 31, "x-gzip": 31, "deflate": 15}  # window bits for zlib; 0: not compressed


class BodyTooLong(RuntimeError):
    """A response body is longer than `limit_bodies` allows."""


@cache
def limit_bodies(longest: int) -> None:
    """Make LiteLLM's calls fail, with BodyTooLong in the chain of causes, if a body has more than `longest` bytes.

    Both the bytes that arrive and those that they are unpacked to are counted as they arrive. Lists of parts as a
    message's content become text.
    """
    from litellm.llms.custom_httpx.http_handler import AsyncHTTPHandler

    class Limited(httpx.Response):
        async def aiter_raw(self, chunk_size: int | None = None) -> AsyncIterator[bytes]:
            async for part in _counted(super().aiter_raw(chunk_size), longest):
                yield part

        async def aiter_bytes(self, chunk_size: int | None = None) -> AsyncIterator[bytes]:
            packing = self.headers.get("content-encoding", "identity").strip().lower()
            async for part in _counted(_unpacked(self.aiter_raw(), packing), longest):
                yield part

        def json(self, **options: Any) -> Any:
            return with_plain_content(super().json(**options))

    make = AsyncHTTPHandler.create_async_transport

    def limited(*arguments: Any, **options: Any) -> Any:
        transport = make(*arguments, **options)
        if transport is not None:  # None if LiteLLM is set not to use aiohttp: httpx then creates its own
            transport.handle_async_request = partial(handled, transport.handle_async_request)
        return transport

    async def handled(handle: Callable[..., Any], request: httpx.Request) -> httpx.Response:
        request.headers["accept-encoding"] = "gzip"  # of others it would not be known how much they unpack to
        response: httpx.Response = await handle(request)
        response.__class__ = Limited
        return response

    AsyncHTTPHandler.create_async_transport = limited


async def _counted(parts: AsyncIterator[bytes], longest: int) -> AsyncIterator[bytes]:
    size = 0
    async for part in parts:
        size += len(part)
        if size > longest:
            raise BodyTooLong(f"the response exceeds {longest} bytes")
        yield part


async def _unpacked(parts: AsyncIterator[bytes], packing: str) -> AsyncIterator[bytes]:
    """The content of a body, in pieces of at most _PIECE bytes if it is compressed."""
    if packing not in _WINDOWS:
        raise httpx.DecodingError(f"the response has Content-Encoding {packing}, but only gzip was accepted")
    window = _WINDOWS[packing]
    unpacker = window and zlib.decompressobj(window)
    async for part in parts:
        while unpacker and part:
            try:
                yield unpacker.decompress(part, _PIECE)
            except zlib.error as error:
                raise httpx.DecodingError(f"the response is damaged: {error}") from error
            part = unpacker.unconsumed_tail
        if part:
            yield part
    if unpacker:
        yield unpacker.flush()


def with_plain_content(body: Any) -> Any:
    """`body`, parsed JSON, in which the contents of chat completions are texts: of a list, its text parts."""
    choices = body.get("choices") if isinstance(body, dict) else None
    for choice in choices if isinstance(choices, list) else ():
        message = choice.get("message") if isinstance(choice, dict) else None
        if isinstance(message, dict) and isinstance(content := message.get("content"), list | dict):
            message["content"] = _text_of_parts(content) if isinstance(content, list) else json.dumps(content)
    return body


def _text_of_parts(parts: list[Any]) -> str:
    """OpenAI's and Mistral's text parts joined; parts of other types, such as thoughts, are left out."""
    texts = (part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part for part in parts)
    return "".join(text for text in texts if isinstance(text, str))


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
        test="tests/llm/test_response.py::test_an_answer_that_is_too_long_is_not_read",
        uses=("litellm.llms.custom_httpx.http_handler.AsyncHTTPHandler.create_async_transport",),
    ),
    _litellm(
        "contents are texts",
        why="vLLM and Mistral answer with a list of parts for reasoning models, over which LiteLLM fails.",
        upstream="litellm_core_utils/llm_response_utils/convert_dict_to_response.py:691; issue 14917",
        until="LiteLLM reads lists of parts",
        test="tests/llm/test_response.py::test_the_text_of_parts_is_read",
        uses=("litellm.llms.custom_httpx.http_handler.AsyncHTTPHandler.create_async_transport",),
    ),
)
