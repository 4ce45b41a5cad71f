"""Metrics that count: tokens, questions, and the rewards that users and tools gave."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tiktoken

from megatron_collab.data.transcript import visible_messages
from megatron_collab.reward.metrics import Metric
from megatron_collab.settings import option
from megatron_collab.types import Conversation, Score, Task


class Asks(Metric):
    """1 if the trained turn contains a question mark, else 0."""

    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        return float("?" in conversation.replies[0])


class TurnRewards(Metric):
    """Sum of the rewards that users and tools gave for the policy's turns, from the trained turn on."""

    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        return float(sum(conversation.turn_rewards))


class TokenAmount(Metric):
    """Amount of text from the trained turn on or in the complete conversation, depending on `count`.

    policy  the policy's own token ids from the trained turn on, thoughts and end-of-turn tokens included
    cl100k  thousands of cl100k tokens of all assistant messages, also the task's, joined by spaces (the authors' code)
    seen    cl100k tokens of all user and assistant messages, also the task's, without thoughts and tool calls: what
            the user reads and writes (CollabLLM, arXiv 2502.00640, section 3)
    words   whitespace-separated words of user and assistant messages from the trained turn on (verl's recipe)
    """

    @dataclass(frozen=True)
    class Options:
        count: str = option("policy", "what is counted", choices=("policy", "cl100k", "seen", "words"))

    @classmethod
    def reads_tokens(cls, options: Any) -> bool:
        return options.count == "policy"

    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        if self.options.count == "policy":
            return float(sum(len(turn.token_ids) for turn in conversation.turns))
        if self.options.count == "cl100k":
            replies = [message.content for message in conversation.messages if message.role == "assistant"]
            return _cl100k_tokens(replies) / 1000
        if self.options.count == "seen":
            return float(_cl100k_tokens(message.content for message in visible_messages(conversation.messages)))
        since = conversation.messages[len(task.messages) :]
        return float(sum(len(message.content.split()) for message in since if message.role in ("user", "assistant")))


def _cl100k_tokens(texts: Iterable[str]) -> int:
    return len(_cl100k().encode(" ".join(texts), disallowed_special=()))


@cache
def _cl100k() -> tiktoken.Encoding:
    """Reads the table that LiteLLM ships; tiktoken would download it. LiteLLM is not imported, which takes seconds."""
    spec = find_spec("litellm")
    assert spec is not None and spec.origin is not None
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(Path(spec.origin).parent / "litellm_core_utils" / "tokenizers"))
    return tiktoken.get_encoding("cl100k_base")
