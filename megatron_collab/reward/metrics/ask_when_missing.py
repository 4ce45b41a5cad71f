"""Of the tasks whose first messages leave something open: whether the trained turn asks."""

from __future__ import annotations

from megatron_collab.data.worlds import booking
from megatron_collab.types import Conversation, Score, Task


async def score(task: Task, conversation: Conversation, trained_turn: int) -> Score | None:
    if task.user != "booking" or not booking.missing(task):
        return None
    return float(bool(booking.asked(conversation.turns[trained_turn].text)))
