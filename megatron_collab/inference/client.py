"""The engine that samples: what is said to an SGLang server over HTTP, and the client that asks it for turns."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import aiohttp

from megatron_collab.config import RolloutConfig, SamplingConfig
from megatron_collab.types import Finish, ToolCall, Turn

ATTEMPTS = 5
BACKOFF_SECONDS = 0.25
_Answer = TypeVar("_Answer")


class EngineError(RuntimeError):
    """The engine gave no turn; the reason is the text."""


class ServerGone(EngineError):
    """The server stayed away: its address takes no connection, or breaks it, at every try."""


class SGLangClient:
    """Asks a server for turns; one client serves any number of concurrent requests of one event loop.

    `counters` counts tokens of prompts: `prefill_tokens` were computed, `cached_tokens` the server had already.
    """

    def __init__(self, url: str, api_key: str, config: RolloutConfig) -> None:
        self.url = url
        self.timeout = config.turn_timeout
        self.tool_parser = config.tool_parser
        self.counters: Counter[str] = Counter()
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self._session: aiohttp.ClientSession | None = None
        self._reading: dict[tuple[int, ...], asyncio.Event] = {}

    async def generate(
        self, prompt_ids: tuple[int, ...], *, max_new_tokens: int, sampling: SamplingConfig, seed: int
    ) -> Turn:
        """Sample one turn of at most `max_new_tokens`; log-probs are of the distribution at the temperature.

        Of several requests at once with the same prompt one goes ahead; the others wait until it has been read.
        `seed` (64 bits, signed) decides the sample where the server is deterministic. Raises EngineError when
        the server refuses the request, does not answer in time, or stays away after several tries (ServerGone).
        """
        body = {
            "input_ids": list(prompt_ids),
            "return_logprob": True,
            "stream": True,
            "sampling_params": {
                "max_new_tokens": max_new_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "sampling_seed": seed,
                "stream_interval": max_new_tokens,  # the first token, then the whole
            },
        }
        async with self._reads(prompt_ids) as was_read:
            answer = await self._post("/generate", body, lambda response: _last_event(response, was_read))
        meta = answer["meta_info"]
        finish = Finish(meta["finish_reason"]["type"])
        if finish is not Finish.ABORT:
            self.counters["prefill_tokens"] += meta["prompt_tokens"] - meta["cached_tokens"]
            self.counters["cached_tokens"] += meta["cached_tokens"]
        return Turn(
            prompt_ids=tuple(prompt_ids),
            token_ids=tuple(answer["output_ids"]),
            log_probs=tuple(entry[0] for entry in meta["output_token_logprobs"]),
            versions=_versions(meta, len(answer["output_ids"])),
            finish=finish,
            text=answer["text"],
        )

    async def tool_calls(self, text: str, schemas: Sequence[Mapping[str, Any]]) -> list[ToolCall]:
        """The calls in `text` as rollout.tool_parser finds them; EngineError as in `generate`."""
        body = {"text": text, "tools": list(schemas), "tool_call_parser": self.tool_parser}
        answer = await self._post("/parse_function_call", body, aiohttp.ClientResponse.json)
        return [ToolCall(call["name"], _arguments_of(call)) for call in answer["calls"]]

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    @asynccontextmanager
    async def _reads(self, prompt_ids: tuple[int, ...]) -> AsyncIterator[Callable[[], None]]:
        """Wait while another request reads this prompt, then go on; gives what to call once it has been read."""
        if first := self._reading.get(prompt_ids):
            await first.wait()
            yield lambda: None
            return
        read = self._reading[prompt_ids] = asyncio.Event()

        def was_read() -> None:
            self._reading.pop(prompt_ids, None)
            read.set()

        try:
            yield was_read
        finally:
            was_read()

    async def _post(
        self, path: str, body: dict[str, Any], read: Callable[[aiohttp.ClientResponse], Awaitable[_Answer]]
    ) -> _Answer:
        failure = EngineError("")
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(BACKOFF_SECONDS * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))
            try:
                async with self._open().post(self.url + path, json=body) as response:
                    if response.status == 200:
                        return await read(response)
                    raise _Refused(response.status, await response.text())
            except TimeoutError:
                raise EngineError(f"no answer within rollout.turn_timeout={self.timeout:g} s") from None
            except _Refused as refused:
                failure = EngineError(f"{self.url}{path}: {refused}")
                if refused.status < 500:
                    break
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                failure = ServerGone(f"{self.url}{path}: {type(error).__name__}: {error}")
        raise failure

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=self.timeout),
            )
        return self._session


class _Refused(Exception):
    """The server answered with an HTTP status of failure."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"status {status}: {' '.join(text.split())[:300]}")
        self.status = status


async def _last_event(response: aiohttp.ClientResponse, began: Callable[[], None]) -> dict[str, Any]:
    """The last of the events in which SGLang streams a turn, each of them all there is so far.

    Calls `began` at the first one. Raises _Refused where an event is an error, and ClientPayloadError where the
    stream ends before the turn does.
    """
    rest, last = b"", b""
    async for piece in response.content.iter_any():
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            began()
            if event != b"data: [DONE]":
                last = event
    answer = json.loads(last.removeprefix(b"data: ") or b"{}")
    if "error" in answer:
        raise _Refused(answer["error"]["code"], answer["error"]["message"])
    finish = answer.get("meta_info", {}).get("finish_reason")
    if finish is None:
        raise aiohttp.ClientPayloadError("the stream ended before the turn")
    if finish.get("status_code"):  # SGLang's scheduler turned the request away
        raise _Refused(finish["status_code"], finish["message"])
    return answer


def _versions(meta: Mapping[str, Any], tokens: int) -> tuple[int, ...]:
    """The version of the weights of each of a turn's `tokens`; spans of them where it changed on the way."""
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": tokens}]
    return tuple(int(span["version"]) for span in spans for _ in range(span["start"], span["end"]))


def _arguments_of(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a call was given; something else than a JSON object becomes an argument that no tool has."""
    arguments = json.loads(call["parameters"])
    return arguments if isinstance(arguments, dict) else {"arguments": arguments}
