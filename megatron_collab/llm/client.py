"""Client of language models through LiteLLM: retries, rate limits, cached answers in a given format."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import re
import socket
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import litellm
from filelock import FileLock
from litellm._internal_context import is_internal_call
from openai import OpenAIError

from megatron_collab.config import EndpointConfig
from megatron_collab.llm.answer import Field, LlmError, MalformedAnswer, json_schema, parse
from megatron_collab.llm.endpoint import SERVED, arguments, identity, token_budget, way_out
from megatron_collab.llm.limiter import Ended, Line, Wish
from megatron_collab.llm.served import OwnServers, ServedModel, unconnected
from megatron_collab.patches.litellm import be_quiet
from megatron_collab.runtime.redact import redact

Messages = list[dict[str, str]]
_Read = TypeVar("_Read")


class Reply(NamedTuple):
    """What a model said, in how many tokens (0: not reported), and why it stopped."""

    text: str
    tokens: int
    finish: str | None


_BUSY = 60.0  # seconds to wait for another process's write to the cache
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # seconds
_CHARACTERS_PER_TOKEN = 4
_GRACE = 10.0  # seconds after its timeout when a call has ended for certain
_LONGEST_REASON = 400  # characters
_REFUSED = (400, 422)  # status of a server that does not support an argument, as response_format
_supports_schema = cache(litellm.supports_response_schema)


class Cache:
    """A persistent map from questions to their answers: each is paid for once. Several processes may share a folder.

    Each node has its own file there: SQLite's write-ahead log needs shared memory, which network file systems lack.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        node = socket.gethostname()
        with FileLock(folder / f"{node}.lock"):  # SQLite does not wait where two set the journal's mode at once
            self._file = sqlite3.connect(folder / f"{node}.sqlite", timeout=_BUSY, isolation_level=None)
            self._file.execute("PRAGMA journal_mode=WAL")
            self._file.execute("PRAGMA synchronous=NORMAL")  # a crash of the machine may lose the last answers
            self._file.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT) WITHOUT ROWID")

    def get(self, key: str) -> dict[str, Any] | None:
        row = self._file.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def put(self, key: str, answer: dict[str, Any]) -> None:
        self._file.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, json.dumps(answer)))


def key_of(question: dict[str, Any]) -> str:
    """A digest of everything that an answer depends on; `question` is JSON."""
    return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()


class LlmClient:
    """Asks language models as `limiter` admits, one a process; answers to questions with a `sample` are in `cache`."""

    def __init__(
        self,
        limiter: Any = None,
        cache: Cache | None = None,
        keys: Mapping[str, str] = {},
        served: Mapping[str, ServedModel] = {},
    ) -> None:
        """`limiter`: the handle of a Limiter; none: no limits. `keys`: by api_base, of the servers of policy/SAMPLE.

        `served`: by NAME, the models called served/NAME, or served/NAME/SAMPLE where answers to the same differ.
        """
        be_quiet()
        self.took: dict[str, float] = {"tokens": 0, "usd": 0.0, "unpriced": 0}  # all calls so far
        self._own = OwnServers(keys, served)
        self._line = None if limiter is None else Line(limiter)
        self._cache = cache
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
        waiting for the limiter nor attempts without a connection, unless there are `others` to ask; BudgetSpent.
        """
        if sample is None or self._cache is None:
            return await self._ask(endpoint, messages, fields, others)
        asked = {**identity(endpoint), "model": self._own.model(endpoint)}
        key = key_of({**asked, "messages": messages, "schema": json_schema(fields), "sample": sample})
        lock = self._asking.setdefault(key, asyncio.Lock())
        async with lock:  # concurrent callers with the same question find the answer in the cache
            answer = self._cache.get(key)
            if answer is None:
                answer = await self._ask(endpoint, messages, fields, others)
                self._cache.put(key, answer)
            return answer

    async def reply(self, endpoint: EndpointConfig, messages: Messages) -> Reply:
        """What the model says, as it says it, its tokens estimated if they are not reported. Raises as `ask`."""

        def counted(reply: Reply) -> Reply:
            return reply if reply.tokens else reply._replace(tokens=litellm.token_counter(text=reply.text))

        async def say(again: Messages, allowance: _Allowance) -> Reply:
            return await self._call(endpoint, messages, allowance)

        return await self._until_read(endpoint, say, counted)

    async def _ask(
        self, endpoint: EndpointConfig, messages: Messages, fields: Sequence[Field], others: bool
    ) -> dict[str, Any]:
        async def say(again: Messages, allowance: _Allowance) -> Reply:
            return await self._constrained(endpoint, [*messages, *again], fields, allowance)

        return await self._until_read(endpoint, say, lambda reply: parse(reply.text, fields), others)

    async def _until_read(
        self,
        endpoint: EndpointConfig,
        say: Callable[[Messages, _Allowance], Awaitable[Reply]],
        read: Callable[[Reply], _Read],
        others: bool = False,
    ) -> _Read:
        """What `read` makes of what the model says; asked for again where it cannot, with messages that say why."""
        allowance = _Allowance(endpoint.deadline)
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
        wish = Wish(prompt + token_budget(endpoint), endpoint.timeout + _GRACE)
        number = await line.begin(wish) if line else 0
        ended = Ended(number)
        seconds = min(endpoint.timeout, allowance.left)
        is_internal_call.set(True)  # spares a third: what LiteLLM would record for callbacks, of which there are none
        try:
            with allowance.spending():
                async with asyncio.timeout(seconds):
                    answer = await litellm.acompletion(messages=messages, max_retries=0, **options)
            # Where the endpoint reports no tokens, LiteLLM gives 0, or no usage at all.
            usage = getattr(answer, "usage", None)
            tokens = (usage.total_tokens or None) if usage else None
            ended = Ended(number, tokens, answer._hidden_params.get("response_cost") if tokens else None)
        except TimeoutError as error:
            raise TimeoutError(f"no answer within {seconds:g} s") from error
        finally:
            self.took["tokens"] += ended.tokens or 0
            self.took["usd"] += ended.usd or 0.0
            self.took["unpriced"] += ended.usd is None
            if line:
                line.end(ended)
        choice = answer.choices[0] if answer.choices else None
        text = (choice.message.content if choice else None) or ""
        return Reply(text, getattr(usage, "completion_tokens", None) or 0, choice.finish_reason if choice else None)


@dataclass
class _Allowance:
    """Seconds left for the attempts of one question and the pauses between them."""

    left: float

    @contextmanager
    def spending(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.left -= time.monotonic() - began


def _correction(text: str, error: MalformedAnswer) -> Messages:
    """Messages that ask for the answer again: the malformed one, and what is wrong with it."""
    shown = text.encode(errors="replace").decode()  # half a surrogate pair cannot be sent
    said = [{"role": "assistant", "content": shown}] if shown.strip() else []
    wrong = f"This answer cannot be used: {error}. Answer again, with one JSON object as described and nothing else."
    return [*said, {"role": "user", "content": wrong}]


def retry_after(error: Exception) -> float:
    """Seconds of the header Retry-After (RFC 9110 section 10.2.3: seconds or a date); 0 where it is malformed."""
    response = getattr(error, "response", None)
    headers = getattr(error, "litellm_response_headers", None) or getattr(response, "headers", {})
    value = headers.get("retry-after", "")
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", value):
        return float(value)
    try:
        date = parsedate_to_datetime(value).replace(tzinfo=UTC)  # HTTP knows no other zone
    except ValueError:
        return 0.0
    return max(0.0, (date - datetime.now(UTC)).total_seconds())
