"""Whether the trained turn asks anything: 1 where it holds a question mark."""

from __future__ import annotations

from megatron_collab.types import Conversation, Score, Task


async def score(task: Task, conversation: Conversation, trained_turn: int) -> Score | None:
    return float("?" in conversation.turns[trained_turn].text)
