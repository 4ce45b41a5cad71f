"""The score of a discriminative reward model (`…ForSequenceClassification` or `…ForRewardModel`) on an SGLang server.

The server renders the conversation by the model's own chat template (`/v1/tokenize`) and scores it (`/classify`, which
gives the raw output; `/v1/classify` would give its softmax, 1 for every text).

SGLang 0.5.23 gives the heads of Qwen2- and Qwen3ForSequenceClassification a bias that no checkpoint fills: their scores
are off by a constant, another after a restart. Advantages do not notice; clipped parts do. The heads of Llama and of
`…ForRewardModel` are exact.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from typing import Any

import aiohttp

from megatron_collab.config import option
from megatron_collab.inference.client import EngineError, TransientError, post
from megatron_collab.reward.metrics import Judge, Metric
from megatron_collab.types import Conversation, Missing, Score, Task

KEY_VARIABLE = "REWARD_MODEL_API_KEY"
TIMEOUT = 60.0  # seconds of one try


class RewardModel(Metric):
    """The model's output for the whole conversation, unbounded."""

    @dataclass(frozen=True)
    class Options:
        url: str = option("", "address of the server, as http://10.0.0.5:30000; its key is in REWARD_MODEL_API_KEY")

        def __post_init__(self) -> None:
            if not self.url.startswith(("http://", "https://")):
                raise ValueError(f"url={self.url}: give the address of an SGLang server, as http://HOST:PORT")

    def __init__(self, options: Any, judge: Judge) -> None:
        super().__init__(options, judge)
        self._url = options.url.rstrip("/")
        key = os.environ.get(KEY_VARIABLE)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        chat = {"messages": [message.as_dict() for message in conversation.messages], "add_generation_prompt": False}
        timeout = aiohttp.ClientTimeout(total=TIMEOUT)
        try:
            async with aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session:
                tokens = await self._ask(session, "/v1/tokenize", chat, "tokens")
                outputs = await self._ask(session, "/classify", {"input_ids": tokens}, "embedding")
        except EngineError as error:
            return Missing(str(error))
        if len(outputs) != 1:
            return Missing(f"{self._url}: the model has {len(outputs)} outputs; a reward model has one")
        if not isinstance(outputs[0], float) or not math.isfinite(outputs[0]):
            return Missing(f"{self._url}: the model's output is {outputs[0]}")
        return outputs[0]

    async def _ask(self, session: aiohttp.ClientSession, path: str, body: dict[str, Any], wanted: str) -> list[Any]:
        """The list `wanted` of the server's answer; EngineError without one."""
        url = self._url + path
        silence = TransientError(f"{url}: no answer within {TIMEOUT:g} s")
        text = await post(session, url, body, aiohttp.ClientResponse.text, silence)
        try:
            found = json.loads(text)[wanted]
        except (ValueError, TypeError, KeyError):
            found = None
        if not isinstance(found, list):
            raise EngineError(f"{url}: no list {wanted!r} in the answer {text[:200]!r}; is it SGLang?")
        return found
