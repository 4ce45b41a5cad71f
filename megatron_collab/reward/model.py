"""Client of a discriminative reward model (one output, a `…ForSequenceClassification` or `…ForRewardModel`) on SGLang.

The server renders the conversation by the model's own chat template (`/v1/tokenize`) and scores it (`/classify`, which
gives the raw output; `/v1/classify` would give its softmax, 1 for every text).

SGLang 0.5.23 gives the heads of Qwen2- and Qwen3ForSequenceClassification a bias that no checkpoint fills: all their
scores are off by one constant, which is another after a restart. Advantages do not notice; clipped parts do. The heads
of Llama's and of the reward models (`…ForRewardModel`) are exact.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import aiohttp

from megatron_collab.runtime.network import retried
from megatron_collab.types import Message

ATTEMPTS = 4
BACKOFF_SECONDS = 0.5
TIMEOUT = 60.0  # seconds of one try
_TRANSIENT = (408, 409, 429)


class RewardModelError(RuntimeError):
    """The reward model gave no score; the reason is the text."""


class _TransientError(RewardModelError):
    """The same request may succeed later."""


class RewardModelClient:
    """Asks one server for scores; any number at a time, from any event loop."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def score(self, messages: Sequence[Message]) -> float:
        """The model's output for a whole conversation; RewardModelError, after several tries where that helps."""
        timeout = aiohttp.ClientTimeout(total=TIMEOUT)
        async with aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session:
            chat = {"messages": [message.as_dict() for message in messages], "add_generation_prompt": False}
            tokens = await self._post(session, "/v1/tokenize", chat, "tokens")
            outputs = await self._post(session, "/classify", {"input_ids": tokens}, "embedding")
        if len(outputs) != 1:
            raise RewardModelError(f"{self.url}: the model has {len(outputs)} outputs; a reward model has one")
        if not isinstance(outputs[0], float) or not math.isfinite(outputs[0]):
            raise RewardModelError(f"{self.url}: the model's output is {outputs[0]}")
        return outputs[0]

    async def _post(self, session: aiohttp.ClientSession, path: str, body: dict[str, Any], wanted: str) -> list[Any]:
        """The list `wanted` of the server's answer."""
        where = self.url + path

        async def once() -> list[Any]:
            try:
                async with session.post(where, json=body) as answer:
                    text = await answer.text()
            except TimeoutError as error:
                raise _TransientError(f"{where}: no answer within {TIMEOUT:g} s") from error
            except aiohttp.ClientError as error:
                raise _TransientError(f"{where}: {type(error).__name__}: {error}") from error
            if answer.status == 200:
                return _field(text, wanted, where)
            kind = _TransientError if answer.status >= 500 or answer.status in _TRANSIENT else RewardModelError
            raise kind(f"{where}: status {answer.status}: {' '.join(text.split())[:300]}")

        return await retried(once, _TransientError, ATTEMPTS, BACKOFF_SECONDS)


def _field(text: str, wanted: str, where: str) -> list[Any]:
    try:
        found = json.loads(text)[wanted]
    except (ValueError, TypeError, KeyError) as error:
        raise RewardModelError(f"{where}: no {wanted!r} in the answer {text[:200]!r}; is it SGLang?") from error
    if not isinstance(found, list):
        raise RewardModelError(f"{where}: {wanted!r} is no list in the answer {text[:200]!r}; is it SGLang?")
    return found
