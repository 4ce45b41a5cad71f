"""LiteLLM client: retries, rate limits, answers in a given format, cached or recorded."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import httpx
import litellm
from litellm._internal_context import is_internal_call
from openai import OpenAIError

from megatron_collab.llm.answer import (
    Answer,
    AnswerTooLong,
    Field,
    LlmError,
    MalformedAnswer,
    checked,
    json_schema,
    parse,
)
from megatron_collab.llm.cache import Cache, key_of
from megatron_collab.llm.endpoint import POLICY, SERVED, arguments, identity, question_of, token_budget, way_out
from megatron_collab.llm.limiter import CallQueue, FinishedCall, Reservation
from megatron_collab.llm.price import Prices, tokens_at_most
from megatron_collab.llm.recording import Usage
from megatron_collab.llm.reply import Reply, read_reply
from megatron_collab.llm.served import RunServers, ServedModel, causes, unconnected
from megatron_collab.llm.tape import Tape
from megatron_collab.patches.litellm import BodyTooLong, be_quiet, limit_bodies
from megatron_collab.runtime.network import retry_after
from megatron_collab.runtime.redact import excerpt, redact
from megatron_collab.runtime.text import one_line
from megatron_collab.settings import EndpointConfig

logger = logging.getLogger(__name__)

Messages = list[dict[str, Any]]
_Read = TypeVar("_Read")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # seconds
_CHARACTERS_PER_TOKEN = 4
_GRACE = 10.0  # seconds after its timeout until a call has certainly ended
LONGEST_BODY, LONGEST_TEXT = 1 << 24, 1 << 20  # bytes, characters of an answer: more than any model sends at once
_PARSED_ASIDE = 1 << 14  # characters; longer answers are parsed in a thread, beside the event loop
_REFUSED = (400, 422)  # status of a server that does not support an argument such as response_format
_FAILED = (500, 501)  # status of a server that fails over a response_format, or of any other failure
_TEXT, _VERSION = "<text>", "<version>"  # beside the values of an answer in caches and recordings; no fields' names
_TRIALS = 3  # answers after which such a server gets no response_format any more
_supports_schema = cache(litellm.supports_response_schema)


class LlmClient:
    """Calls language models when `limiter` admits it; one client per process. `cache` holds answers with a `sample`."""

    def __init__(
        self,
        limiter: Any = None,
        cache: Cache | None = None,
        keys: Mapping[str, str] = {},
        served: Mapping[str, ServedModel] = {},
        prices: Mapping[str, Sequence[float]] = {},
        tape: Tape | None = None,
    ) -> None:
        """`limiter`: handle of a Limiter; None: no limits. `keys`: API keys of the policy's servers by api_base.

        `served`: by NAME, the models called served/NAME, or served/NAME/SAMPLE if the same messages get several
        answers. `prices`: llm.prices. `tape`: records or replays answers, except the policy's, which depend on its
        weights.
        """
        be_quiet()
        limit_bodies(LONGEST_BODY)
        self._prices = Prices(prices)
        self.totals: dict[str, float] = {"tokens": 0, "usd": 0.0, "unpriced": 0}  # all calls so far
        self._servers = RunServers(keys, served)
        self.busy = self._servers.busy
        self._queue = None if limiter is None else CallQueue(limiter)
        self._cache, self._tape = cache, tape
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        # Endpoints, by model and api_base, that answered with a response_format, and how often they did only without.
        self._formatted, self._unformatted = set[tuple[str, str | None]](), Counter[tuple[str, str | None]]()

    async def ask(
        self,
        endpoint: EndpointConfig,
        messages: Messages,
        fields: Sequence[Field],
        *,
        sample: str | None = None,
        has_fallback: bool = False,
    ) -> dict[str, Any]:
        """The values of `fields` in the model's answer; see `answer`."""
        answer = await self.answer(endpoint, messages, fields, sample=sample, has_fallback=has_fallback)
        return answer.values

    async def answer(
        self,
        endpoint: EndpointConfig,
        messages: Messages,
        fields: Sequence[Field],
        *,
        sample: str | None = None,
        has_fallback: bool = False,
    ) -> Answer:
        """The model's answer to `messages`, with the values of `fields`.

        `sample` numbers the answers to the same question; each is requested once and cached. None: no cache.
        Raises LlmError if there is no usable answer within `endpoint.attempts` and `endpoint.deadline`. Time spent
        waiting for the limiter does not count, nor do attempts without a connection, unless the caller `has_fallback`:
        another endpoint to try. Also raises AnswerTooLong, BudgetSpent and NotRecorded.
        """

        async def live(usage: Usage) -> dict[str, Any]:
            return await self._cached(endpoint, messages, fields, sample, has_fallback, usage)

        if self._tape is None or _on_policy(endpoint):
            stored = await live(Usage())
        else:
            question = {**question_of(endpoint), "messages": messages, "schema": json_schema(fields), "sample": sample}
            stored = await self._tape.answer(question, live, shared=sample is not None)
        return Answer(checked(stored, fields), str(stored.get(_TEXT, "")), str(stored.get(_VERSION, "")))

    async def reply(
        self,
        endpoint: EndpointConfig,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        has_fallback: bool = False,
    ) -> Reply:
        """The model's reply as text, or its calls of `tools`, which are in OpenAI's format; it may be empty.

        Its tokens are estimated if the endpoint reports none. `has_fallback`, and what it raises: as `answer`.
        """
        options = {"tools": [*tools]} if tools else {}

        async def read(reply: Reply) -> Reply:
            called = bool(tools and reply.calls)
            if not reply.text and reply.shortfall and reply.finish != "length" and not called:
                raise MalformedAnswer("there is no text")
            tokens = reply.tokens or litellm.token_counter(text=reply.text)
            calls = reply.calls if called else []
            return Reply(reply.text, tokens, reply.finish, calls=calls, thoughts=reply.thoughts)

        async def live(usage: Usage) -> Reply:
            async def send(correction: Messages, allowance: _Allowance) -> Reply:
                return await self._call(endpoint, messages, allowance, **options)

            return await self._ask_until_read(endpoint, send, read, usage, has_fallback)

        if self._tape is None or _on_policy(endpoint):
            return await live(Usage())
        question = {**question_of(endpoint), "messages": messages, "schema": None, "sample": None, **options}
        return Reply(*await self._tape.answer(question, live))

    async def _cached(
        self,
        endpoint: EndpointConfig,
        messages: Messages,
        fields: Sequence[Field],
        sample: str | None,
        has_fallback: bool,
        usage: Usage,
    ) -> dict[str, Any]:
        """The values of `fields` and the text, from the cache if it has them."""
        if sample is None or self._cache is None:
            return await self._ask(endpoint, messages, fields, has_fallback, usage)
        settings = {**identity(endpoint), "model": self._servers.model(endpoint)}
        key = key_of({**settings, "messages": messages, "schema": json_schema(fields), "sample": sample})
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:  # concurrent callers with the same question then find the answer in the cache
            answer = self._cache.get(key, fields)
            usage.cached = answer is not None
            if answer is None:
                answer = await self._ask(endpoint, messages, fields, has_fallback, usage)
                self._cache.put(key, answer)
            return answer

    async def _ask(
        self, endpoint: EndpointConfig, messages: Messages, fields: Sequence[Field], has_fallback: bool, usage: Usage
    ) -> dict[str, Any]:
        async def send(correction: Messages, allowance: _Allowance) -> Reply:
            return await self._constrained(endpoint, [*messages, *correction], fields, allowance)

        def parsed(reply: Reply) -> dict[str, Any]:
            return {**parse(reply.text, fields), _TEXT: excerpt(reply.text), _VERSION: reply.version}

        async def read(reply: Reply) -> dict[str, Any]:
            if len(reply.text) > _PARSED_ASIDE:
                return await asyncio.to_thread(parsed, reply)
            return parsed(reply)

        return await self._ask_until_read(endpoint, send, read, usage, has_fallback)

    async def _ask_until_read(
        self,
        endpoint: EndpointConfig,
        send: Callable[[Messages, _Allowance], Awaitable[Reply]],
        read: Callable[[Reply], Awaitable[_Read]],
        usage: Usage,
        has_fallback: bool = False,
    ) -> _Read:
        """`send` until `read` accepts the reply. After a malformed reply the next attempt includes a correction."""
        allowance = _Allowance(endpoint.deadline, usage)
        correction: Messages = []
        failure: Exception | None = None
        out = unusable = ""
        tries, longest = 0, _FIRST_PAUSE
        while True:
            tries, pause = tries + 1, 0.0
            try:
                reply = await send(correction, allowance)
                return await read(reply)
            except MalformedAnswer as error:
                failure, out, correction = error, reply.shortfall, _correction(reply.text, error)
                unusable = reply.text
            except (OpenAIError, TimeoutError) as error:
                failure, status = error, getattr(error, "status_code", None)
                out = way_out(endpoint, str(failure)) if status in _REFUSED else ""
                # Timeouts, lost connections, rate limits and server errors may be temporary.
                if status is not None and status < 500 and status not in (408, 409, 429):
                    break
                tries -= unconnected(error) and not has_fallback
                pause = _retry_after(error) + random.uniform(0, longest)
            longest = min(_LONGEST_PAUSE, 2 * longest)
            if tries == endpoint.attempts or pause >= allowance.seconds_left:
                break
            logger.debug(f"{endpoint.model}: {type(failure).__name__}; asked again in {pause:.1f} s")
            with allowance.spending():
                await asyncio.sleep(pause)
        # Redacted before it is cut, which could halve a key.
        reason = f"{endpoint.model}: {type(failure).__name__}: {one_line(redact(str(failure)))}"
        raise LlmError(f"{reason}; {out}" if out else reason, excerpt(unusable)) from failure

    async def _constrained(
        self, endpoint: EndpointConfig, messages: Messages, fields: Sequence[Field], allowance: _Allowance
    ) -> Reply:
        """The raw answer, constrained to the JSON schema if the endpoint supports that.

        An endpoint that refuses the schema, or fails over it and has never answered with one, is asked once more
        without it.
        """
        model = self._servers.model(endpoint)
        address = (model, endpoint.api_base)
        supports = model.startswith(SERVED) or endpoint.api_base or _supports_schema(model)
        if self._unformatted[address] >= _TRIALS or not supports:
            return await self._call(endpoint, messages, allowance)
        schema = {"name": "answer", "schema": json_schema(fields), "strict": True}
        form = {"type": "json_schema", "json_schema": schema}
        try:
            reply = await self._call(endpoint, messages, allowance, response_format=form)
            self._formatted.add(address)
            return reply
        except OpenAIError as error:
            status = getattr(error, "status_code", None)
            fails = status in _FAILED and _has_status(error) and address not in self._formatted
            if status not in _REFUSED and not (fails and not allowance.asked_without_format):
                raise
            allowance.asked_without_format = True
        reply = await self._call(endpoint, messages, allowance)  # may succeed where the same request with it did not
        self._unformatted[address] += 1 if status in _FAILED else _TRIALS
        if self._unformatted[address] >= _TRIALS:
            logger.warning(f"{endpoint.model}: answers status {status} to response_format; answers are not constrained")
        return reply

    async def _call(self, endpoint: EndpointConfig, messages: Messages, allowance: _Allowance, **options: Any) -> Reply:
        """Send one request as soon as the limiter admits it."""
        options = {**arguments(endpoint), "model": endpoint.model, "api_base": endpoint.api_base, **options}
        with self._servers.server(endpoint, messages) as overrides:
            queue = None if overrides else self._queue  # the run's own servers have no limits
            return await self._request(endpoint, messages, allowance, queue, {**options, **overrides})

    async def _request(
        self,
        endpoint: EndpointConfig,
        messages: Messages,
        allowance: _Allowance,
        queue: CallQueue | None,
        options: dict[str, Any],
    ) -> Reply:
        prompt = sum(len(message["content"]) for message in messages) // _CHARACTERS_PER_TOKEN
        upper_bound = self._upper_bound(endpoint, messages, options)
        reservation = Reservation(prompt + token_budget(endpoint), endpoint.timeout + _GRACE, upper_bound.usd)
        number = await queue.begin(reservation) if queue else 0
        finished = FinishedCall(number)
        seconds = min(endpoint.timeout, allowance.seconds_left)
        is_internal_call.set(True)  # a third faster: LiteLLM records nothing for callbacks
        try:
            with allowance.spending():
                async with asyncio.timeout(seconds):
                    answer = await litellm.acompletion(messages=messages, max_retries=0, **options)
            reply = read_reply(endpoint, answer)
            finished = self._reported(endpoint, messages, answer, reply)
            allowance.note(answer, reply)
        except BaseException as error:
            if _may_have_cost(error):
                finished = upper_bound
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"no answer within {seconds:g} s") from error
            if any(isinstance(cause, BodyTooLong) for cause in causes(error)):
                raise AnswerTooLong(f"{endpoint.model}: response exceeds {LONGEST_BODY} bytes") from error
            raise
        finally:
            self.totals["tokens"] += finished.tokens or 0
            self.totals["usd"] += finished.usd or 0.0
            self.totals["unpriced"] += finished.usd is None
            allowance.pay(finished.usd)
            if queue:
                queue.end(replace(finished, call=number))
        if len(reply.text) > LONGEST_TEXT:
            kept = excerpt(reply.text[:LONGEST_TEXT])
            raise AnswerTooLong(f"{endpoint.model}: {len(reply.text)} characters", kept)
        return reply

    def _upper_bound(self, endpoint: EndpointConfig, messages: Messages, options: Mapping[str, Any]) -> FinishedCall:
        """Upper bound of tokens and price, for a call whose usage is not reported."""
        formats = json.dumps([options.get(name) for name in ("response_format", "tools")])
        prompt, answer = tokens_at_most(formats, *(message["content"] for message in messages)), token_budget(endpoint)
        return FinishedCall(0, prompt + answer, self._prices.at_most(str(endpoint.model), prompt, answer))

    def _reported(self, endpoint: EndpointConfig, messages: Messages, answer: Any, reply: Reply) -> FinishedCall:
        """Reported tokens and price of a call; an upper bound if the endpoint reports none (LiteLLM: 0 or no usage)."""
        usage, model = getattr(answer, "usage", None), str(endpoint.model)
        if usage and usage.total_tokens:
            listed = answer._hidden_params.get("response_cost")
            return FinishedCall(0, usage.total_tokens, self._prices.of(model, usage, listed))
        prompt, tokens = tokens_at_most(*(message["content"] for message in messages)), tokens_at_most(reply.text)
        return FinishedCall(0, prompt + tokens, self._prices.at_most(model, prompt, tokens))


@dataclass
class _Allowance:
    """Seconds left for the attempts of one question and the pauses between them, and the `usage` of all attempts."""

    seconds_left: float
    usage: Usage
    asked_without_format: bool = False

    @contextmanager
    def spending(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - began
            self.seconds_left -= seconds
            self.usage.seconds += seconds

    def note(self, answer: Any, reply: Reply) -> None:
        """Add the reported tokens of an answer and record the model version."""
        usage = getattr(answer, "usage", None)
        self.usage.prompt_tokens += getattr(usage, "prompt_tokens", None) or 0
        self.usage.answer_tokens += getattr(usage, "completion_tokens", None) or 0
        self.usage.version = reply.version

    def pay(self, usd: float | None) -> None:
        """Add the price of a request; None: unknown."""
        self.usage.requests += 1
        self.usage.usd = None if usd is None or self.usage.usd is None else self.usage.usd + usd


def _on_policy(endpoint: EndpointConfig) -> bool:
    return str(endpoint.model).startswith(f"{POLICY}/")


def _may_have_cost(error: BaseException) -> bool:
    """Whether the failed call may be billed: the request reached the endpoint, and it did not reject it."""
    refused = getattr(error, "status_code", None) in range(400, 500) and getattr(error, "status_code", None) != 408
    return not (refused or _has_status(error) or unconnected(error))


def _has_status(error: BaseException) -> bool:
    """Whether the server answered with the status; LiteLLM gives one to lost connections, too."""
    return any(isinstance(cause, httpx.HTTPStatusError) for cause in causes(error))


def _correction(text: str, error: MalformedAnswer) -> Messages:
    """Messages for the next attempt: the malformed answer and what is wrong with it."""
    encodable = text.encode(errors="replace").decode()  # half a surrogate pair cannot be sent
    reply = [{"role": "assistant", "content": encodable}] if encodable.strip() else []
    wrong = f"This answer cannot be used: {error}. Answer again, with one JSON object as described and nothing else."
    return [*reply, {"role": "user", "content": wrong}]


def _retry_after(error: Exception) -> float:
    response = getattr(error, "response", None)
    headers = getattr(error, "litellm_response_headers", None) or getattr(response, "headers", {})
    return retry_after(headers.get("retry-after", ""))
