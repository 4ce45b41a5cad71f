"""How many questions the policy asked whose answer it had been given already."""

from __future__ import annotations

from megatron_collab.environments import booking
from megatron_collab.reward.metrics import Metric
from megatron_collab.types import Conversation, Score, Task


class NeedlessQuestions(Metric):
    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        if task.user != booking.USER:
            return None
        unknown, needless = set(booking.missing(task)), 0
        for reply in conversation.replies:
            asked = booking.asked(reply)
            needless += len(asked - unknown)
            unknown -= asked
        return float(needless)
