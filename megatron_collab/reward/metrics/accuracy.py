"""Whether the policy's last message gives the right answer, checked symbolically (math-verify)."""

from __future__ import annotations

import asyncio
from functools import cache

from megatron_collab.reward.checker import Checker
from megatron_collab.reward.metrics import Metric
from megatron_collab.types import Conversation, Missing, Score, Task


class Accuracy(Metric):
    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        if not task.answer:
            return None
        checked = await asyncio.to_thread(_checker().equal, task.answer, conversation.replies[-1])
        return checked if isinstance(checked, Missing) else float(checked)


@cache
def _checker() -> Checker:
    return Checker()
