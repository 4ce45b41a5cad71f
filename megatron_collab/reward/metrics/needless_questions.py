"""How many questions the policy asked whose answer it had been given already."""

from __future__ import annotations

from megatron_collab.data.worlds import booking
from megatron_collab.types import Conversation, Score, Task


async def score(task: Task, conversation: Conversation, trained_turn: int) -> Score | None:
    if task.user != "booking":
        return None
    unknown, needless = set(booking.missing(task)), 0
    for turn in conversation.turns:
        asked = booking.asked(turn.text)
        needless += len(asked - unknown)
        unknown -= asked
    return float(needless)
