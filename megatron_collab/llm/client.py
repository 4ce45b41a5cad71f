"""Client of language models through LiteLLM: retries, rate limits, cached or recorded answers in a given format."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import httpx
import litellm
from litellm._internal_context import is_internal_call
from openai import OpenAIError

from megatron_collab.config import EndpointConfig
from megatron_collab.llm.answer import AnswerTooLong, Field, LlmError, MalformedAnswer, checked, json_schema, parse
from megatron_collab.llm.cache import Cache, key_of
from megatron_collab.llm.endpoint import POLICY, SERVED, arguments, identity, question_of, token_budget, way_out
from megatron_collab.llm.limiter import Ended, Line, Wish
from megatron_collab.llm.price import Prices, tokens_at_most
from megatron_collab.llm.recording import Taken
from megatron_collab.llm.served import OwnServers, ServedModel, causes, unconnected
from megatron_collab.llm.tape import Tape
from megatron_collab.patches.litellm import BodyTooLong, be_quiet, limit_bodies
from megatron_collab.runtime.redact import redact

Messages = list[dict[str, str]]
_Read = TypeVar("_Read")


class Reply(NamedTuple):
    """What a model said, in how many tokens (0: not reported), and why it stopped."""

    text: str
    tokens: int
    finish: str | None


_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # seconds
_CHARACTERS_PER_TOKEN = 4
_GRACE = 10.0  # seconds after its timeout when a call has ended for certain
_LONGEST_REASON = 400  # characters
LONGEST_BODY, LONGEST_TEXT = 1 << 24, 1 << 20  # bytes, characters of an answer: no model says as much at once
_REFUSED = (400, 422)  # status of a server that does not support an argument, as response_format
_supports_schema = cache(litellm.supports_response_schema)


class LlmClient:
    """Asks language models as `limiter` admits, one a process; answers to questions with a `sample` are in `cache`."""

    def __init__(
        self,
        limiter: Any = None,
        cache: Cache | None = None,
        keys: Mapping[str, str] = {},
        served: Mapping[str, ServedModel] = {},
        prices: Mapping[str, Sequence[float]] = {},
        tape: Tape | None = None,
    ) -> None:
        """`limiter`: the handle of a Limiter; none: no limits. `keys`: by api_base, of the servers of policy/SAMPLE.

        `served`: by NAME, the models called served/NAME, or served/NAME/SAMPLE where answers to the same differ.
        `prices`: llm.prices. `tape`: records or replays answers; not those of the policy, which depend on its weights.
        """
        be_quiet()
        limit_bodies(LONGEST_BODY)
        self._prices = Prices(prices)
        self.took: dict[str, float] = {"tokens": 0, "usd": 0.0, "unpriced": 0}  # all calls so far
        self._own = OwnServers(keys, served)
        self._line = None if limiter is None else Line(limiter)
        self._cache, self._tape = cache, tape
        self._asking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._unconstrained: set[tuple[str, str | None]] = set()  # endpoints that refuse a response_format

    async def ask(
        self,
        endpoint: EndpointConfig,
        messages: Messages,
        fields: Sequence[Field],
        *,
        sample: str | None = None,
        others: bool = False,
    ) -> dict[str, Any]:
        """The values of `fields` in the model's answer.

        `sample` numbers the answers to the same question, each asked for once and cached; none: no cache. Raises
        LlmError where there is no usable answer within `endpoint.attempts` and `endpoint.deadline`, which count neither
        waiting for the limiter nor attempts without a connection, unless there are `others` to ask; AnswerTooLong;
        BudgetSpent; NotRecorded.
        """

        async def live(taken: Taken) -> dict[str, Any]:
            return await self._cached(endpoint, messages, fields, sample, others, taken)

        if self._tape is None or _on_policy(endpoint):
            return await live(Taken())
        question = {**question_of(endpoint), "messages": messages, "schema": json_schema(fields), "sample": sample}
        return checked(await self._tape.answer(question, live, shared=sample is not None), fields)

    async def reply(self, endpoint: EndpointConfig, messages: Messages) -> Reply:
        """What the model says, as it says it, its tokens estimated if they are not reported. Raises as `ask`."""

        def counted(reply: Reply) -> Reply:
            return reply if reply.tokens else reply._replace(tokens=litellm.token_counter(text=reply.text))

        async def live(taken: Taken) -> Reply:
            async def say(again: Messages, allowance: _Allowance) -> Reply:
                return await self._call(endpoint, messages, allowance)

            return await self._until_read(endpoint, say, counted, taken)

        if self._tape is None or _on_policy(endpoint):
            return await live(Taken())
        question = {**question_of(endpoint), "messages": messages, "schema": None, "sample": None}
        return Reply(*await self._tape.answer(question, live))

    async def _cached(
        self,
        endpoint: EndpointConfig,
        messages: Messages,
        fields: Sequence[Field],
        sample: str | None,
        others: bool,
        taken: Taken,
    ) -> dict[str, Any]:
        """The values of `fields`, from the cache where they are there."""
        if sample is None or self._cache is None:
            return await self._ask(endpoint, messages, fields, others, taken)
        asked = {**identity(endpoint), "model": self._own.model(endpoint)}
        key = key_of({**asked, "messages": messages, "schema": json_schema(fields), "sample": sample})
        lock = self._asking.setdefault(key, asyncio.Lock())
        async with lock:  # concurrent callers with the same question find the answer in the cache
            answer = self._cache.get(key, fields)
            taken.cached = answer is not None
            if answer is None:
                answer = await self._ask(endpoint, messages, fields, others, taken)
                self._cache.put(key, answer)
            return answer

    async def _ask(
        self, endpoint: EndpointConfig, messages: Messages, fields: Sequence[Field], others: bool, taken: Taken
    ) -> dict[str, Any]:
        async def say(again: Messages, allowance: _Allowance) -> Reply:
            return await self._constrained(endpoint, [*messages, *again], fields, allowance)

        return await self._until_read(endpoint, say, lambda reply: parse(reply.text, fields), taken, others)

    async def _until_read(
        self,
        endpoint: EndpointConfig,
        say: Callable[[Messages, _Allowance], Awaitable[Reply]],
        read: Callable[[Reply], _Read],
        taken: Taken,
        others: bool = False,
    ) -> _Read:
        """What `read` makes of what the model says; asked for again where it cannot, with messages that say why."""
        allowance = _Allowance(endpoint.deadline, taken)
        again: Messages = []
        failure: Exception | None = None
        tries, longest = 0, _FIRST_PAUSE
        while True:
            tries, pause = tries + 1, 0.0
            try:
                reply = await say(again, allowance)
                return read(reply)
            except MalformedAnswer as error:
                failure, again = error, _correction(reply.text, error)
            except (OpenAIError, TimeoutError) as error:
                failure, status = error, getattr(error, "status_code", None)
                # Timeouts, lost connections, rate limits and faults of the server may pass.
                if status is not None and status < 500 and status not in (408, 409, 429):
                    break
                tries -= unconnected(error) and not others
                pause = retry_after(error) + random.uniform(0, longest)
            longest = min(_LONGEST_PAUSE, 2 * longest)
            if tries == endpoint.attempts or pause >= allowance.left:
                break
            with allowance.spending():
                await asyncio.sleep(pause)
        reason = redact(f"{endpoint.model}: {type(failure).__name__}: {failure}")  # before a cut could halve a key
        reason = " ".join(reason.split())[:_LONGEST_REASON]
        out = way_out(endpoint, str(failure)) if getattr(failure, "status_code", None) in _REFUSED else ""
        raise LlmError(f"{reason}; {out}" if out else reason) from failure

    async def _constrained(
        self, endpoint: EndpointConfig, messages: Messages, fields: Sequence[Field], allowance: _Allowance
    ) -> Reply:
        """The raw answer, constrained to the JSON schema where the endpoint supports that."""
        model = self._own.model(endpoint)
        name = (model, endpoint.api_base)
        supports = model.startswith(SERVED) or endpoint.api_base or _supports_schema(model)
        if name in self._unconstrained or not supports:
            return await self._call(endpoint, messages, allowance)
        schema = {"name": "answer", "schema": json_schema(fields), "strict": True}
        form = {"type": "json_schema", "json_schema": schema}
        try:
            return await self._call(endpoint, messages, allowance, response_format=form)
        except OpenAIError as error:
            if getattr(error, "status_code", None) not in _REFUSED:
                raise
        reply = await self._call(endpoint, messages, allowance)
        self._unconstrained.add(name)  # since the same request without it succeeded
        return reply

    async def _call(self, endpoint: EndpointConfig, messages: Messages, allowance: _Allowance, **options: Any) -> Reply:
        """One request: the answer, once the limiter admits it."""
        given = {**arguments(endpoint), "model": endpoint.model, "api_base": endpoint.api_base, **options}
        with self._own.server(endpoint, messages) as own:  # which has no limits
            return await self._request(endpoint, messages, allowance, None if own else self._line, {**given, **own})

    async def _request(
        self,
        endpoint: EndpointConfig,
        messages: Messages,
        allowance: _Allowance,
        line: Line | None,
        options: dict[str, Any],
    ) -> Reply:
        prompt = sum(len(message["content"]) for message in messages) // _CHARACTERS_PER_TOKEN
        most = self._most(endpoint, messages, options)
        wish = Wish(prompt + token_budget(endpoint), endpoint.timeout + _GRACE, most.usd)
        number = await line.begin(wish) if line else 0
        ended = Ended(number)
        seconds = min(endpoint.timeout, allowance.left)
        is_internal_call.set(True)  # spares a third: what LiteLLM would record for callbacks, of which there are none
        try:
            with allowance.spending():
                async with asyncio.timeout(seconds):
                    answer = await litellm.acompletion(messages=messages, max_retries=0, **options)
            ended = self._took(endpoint, messages, answer)
            allowance.note(answer)
        except BaseException as error:
            if _may_cost(error):
                ended = most
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"no answer within {seconds:g} s") from error
            if any(isinstance(cause, BodyTooLong) for cause in causes(error)):
                raise AnswerTooLong(f"{endpoint.model}: more than {LONGEST_BODY} bytes") from error
            raise
        finally:
            self.took["tokens"] += ended.tokens or 0
            self.took["usd"] += ended.usd or 0.0
            self.took["unpriced"] += ended.usd is None
            allowance.pay(ended.usd)
            if line:
                line.end(replace(ended, call=number))
        text, choice = _text(answer), answer.choices[0] if answer.choices else None
        if len(text) > LONGEST_TEXT:
            raise AnswerTooLong(f"{endpoint.model}: {len(text)} characters")
        tokens = getattr(getattr(answer, "usage", None), "completion_tokens", None) or 0
        return Reply(text, tokens, choice.finish_reason if choice else None)

    def _most(self, endpoint: EndpointConfig, messages: Messages, options: Mapping[str, Any]) -> Ended:
        """What a call costs at most, of which nobody says what it took."""
        schema = json.dumps(options.get("response_format"))
        prompt, answer = tokens_at_most(schema, *(each["content"] for each in messages)), token_budget(endpoint)
        return Ended(0, prompt + answer, self._prices.at_most(str(endpoint.model), prompt, answer))

    def _took(self, endpoint: EndpointConfig, messages: Messages, answer: Any) -> Ended:
        """What a call took by its endpoint's count, or at most where it reports none: LiteLLM gives 0, or nothing."""
        usage, model = getattr(answer, "usage", None), str(endpoint.model)
        if usage and usage.total_tokens:
            listed = answer._hidden_params.get("response_cost")
            return Ended(0, usage.total_tokens, self._prices.of(model, usage, listed))
        prompt, said = tokens_at_most(*(each["content"] for each in messages)), tokens_at_most(_text(answer))
        return Ended(0, prompt + said, self._prices.at_most(model, prompt, said))


@dataclass
class _Allowance:
    """Seconds left for the attempts of one question and the pauses between them, and what these have `taken`."""

    left: float
    taken: Taken

    @contextmanager
    def spending(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - began
            self.left -= seconds
            self.taken.seconds += seconds

    def note(self, answer: Any) -> None:
        """Add the tokens of an answer, by its endpoint's count, and which model has given it."""
        usage = getattr(answer, "usage", None)
        self.taken.prompt_tokens += getattr(usage, "prompt_tokens", None) or 0
        self.taken.answer_tokens += getattr(usage, "completion_tokens", None) or 0
        versions = getattr(answer, "model", None), getattr(answer, "system_fingerprint", None)
        self.taken.version = " ".join(str(version) for version in versions if version)

    def pay(self, usd: float | None) -> None:
        """Add what a request has cost; None: not known."""
        self.taken.requests += 1
        self.taken.usd = None if usd is None or self.taken.usd is None else self.taken.usd + usd


def _on_policy(endpoint: EndpointConfig) -> bool:
    return str(endpoint.model).startswith(f"{POLICY}/")


def _text(answer: Any) -> str:
    return (answer.choices[0].message.content if answer.choices else None) or ""


def _may_cost(error: BaseException) -> bool:
    """Whether an endpoint may have worked on a call that failed so: it had the request, and has not refused it."""
    refused = getattr(error, "status_code", None) in range(400, 500) and getattr(error, "status_code", None) != 408
    answered = any(isinstance(cause, httpx.HTTPStatusError) for cause in causes(error))
    return not (refused or answered or unconnected(error))


def _correction(text: str, error: MalformedAnswer) -> Messages:
    """Messages that ask for the answer again: the malformed one, and what is wrong with it."""
    shown = text.encode(errors="replace").decode()  # half a surrogate pair cannot be sent
    said = [{"role": "assistant", "content": shown}] if shown.strip() else []
    wrong = f"This answer cannot be used: {error}. Answer again, with one JSON object as described and nothing else."
    return [*said, {"role": "user", "content": wrong}]


def retry_after(error: Exception) -> float:
    """Seconds of the header Retry-After (RFC 9110 section 10.2.3: seconds or a date); 0 where it is neither.

    They may be more than any deadline, or infinite.
    """
    response = getattr(error, "response", None)
    headers = getattr(error, "litellm_response_headers", None) or getattr(response, "headers", {})
    value = headers.get("retry-after", "")
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", value):
        return float(value)
    try:
        date = parsedate_to_datetime(value).replace(tzinfo=UTC)  # HTTP knows no other zone
    except (ValueError, OverflowError, TypeError, LookupError):  # whatever the parser of e-mails meets
        return 0.0
    return max(0.0, (date - datetime.now(UTC)).total_seconds())
