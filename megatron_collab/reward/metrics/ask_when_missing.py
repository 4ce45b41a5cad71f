"""Of the tasks whose first messages leave something open: whether the trained turn asks."""

from __future__ import annotations

from megatron_collab.environments import booking
from megatron_collab.reward.metrics import Metric
from megatron_collab.types import Conversation, Score, Task


class AskWhenMissing(Metric):
    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        if task.user != booking.USER or not booking.missing(task):
            return None
        return float(bool(booking.asked(conversation.replies[0])))
