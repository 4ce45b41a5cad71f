"""Readers of preferences: from a row to a pair of replies, and from its prompt to a task. They raise ValueError."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from megatron_collab.data.readers import Messages, Row, Unfit, in_turn, last_request, messages_of, opening, text_of
from megatron_collab.types import Message, Task

_SPEAKER = re.compile(r"\n\n(Human|Assistant):")  # how HH-RLHF writes a conversation


class Pair(NamedTuple):
    """Two replies to a prompt, of which the first is the better one, and their scores where there are any."""

    prompt: Messages
    chosen: Messages
    rejected: Messages
    scores: tuple[float, float] | None = None


def pair(row: Row) -> Pair:
    """Each side is a reply or the whole conversation; the prompt stands alone or is what both begin with."""
    sides = [_side(row.get(column), column) for column in ("chosen", "rejected")]
    shared = 0
    while shared < min(map(len, sides)) - 1 and sides[0][shared] == sides[1][shared]:
        shared += 1
    prompt = sides[0][:shared] or _prompt(row)
    chosen, rejected = (side[shared:] for side in sides)
    if prompt[-1].role != "user" or [chosen[0].role, rejected[0].role] != ["assistant", "assistant"]:
        raise Unfit("whose chosen and rejected are not replies of the assistant to the same message of the user")
    named = ("score_chosen", "chosen_score"), ("score_rejected", "rejected_score")
    scores = [next((row[name] for name in names if isinstance(row.get(name), int | float)), None) for names in named]
    both = (float(scores[0]), float(scores[1])) if None not in scores else None  # type: ignore[arg-type]
    return Pair(prompt, chosen, rejected, both)


def preference_task(row: Row, number: int) -> Task:
    return last_request(pair(row).prompt, number)


def preference_conversation(row: Row) -> Messages:
    read = pair(row)
    return in_turn(read.prompt + read.chosen, "chosen")


def _prompt(row: Row) -> Messages:
    """In the columns prompt, or question, and system."""
    asked = opening(row if row.get("prompt") else {"prompt": row.get("question")})
    system = text_of(row, "system", "").strip()
    return (Message("system", system), *asked) if system and asked[0].role != "system" else asked


def _side(value: Any, column: str) -> Messages:
    if not isinstance(value, str):
        return messages_of(value, column)
    if not value.startswith("\n\nHuman:"):
        return (Message("assistant", value),)
    _, *parts = _SPEAKER.split(value)
    roles = ["user" if speaker == "Human" else "assistant" for speaker in parts[::2]]
    messages = tuple(Message(role, text.strip()) for role, text in zip(roles, parts[1::2], strict=True))
    if not all(message.content for message in messages):
        raise Unfit("that have an empty message")
    try:
        return in_turn(messages)
    except ValueError as error:
        raise Unfit("that are not user and assistant in turn") from error
