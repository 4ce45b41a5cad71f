"""How good the later turns are: of the conversations whose first reply asks for all that is missing and for nothing
else, whether the policy's last message is the booking that the user wanted."""

from __future__ import annotations

from megatron_collab.environments import booking
from megatron_collab.reward.metrics import Metric
from megatron_collab.types import Conversation, Score, Task


class RightOnceTold(Metric):
    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        if task.user != booking.USER or not booking.missing(task):
            return None
        if booking.asked(conversation.replies[0]) != booking.missing(task):
            return None
        return float(conversation.replies[-1].strip() == task.answer)
