"""Whether the trained turn asks anything: 1 where it holds a question mark."""

from __future__ import annotations

from megatron_collab.reward.metrics import Metric
from megatron_collab.types import Conversation, Score, Task


class Asks(Metric):
    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        return float("?" in conversation.replies[0])
