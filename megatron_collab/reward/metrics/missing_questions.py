"""How many things the policy needed to know, was not told and did not ask before it answered."""

from __future__ import annotations

from itertools import takewhile

from megatron_collab.environments import booking
from megatron_collab.reward.metrics import Metric
from megatron_collab.types import Conversation, Score, Task


class MissingQuestions(Metric):
    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        if task.user != booking.USER:
            return None
        before = takewhile(lambda reply: not booking.is_final(reply), conversation.replies)
        return float(len(booking.missing(task).difference(*map(booking.asked, before))))
