"""HTTP client of an SGLang server: samples turns and parses tool calls."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cached_property
from math import isfinite, nan
from typing import Any, NotRequired, Protocol, TypedDict

import aiohttp
import numpy as np

from megatron_collab.inference.spec import ClientSpec
from megatron_collab.types import Finish, ToolCall, Turn

ATTEMPTS = 5
BACKOFF_SECONDS = 0.25
# Each event of a streamed turn has all of its tokens so far, about 50 bytes for each.
_TOKENS_OF_EVENT, _MOST_EVENTS = 4, 256
MOST_BYTES = 1 << 30  # of an answer


class EngineError(RuntimeError):
    """The engine returned no turn; the message gives the reason."""


class TransientError(EngineError):
    """The same request may succeed later."""


class ServerGone(TransientError):
    """The server is unreachable: every attempt to connect failed, or the connection broke."""


class Paused(EngineError):
    """The request was not sent, since turns are paused."""


class UnreadableCall(EngineError):
    """SGLang's parser failed on the policy's tool calls."""


class Sampling(Protocol):
    """What tokens are sampled from: `top_p` of the probability mass, of the `top_k` most likely ones (-1: all)."""

    @property
    def temperature(self) -> float: ...

    @property
    def top_p(self) -> float: ...

    @property
    def top_k(self) -> int: ...


class TurnOptions(TypedDict):
    """How a turn is sampled; see SGLangClient.generate."""

    max_new_tokens: int
    sampling: Sampling
    seed: int
    stop: NotRequired[int | None]
    routing_from: NotRequired[int | None]
    progress: NotRequired[Callable[[str], None] | None]


class SGLangClient:
    """Samples turns from one server; allows any number of concurrent requests of one event loop.

    `counters` has prompt tokens: `prefill_tokens` were computed, `cached_tokens` were in the server's cache. While
    `paused`, requests that wait for another one's prefill raise Paused.
    """

    def __init__(self, url: str, api_key: str, spec: ClientSpec) -> None:
        self.url, self.spec = url, spec
        self.paused = False
        self.counters: Counter[str] = Counter()
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self._reading: dict[tuple[int, ...], asyncio.Event] = {}  # by prompt: set once it is prefilled

    async def generate(
        self,
        prompt_ids: tuple[int, ...],
        *,
        max_new_tokens: int,
        sampling: Sampling,
        seed: int,
        stop: int | None = None,
        routing_from: int | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> Turn:
        """Sample one turn of at most `max_new_tokens`; log-probs are of the distribution at the temperature.

        It ends with an end-of-turn token or with the token `stop`; neither is in its text. `routing_from`: the turn
        records the experts from this position on (rollout.routing_replay); None: no experts. `progress` is called with
        the text so far, again and again while it grows; if a broken connection is retried, the text begins anew.
        If several concurrent requests have the same prompt, one is sent first and the others wait for its prefill.
        `seed` (64 bits, signed) determines the sample if the server is deterministic. Raises EngineError if the server
        rejects the request or does not answer in time, ServerGone if it is unreachable at every attempt.
        """
        interval = max_new_tokens  # one event for the first token, one for the whole turn
        if progress:
            interval = max(_TOKENS_OF_EVENT, max_new_tokens // _MOST_EVENTS)
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
                "stop_token_ids": [] if stop is None else [stop],
                "skip_special_tokens": not self.spec.calls_tools,
                "stream_interval": interval,
            },
        }
        if self.spec.adapter is not None:
            body["lora_path"] = self.spec.adapter
        if routing_from is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": routing_from}
        first = prompt_ids not in self._reading
        read = self._reading.setdefault(prompt_ids, asyncio.Event())
        if not first:
            await read.wait()
            if self.paused:
                raise Paused("turns are paused")

        def show(event: bytes) -> None:
            read.set()
            if progress:
                progress(_answer(event).get("text", ""))

        try:
            answer = await self._post("/generate", body, lambda response: _last_event(response, show))
        finally:
            read.set()
            if first:
                del self._reading[prompt_ids]
        meta = answer["meta_info"]
        finish = Finish(meta["finish_reason"]["type"])
        routing = None
        if finish is not Finish.ABORT:
            self._count(meta)
            if routing_from is not None:
                routing = _routing(meta, len(prompt_ids) + len(answer["output_ids"]) - 1 - routing_from)
        return Turn(
            prompt_ids=tuple(prompt_ids),
            token_ids=tuple(answer["output_ids"]),
            log_probs=tuple(entry[0] for entry in meta["output_token_logprobs"]),
            versions=_versions(meta, len(answer["output_ids"])),
            finish=finish,
            text=answer["text"],
            routing=routing,
        )

    async def log_probs(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> tuple[tuple[float, ...], int]:
        """The log-probs of `token_ids` after `prompt_ids` at temperature 1, and the version of the weights.

        Raises EngineError like `generate`, and if the server aborts the request.
        """
        body = scoring_request([*prompt_ids, *token_ids], len(prompt_ids))
        if self.spec.adapter is not None:
            body["lora_path"] = self.spec.adapter
        answer = await self._post("/generate", body, aiohttp.ClientResponse.json)
        values = read_log_probs(answer, token_ids)
        if values is None or not all(map(isfinite, values)):
            raise EngineError(f"{self.url}: returned no log-probs of the tokens")
        meta = answer["meta_info"]
        self._count(meta)
        return tuple(values), int(meta["weight_version"])

    async def tool_calls(self, text: str, schemas: Sequence[Mapping[str, Any]]) -> list[ToolCall]:
        """The calls in `text`, by rollout.tool_parser. Raises UnreadableCall, and EngineError like `generate`."""
        body = {"text": text, "tools": list(schemas), "tool_call_parser": self.spec.tool_parser}
        answer = await self._post("/parse_function_call", body, aiohttp.ClientResponse.json, UnreadableCall)
        try:
            calls = [(call["name"], json.loads(call["parameters"])) for call in answer["calls"]]
        except ValueError as error:
            raise UnreadableCall(f"arguments are not valid JSON: {error}") from error
        # Arguments that are not a JSON object become a single argument, which no tool accepts.
        return [ToolCall(name, value if isinstance(value, dict) else {"arguments": value}) for name, value in calls]

    def _count(self, meta: Mapping[str, Any]) -> None:
        self.counters["prefill_tokens"] += meta["prompt_tokens"] - meta["cached_tokens"]
        self.counters["cached_tokens"] += meta["cached_tokens"]

    async def close(self) -> None:
        if session := vars(self).pop("_session", None):
            await session.close()

    async def _post[Answer](
        self,
        path: str,
        body: dict[str, Any],
        read: Callable[[aiohttp.ClientResponse], Awaitable[Answer]],
        crash: type[EngineError] = TransientError,
    ) -> Answer:
        late = f"no answer within rollout.turn_timeout={self.spec.timeout:g} s"
        return await post(self._session, self.url + path, body, read, late, crash=crash)

    @cached_property
    def _session(self) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=self.spec.timeout)
        return aiohttp.ClientSession(headers=self._headers, connector=aiohttp.TCPConnector(limit=0), timeout=timeout)


async def post[Answer](
    session: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    read: Callable[[aiohttp.ClientResponse], Awaitable[Answer]],
    late: str,
    timeout: type[EngineError] = EngineError,
    crash: type[EngineError] = TransientError,
) -> Answer:
    """POST `body` and return what `read` makes of the answer; transient errors are retried, up to ATTEMPTS in total.

    Pauses double from BACKOFF_SECONDS on, each times a random factor from 0.5 to 1.5. Raises `timeout` with
    the message `late` after the session's timeout, ServerGone without a connection, `crash` for status 500, EngineError
    for other statuses.
    """

    async def once() -> Answer:
        try:
            async with session.post(url, json=body) as response:
                if response.status == 200:
                    return await read(response)
                refusal = _refusal(response, response.status, await response.text())
                raise crash(str(refusal)) if response.status == 500 else refusal
        except TimeoutError:
            raise timeout(late) from None
        except aiohttp.ClientError as error:
            raise ServerGone(f"{url}: {type(error).__name__}: {error}") from error

    for attempt in range(1, ATTEMPTS):
        try:
            return await once()
        except TransientError:
            await asyncio.sleep(BACKOFF_SECONDS * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))
    return await once()


def scoring_request(token_ids: Sequence[int], first: int) -> dict[str, Any]:
    """The body for /generate that asks for the log-probs of the tokens from index `first` on, at temperature 1."""
    sampling = {"max_new_tokens": 0, "temperature": 1.0}
    return {
        "input_ids": [*token_ids],
        "return_logprob": True,
        "logprob_start_len": first - 1,  # the entry of this token has no log-prob
        "sampling_params": sampling,
    }


def read_log_probs(answer: Mapping[str, Any], token_ids: Sequence[int]) -> list[float] | None:
    """The log-probs of `token_ids`, the last tokens of a scoring request; None if the answer does not have them.

    One that is not finite is NaN.
    """
    try:
        entries = answer["meta_info"]["input_token_logprobs"]
        entries = entries[len(entries) - len(token_ids) :]
        values, tokens = [nan if entry[0] is None else entry[0] for entry in entries], [entry[1] for entry in entries]
    except (KeyError, IndexError, TypeError):  # the answer has another form
        return None
    # SGLang reports the id of the vocabulary's last token as 0; its log-prob is right.
    same = len(tokens) == len(token_ids) and all(
        read in (0, sent) for read, sent in zip(tokens, token_ids, strict=True)
    )
    return values if same and all(isinstance(value, float) or value == 0 for value in values) else None


def _refusal(response: aiohttp.ClientResponse, status: int, text: str) -> EngineError:
    """The error for an HTTP error status, of the response or within a stream."""
    kind = TransientError if status >= 500 or status in (408, 409, 429) else EngineError
    return kind(f"{response.url}: status {status}: {' '.join(text.split())[:300]}")


async def _last_event(response: aiohttp.ClientResponse, show: Callable[[bytes], None]) -> dict[str, Any]:
    """The last event of a streamed turn, which contains the full turn; calls `show` with each event.

    Raises EngineError if an event is an error or the stream has more than MOST_BYTES, ClientPayloadError if it ends
    before the turn does.
    """
    buffer, last, size = b"", b"", 0
    async for piece in response.content.iter_any():
        size += len(piece)
        if size > MOST_BYTES:
            raise EngineError(f"{response.url}: more than {MOST_BYTES} bytes for a turn")
        *events, buffer = (buffer + piece).split(b"\n\n")
        for event in events:
            if event != b"data: [DONE]":
                last = event
                show(event)
    answer = _answer(last)
    if "error" in answer:
        raise _refusal(response, answer["error"]["code"], answer["error"]["message"])
    finish = answer.get("meta_info", {}).get("finish_reason")
    if finish is None:
        raise aiohttp.ClientPayloadError("the stream ended before the turn")
    if finish.get("status_code"):  # SGLang's scheduler rejected the request
        raise _refusal(response, finish["status_code"], finish["message"])
    return answer


def _answer(event: bytes) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(event.removeprefix(b"data: ") or b"{}")
    return answer


def _versions(meta: Mapping[str, Any], tokens: int) -> tuple[int, ...]:
    """The weight version of each of a turn's `tokens`; SGLang reports spans if it changed within the turn."""
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": tokens}]
    return tuple(int(span["version"]) for span in spans for _ in range(span["start"], span["end"]))


def _routing(meta: Mapping[str, Any], tokens: int) -> np.ndarray:
    """The experts of `tokens` tokens, [tokens, layers * experts per token], in the smallest integer type that fits.

    SGLang reports the experts of every token that was an input, which excludes only the last token of a reply. Cached
    tokens have the experts of their prefill. Raises EngineError if the number of experts does not fit.
    """
    experts = np.frombuffer(base64.b64decode(meta.get("routed_experts") or ""), np.int32)
    if not len(experts) or len(experts) % tokens:
        raise EngineError(f"rollout.routing_replay: {len(experts)} experts for {tokens} tokens; SGLang must return all")
    return experts.reshape(tokens, -1).astype(np.min_scalar_type(experts.max()))
