"""Whether the policy's last message is the booking that the user wanted, word for word."""

from __future__ import annotations

from megatron_collab.environments import booking
from megatron_collab.reward.metrics import Metric
from megatron_collab.types import Conversation, Score, Task


class BookingRight(Metric):
    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        if task.user != booking.USER:
            return None
        return float(conversation.replies[-1].strip() == task.answer)
