"""A simulated SGLang server: continuous batching with a prefix cache, its times by a roofline.

A server alternates between prefilling the requests that wait and decoding one token of every running request, as
SGLang does without mixed chunks. A decoding step reads the weights and the KV cache of all running requests, or takes
as long as its products; a prefill takes as long as its products. Token sequences are chains of segments: a token above
SEGMENT begins one, and names it: equal names mean equal tokens before and in it. Segments without a reader stay in the
cache until their place is needed, the least recently used first. If the cache is full of running requests, the one that
has sampled least is retracted: it waits again and is prefilled anew.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron_collab.inference.client import SGLangClient
from megatron_collab.inference.spec import ClientSpec

SEGMENT = 1 << 20  # tokens above begin a segment
FILLER = 7  # all other tokens
CHUNK = 8192  # tokens of a prefill
RESERVED = 256  # tokens of its reply for which a request must find room before it is begun


@dataclass(frozen=True)
class Roofline:
    """Seconds of a server's passes, all its devices together.

    `weights`: bytes that a decoding step reads; `token_bytes`: of a token's KV; `bandwidth`: bytes a second;
    `token_flops`: operations of a token; `flops`: operations a second of a prefill; `step`, `prefill`: seconds of
    overhead of a decoding step, of a prefill; `request`, `begin`: the same of each request in it.
    """

    weights: float
    token_bytes: float
    bandwidth: float
    token_flops: float
    flops: float
    step: float
    prefill: float
    request: float = 0.0
    begin: float = 0.0

    def decode(self, requests: int, context: float) -> float:
        """Seconds of a step of `requests` that have `context` tokens together."""
        memory = (self.weights + context * self.token_bytes) / self.bandwidth
        return self.step + requests * self.request + max(memory, requests * self.token_flops / self.flops)

    def prefilled(self, tokens: int, requests: int = 1) -> float:
        return (
            self.prefill
            + requests * self.begin
            + max(self.weights / self.bandwidth, tokens * self.token_flops / self.flops)
        )

    def alone(self, prompt: int, new: int) -> float:
        """Seconds of a request without another one."""
        return self.prefilled(prompt) + new * self.decode(1, prompt + new / 2)


@dataclass(eq=False)
class Request:
    """`segments`: names and lengths of the prompt; `kept`: tokens of the reply that a request before a pause sampled;
    `remaining`: tokens still to be sampled; `spans`: version and first token of each part of the reply.
    """

    segments: list[tuple[int, int]]
    reply: int  # name of its segment
    length: int
    kept: int = 0
    remaining: int = 0
    aborted: bool = False
    cached: int = 0
    began: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    spans: list[tuple[int, int]] = field(default_factory=list)

    @property
    def prompt(self) -> int:
        return sum(length for _, length in self.segments)

    @property
    def sampled(self) -> int:
        return self.length - self.remaining


class Server:
    """`version`: of its weights; `tokens` sampled, `busy` seconds and `retracted` requests so far."""

    def __init__(self, roofline: Roofline, cache: int, running: int) -> None:
        """`cache`: tokens of the KV cache; `running`: most requests at once."""
        self.roofline, self.cache, self.most = roofline, cache, running
        self.version = 0
        self.tokens = self.retracted = self.prefilled = 0
        self.busy = 0.0
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._read_segments: dict[int, tuple[int, int]] = {}  # segments of running requests: tokens and readers
        self._idle: OrderedDict[int, int] = OrderedDict()  # other segments in the cache, least recently used first
        self._used = 0  # tokens of running requests
        self._idle_used = 0
        self._news, self._awake = asyncio.Event(), asyncio.Event()
        self._awake.set()
        self._tokens_to_prefill = 0
        self._releases = False
        self._loop: asyncio.Task[None] | None = None

    def pause(self, release: bool = False) -> None:
        """Sample nothing until `resume`. With `release` the cache is given up and requests are aborted."""
        self._releases = release
        self._awake.clear()
        self._news.set()

    def resume(self, version: int) -> None:
        """Sample with the weights `version`; the cache of earlier weights is dropped."""
        self.version = version
        self._idle.clear()
        self._idle_used = 0
        self._awake.set()

    def submit(self, request: Request) -> None:
        request.remaining = request.length - request.kept
        self._waiting.append(request)
        self._news.set()
        if self._loop is None:
            self._loop = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        while True:
            if self._releases and not self._awake.is_set():
                self._abort()
            await self._awake.wait()
            self._news.clear()
            if batch := self._admit():
                await self._prefill(batch)
            elif self._running:
                await self._decode()
            else:
                await self._news.wait()

    def _admit(self) -> list[Request]:
        """The requests that are prefilled next."""
        batch, tokens = list[Request](), 0
        while self._waiting and len(self._running) + len(batch) < self.most:
            request = self._waiting[0]
            cached = self._cached(request)
            new = request.prompt + request.sampled - cached
            if batch and tokens + new > CHUNK:
                break
            if self._used + new + RESERVED > self.cache and (self._running or batch):
                break
            self._waiting.pop(0)
            request.cached = cached if not request.sampled else request.cached
            for name, length in request.segments:
                self._hold(name, length)
            self._used += request.sampled
            tokens += new
            batch.append(request)
        self._make_room()
        self.prefilled += tokens
        self._tokens_to_prefill = tokens
        return batch

    def _cached(self, request: Request) -> int:
        """Tokens of the prompt, but for its last one, that are in the cache."""
        total = 0
        for name, length in request.segments:
            stored = self._read_segments[name][0] if name in self._read_segments else self._idle.get(name, 0)
            total += min(stored, length)
            if stored < length:
                break
        return min(total, request.prompt - 1)

    async def _prefill(self, batch: Sequence[Request]) -> None:
        await self._work(self.roofline.prefilled(self._tokens_to_prefill, len(batch)))
        for request in batch:
            self._running.append(request)
            self._sample(request, 1)
            request.began.set()
        self._end()

    async def _decode(self) -> None:
        """Sample as many tokens of each running request as happen before a request ends, arrives or is retracted."""
        while self._used + len(self._running) > self.cache and len(self._running) > 1:
            self._retract(min(self._running, key=lambda request: request.sampled))
        count = len(self._running)
        steps = min(request.remaining for request in self._running)
        if self._used + count <= self.cache:
            steps = max(1, min(steps, (self.cache - self._used) // count))
        context = sum(request.prompt + request.sampled for request in self._running)
        tick = self.roofline.decode(count, context + count * steps / 2)
        began = asyncio.get_running_loop().time()
        if not self._waiting:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), steps * tick)
        passed = asyncio.get_running_loop().time() - began
        steps = min(steps, max(1, math.ceil(passed / tick - 1e-9)))
        await asyncio.sleep(max(0.0, steps * tick - passed))
        self.busy += steps * tick
        for request in self._running:
            self._sample(request, steps)
        self._make_room()
        self._end()

    async def _work(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.busy += seconds

    def _sample(self, request: Request, tokens: int) -> None:
        tokens = min(tokens, request.remaining)
        if not request.spans or request.spans[-1][0] != self.version:
            request.spans.append((self.version, request.sampled))
        request.remaining -= tokens
        self._used += tokens
        self.tokens += tokens

    def _end(self) -> None:
        for request in [request for request in self._running if not request.remaining]:
            self._running.remove(request)
            self._release(request)
            self._keep(request.reply, request.length - 1)  # the last token was never read
            request.ended.set()
        self._make_room()

    def _retract(self, request: Request) -> None:
        self.retracted += 1
        self._running.remove(request)
        self._release(request)
        self._waiting.append(request)

    def _abort(self) -> None:
        for request in self._running:
            self._release(request)
        for request in self._running + self._waiting:
            request.aborted = True
            request.began.set()
            request.ended.set()
        self._running, self._waiting = [], []

    def _release(self, request: Request) -> None:
        self._used -= request.sampled
        for name, length in reversed(request.segments):  # of a chain, its end leaves the cache first
            tokens, readers = self._read_segments[name]
            if readers > 1:
                self._read_segments[name] = tokens, readers - 1
            else:
                del self._read_segments[name]
                self._used -= tokens
                self._keep(name, length)

    def _hold(self, name: int, length: int) -> None:
        tokens, readers = self._read_segments.get(name, (0, 0))
        if not readers:
            self._idle_used -= self._idle.pop(name, 0)
        self._used += max(tokens, length) - tokens
        self._read_segments[name] = max(tokens, length), readers + 1

    def _keep(self, name: int, length: int) -> None:
        self._idle_used += length - self._idle.pop(name, 0)
        self._idle[name] = length

    def _make_room(self) -> None:
        while self._idle and self._used + self._idle_used > self.cache:
            self._idle_used -= self._idle.popitem(last=False)[1]


class Client(SGLangClient):
    """The client of a simulated server, whose replies `replies` draws."""

    def __init__(self, server: Server, spec: ClientSpec, replies: Replies) -> None:
        super().__init__("simulated", "", spec)
        self.server, self.replies = server, replies
        self._aborted: dict[int, tuple[int, int, str]] = {}  # replies by seed: name, length and finish

    async def _post(self, path: str, body: dict[str, Any], read: Any, crash: Any = None) -> Any:
        prompt, options = body["input_ids"], body["sampling_params"]
        starts = [at for at, token in enumerate(prompt) if token >= SEGMENT]
        lengths = [stop - start for start, stop in zip(starts, [*starts[1:], len(prompt)], strict=True)]
        segments = [(prompt[start], length) for start, length in zip(starts, lengths, strict=True)]
        seed, most = options["sampling_seed"], options["max_new_tokens"]
        if seed in self._aborted:
            name, length, finish = self._aborted.pop(seed)
        else:
            name, length = self.replies.draw(seed, segments, most)
            finish = "length" if length == most else "stop"
        kept = segments.pop()[1] if segments[-1][0] == name else 0
        request = Request(segments, name, length, kept)
        self.server.submit(request)
        answer = await read(_Response(request, self.replies.text(name), finish))
        if request.aborted:
            self._aborted[seed] = name, length, finish
        return answer


class Replies(Protocol):
    def draw(self, seed: int, prompt: Sequence[tuple[int, int]], most: int) -> tuple[int, int]:
        """Name and length, of at most `most` tokens, of the reply to the segments `prompt`."""

    def text(self, name: int) -> str: ...


class _Response:
    """SGLang's stream of a turn: an event for its first token, one for the whole."""

    def __init__(self, request: Request, text: str, finish: str) -> None:
        self.request, self.text, self.finish, self.content = request, text, finish, self

    async def iter_any(self) -> AsyncIterator[bytes]:
        request = self.request
        await request.began.wait()
        yield b"data: {}\n\n"
        await request.ended.wait()
        kept, count = request.kept, request.sampled - request.kept
        tokens = [FILLER] * count if kept else [request.reply, *[FILLER] * (count - 1)][:count]
        stops = [first for _, first in request.spans[1:]] + [request.sampled]
        spans = [
            {"version": str(version), "start": first - kept, "end": stop - kept}
            for (version, first), stop in zip(request.spans, stops if request.spans else [], strict=True)
        ]
        meta = {
            "prompt_tokens": request.prompt + kept,
            "cached_tokens": request.cached,
            "weight_version": str(request.spans[-1][0] if request.spans else 0),
            "finish_reason": {"type": "abort" if request.aborted else self.finish},
            "output_token_logprobs": [[-1.0, token, None] for token in tokens],
            "weight_versions": spans,
        }
        answer = {"text": self.text, "output_ids": tokens, "meta_info": meta}
        yield f"data: {json.dumps(answer)}\n\ndata: [DONE]\n\n".encode()
