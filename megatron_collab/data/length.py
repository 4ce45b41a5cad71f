"""Whether texts have certainly too many tokens, without the seconds that it takes to tokenize a text of megabytes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from megatron_collab.data.chat_template import ChatRenderer
from megatron_collab.data.readers import Messages


def certainly_longer(renderer: ChatRenderer, messages: Messages, longest: int) -> bool:
    """Whether the contents have more characters than `longest` tokens can hold; a bound, not a count."""
    return sum(len(message.content) for message in messages) > longest * _characters(renderer.tokenizer)


@lru_cache(maxsize=1)
def _characters(tokenizer: Any) -> int:
    """Characters of the longest token."""
    return max(map(len, tokenizer.get_vocab()))
