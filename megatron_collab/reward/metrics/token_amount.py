"""Tokens the policy wrote, from the trained turn on: its own token ids, end-of-turn tokens included."""

from __future__ import annotations

from megatron_collab.types import Conversation, Score, Task


async def score(task: Task, conversation: Conversation, trained_turn: int) -> Score | None:
    return float(sum(len(turn.token_ids) for turn in conversation.turns[trained_turn:]))
