"""The score of a discriminative reward model (`…ForSequenceClassification` or `…ForRewardModel`) on SGLang servers.

The server renders the conversation with the model's chat template (`/v1/tokenize`) and scores it (`/classify`, which
returns the raw output; `/v1/classify` would return its softmax, 1 for every text).

Servers that the run has not started: SGLang 0.5.23 gives the heads of Qwen2- and Qwen3ForSequenceClassification a bias
that no checkpoint fills. Their scores are off by a constant, which changes on a restart. It cancels in advantages, but
not in clipped parts. The heads of Llama and of `…ForRewardModel` are exact, as are all models that the run serves.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from megatron_collab.data.transcript import escaped
from megatron_collab.inference.client import EngineError, ServerGone, TransientError, post
from megatron_collab.inference.served import score_fault
from megatron_collab.llm.answer import LlmError
from megatron_collab.llm.endpoint import SERVED
from megatron_collab.llm.recording import Usage
from megatron_collab.reward.metrics import Judge, Metric
from megatron_collab.settings import ADDRESS, ServedConfig, header_fault, option
from megatron_collab.settings.documents import parse_json
from megatron_collab.types import Conversation, Message, Missing, Score, Task

KEY_VARIABLE = "REWARD_MODEL_API_KEY"
TIMEOUT = 60.0  # seconds of one attempt
_TOO_LONG = "context length"  # in SGLang's error for input longer than the model's context


class RewardModel(Metric):
    """The model's output for the whole conversation, unbounded.

    If it is too long for the model, whole turns are cut from the front; the system message stays. Cuts are counted.
    """

    learned = True

    @dataclass(frozen=True)
    class Options:
        model: str = option(
            "",
            "reward model that the run serves: Hugging Face folder, OWNER/NAME[@REVISION] of the Hub, or served/NAME",
        )
        replicas: int = option(1, "servers of model, which share the conversations", ge=1)
        tp: int = option(1, "tensor parallel size of a server of model", ge=1)
        url: str = option(
            "",
            "instead of model: a server, e.g. http://10.0.0.5:30000; its key is in REWARD_MODEL_API_KEY",
            kind=ADDRESS,
        )

        def __post_init__(self) -> None:
            if self.model and self.url:
                raise ValueError(f"url={self.url}: model={self.model} is served by the run; give one of them")
            if not self.model and not self.url:
                raise ValueError("url=: give the address of an SGLang server (http://HOST:PORT) or model")
            if self.url and (fault := header_fault(os.environ.get(KEY_VARIABLE) or "unset")):
                raise ValueError(f"environment variable {KEY_VARIABLE} {fault}")

    def __init__(self, options: Any, judge: Judge) -> None:
        super().__init__(options, judge)
        if options.url:
            self.servers = [(options.url.rstrip("/"), os.environ.get(KEY_VARIABLE, ""))]
        self._in_flight: Counter[str] = Counter()  # by address

    @classmethod
    def unavailable(cls, options: Any) -> str | None:
        return score_fault(options.model) if options.model and not options.model.startswith(SERVED) else None

    @classmethod
    def served(cls, options: Any) -> ServedConfig | None:
        return ServedConfig(options.model, options.replicas, options.tp) if options.model else None

    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        # The server's tokenizer would read control tokens in the text as its own.
        shown = [replace(message, content=escaped(message.content)) for message in conversation.messages]

        async def live(usage: Usage) -> dict[str, Any]:
            began = time.monotonic()
            result = await self._scored(shown)
            usage.seconds, usage.requests, usage.version = time.monotonic() - began, 1, self.options.model
            return result

        # Neither address nor folder: they may differ when the call is replayed.
        model, messages = f"reward.metrics.{self.name}", [message.as_dict() for message in shown]
        try:
            if self.tape is None:
                result = await live(Usage())
            else:
                result = await self.tape.answer({"model": model, "messages": messages}, live, shared=True)
        except LlmError as error:
            return Missing(str(error))
        self.counters.update(["cut"] if result["cut"] else [])
        return float(result["score"])

    async def _scored(self, messages: Sequence[Message]) -> dict[str, Any]:
        """The score from the least loaded server, and whether messages were cut. Raises LlmError."""
        untried, why = dict(self.servers), "no server of the reward model"
        while untried:
            url = min(untried, key=self._in_flight.__getitem__)
            key = untried.pop(url)
            self._in_flight[url] += 1
            try:
                return await self._score(url, key, messages)
            except ServerGone as error:  # another server may be up
                why = str(error)
            except EngineError as error:
                raise LlmError(str(error)) from error
            finally:
                self._in_flight[url] -= 1
        raise LlmError(why)

    async def _score(self, url: str, key: str, messages: Sequence[Message]) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = aiohttp.ClientTimeout(total=TIMEOUT)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
            for candidate in _cut(messages):
                chat = {"messages": [message.as_dict() for message in candidate], "add_generation_prompt": False}
                tokens = await self._ask(session, f"{url}/v1/tokenize", chat, "tokens")
                try:
                    outputs = await self._ask(session, f"{url}/classify", {"input_ids": tokens}, "embedding")
                    break
                except EngineError as error:
                    if _TOO_LONG not in str(error):
                        raise
                    refusal = error
            else:
                raise refusal  # even the last turn is too long
        if len(outputs) != 1:
            raise EngineError(f"{url}: the model has {len(outputs)} outputs; a reward model has one")
        if not isinstance(outputs[0], float) or not math.isfinite(outputs[0]):
            raise EngineError(f"{url}: the model's output is {outputs[0]}")
        return {"score": outputs[0], "cut": candidate is not messages}

    async def _ask(self, session: aiohttp.ClientSession, url: str, body: dict[str, Any], field: str) -> list[Any]:
        """The list `field` of the server's answer. Raises EngineError without one."""
        late = f"{url}: no answer within {TIMEOUT:g} s"
        text = await post(session, url, body, aiohttp.ClientResponse.text, late, timeout=TransientError)
        try:
            values = parse_json(text)[field]
        except (ValueError, TypeError, KeyError):
            values = None
        if not isinstance(values, list):
            raise EngineError(f"{url}: no list {field!r} in the answer {text[:200]!r}; is it SGLang?")
        return values


def _cut(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """The messages, then shorter and shorter lists without the first turns: a user message and all up to the next.

    A leading system message stays, and so does the last turn with an assistant message.
    """
    yield messages
    system = [message for message in messages[:1] if message.role == "system"]
    answered = max((at for at, message in enumerate(messages) if message.role == "assistant"), default=0)
    users = [at for at, message in enumerate(messages[:answered]) if message.role == "user"]
    for begin in users[1:]:
        yield [*system, *messages[begin:]]
