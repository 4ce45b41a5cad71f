"""How many things the policy needed to know, was not told and did not ask before it answered."""

from __future__ import annotations

from itertools import takewhile

from megatron_collab.data.worlds import booking
from megatron_collab.types import Conversation, Score, Task


async def score(task: Task, conversation: Conversation, trained_turn: int) -> Score | None:
    if task.user != "booking":
        return None
    texts = [turn.text for turn in conversation.turns]
    before = takewhile(lambda text: not booking.is_final(text), texts)
    return float(len(booking.missing(task).difference(*map(booking.asked, before))))
