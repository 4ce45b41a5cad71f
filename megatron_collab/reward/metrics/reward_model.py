"""The score of a discriminative reward model (`…ForSequenceClassification` or `…ForRewardModel`) on SGLang servers.

The server renders the conversation by the model's own chat template (`/v1/tokenize`) and scores it (`/classify`, which
gives the raw output; `/v1/classify` would give its softmax, 1 for every text).

Of a server that the run has not started: SGLang 0.5.23 gives the heads of Qwen2- and Qwen3ForSequenceClassification a
bias that no checkpoint fills. Their scores are off by a constant, another after a restart. Advantages do not notice;
clipped parts do. The heads of Llama and of `…ForRewardModel` are exact, and so is all that the run serves itself.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from megatron_collab.config import ServedConfig, option
from megatron_collab.inference.client import EngineError, ServerGone, TransientError, post
from megatron_collab.inference.served import score_fault
from megatron_collab.llm.answer import LlmError
from megatron_collab.llm.endpoint import SERVED
from megatron_collab.llm.recording import Taken
from megatron_collab.reward.metrics import Judge, Metric
from megatron_collab.types import Conversation, Message, Missing, Score, Task

KEY_VARIABLE = "REWARD_MODEL_API_KEY"
TIMEOUT = 60.0  # seconds of one try
_TOO_LONG = "context length"  # in SGLang's refusal of what the model has no room for


class RewardModel(Metric):
    """The model's output for the whole conversation, unbounded.

    One that is too long for the model is cut from the front, by whole turns; the system message stays. Counted.
    """

    @dataclass(frozen=True)
    class Options:
        model: str = option(
            "",
            "reward model, which the run serves: Hugging Face folder, OWNER/NAME[@REVISION] of the Hub, or served/NAME",
        )
        replicas: int = option(1, "servers of model, over which conversations are spread", ge=1)
        tp: int = option(1, "tensor parallel size of a server of model", ge=1)
        url: str = option(
            "", "instead of model: a server, as http://10.0.0.5:30000; its key is in REWARD_MODEL_API_KEY"
        )

        def __post_init__(self) -> None:
            if self.model and self.url:
                raise ValueError(f"url={self.url}: model={self.model} is served by the run; give one of them")
            if not self.model and not self.url.startswith(("http://", "https://")):
                message = "give the address of an SGLang server, as http://HOST:PORT, or model"
                raise ValueError(f"url={self.url}: {message}")

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
        async def live(taken: Taken) -> dict[str, Any]:
            began = time.monotonic()
            found = await self._scored(conversation.messages)
            taken.seconds, taken.requests, taken.version = time.monotonic() - began, 1, self.options.model
            return found

        # Neither address nor folder: they may be others where it is replayed.
        model, messages = f"reward.metrics.{self.name}", [each.as_dict() for each in conversation.messages]
        try:
            if self.tape is None:
                found = await live(Taken())
            else:
                found = await self.tape.answer({"model": model, "messages": messages}, live, shared=True)
        except LlmError as error:
            return Missing(str(error))
        self.counters.update(["cut"] if found["cut"] else [])
        return float(found["score"])

    async def _scored(self, messages: Sequence[Message]) -> dict[str, Any]:
        """The score by the server with the least to do, and whether messages were cut for it. Raises LlmError."""
        left, why = dict(self.servers), "no server of the reward model"
        while left:
            url = min(left, key=self._in_flight.__getitem__)
            key = left.pop(url)
            self._in_flight[url] += 1
            try:
                return await self._score(url, key, messages)
            except ServerGone as error:  # another one may be there
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
            for shown in _cut(messages):
                chat = {"messages": [message.as_dict() for message in shown], "add_generation_prompt": False}
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
        return {"score": outputs[0], "cut": shown is not messages}

    async def _ask(self, session: aiohttp.ClientSession, url: str, body: dict[str, Any], wanted: str) -> list[Any]:
        """The list `wanted` of the server's answer; EngineError without one."""
        silence = TransientError(f"{url}: no answer within {TIMEOUT:g} s")
        text = await post(session, url, body, aiohttp.ClientResponse.text, silence)
        try:
            found = json.loads(text)[wanted]
        except (ValueError, TypeError, KeyError):
            found = None
        if not isinstance(found, list):
            raise EngineError(f"{url}: no list {wanted!r} in the answer {text[:200]!r}; is it SGLang?")
        return found


def _cut(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """The messages, then ever fewer of them: without the first turns, each a message of the user and what follows it.

    A system message at the beginning stays, and so does the last turn that has an answer of the assistant.
    """
    yield messages
    system = [message for message in messages[:1] if message.role == "system"]
    answered = max((at for at, message in enumerate(messages) if message.role == "assistant"), default=0)
    users = [at for at, message in enumerate(messages[:answered]) if message.role == "user"]
    for begin in users[1:]:
        yield [*system, *messages[begin:]]
