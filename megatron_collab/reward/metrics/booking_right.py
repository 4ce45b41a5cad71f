"""Whether the policy's last message is the booking that the user wanted, word for word."""

from __future__ import annotations

from megatron_collab.types import Conversation, Score, Task


async def score(task: Task, conversation: Conversation, trained_turn: int) -> Score | None:
    if task.user != "booking":
        return None
    return float(conversation.turns[-1].text.strip() == task.answer)
