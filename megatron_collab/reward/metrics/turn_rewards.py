"""What users and tools gave for the policy's turns, summed up from the trained turn on."""

from __future__ import annotations

from megatron_collab.reward.metrics import Metric
from megatron_collab.types import Conversation, Score, Task


class TurnRewards(Metric):
    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        return float(sum(conversation.turn_rewards))
