"""Of the tasks whose first messages say everything: whether the trained turn asks nevertheless."""

from __future__ import annotations

from megatron_collab.environments import booking
from megatron_collab.reward.metrics import Metric
from megatron_collab.types import Conversation, Score, Task


class AskWhenComplete(Metric):
    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        if task.user != booking.USER or booking.missing(task):
            return None
        return float(bool(booking.asked(conversation.replies[0])))
