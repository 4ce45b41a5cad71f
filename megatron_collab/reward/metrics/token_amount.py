"""Tokens the policy wrote, from the trained turn on: its own token ids, end-of-turn tokens included."""

from __future__ import annotations

from megatron_collab.reward.metrics import Metric
from megatron_collab.types import Conversation, Score, Task


class TokenAmount(Metric):
    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        return float(sum(len(turn.token_ids) for turn in conversation.turns))
