"""Row readers of preferences: a row as a pair of replies, its prompt as a task. They raise ValueError."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from megatron_collab.data.messages import Flaw, Messages, Row, ToolConversation, Tools, Unfit, as_messages, conversation
from megatron_collab.data.readers import last_request, number_of, text_of
from megatron_collab.types import Message, Task

_SPEAKER = re.compile(r"\n\n(Human|Assistant):")  # how HH-RLHF writes a conversation
_SCORES = ("score_chosen", "chosen_score"), ("score_rejected", "rejected_score")
_APART = "whose chosen and rejected are not replies of the assistant to the same message of the user"


class Pair(NamedTuple):
    """Two replies to a prompt, the better one first, and their scores if known."""

    prompt: Messages
    chosen: Messages
    rejected: Messages
    scores: tuple[float, float] | None = None
    tools: Tools | None = None  # schemas; None if there are no calls either


def pair(row: Row) -> Pair:
    """The pair of a row, as `_read`. Raises Unfit if both sides are the same."""
    result = _read(row)
    if result.chosen == result.rejected:
        raise Unfit("whose chosen and rejected are the same")
    return result


def _read(row: Row) -> Pair:
    """Each side is a reply or the whole conversation; the prompt is a column, or what both sides begin with.

    The prompt ends with the last message before they differ that the assistant replies to.
    """
    sides = _conversations(row)
    shared = 0
    while shared < min(map(len, sides)) - 1 and sides[0][shared] == sides[1][shared]:
        shared += 1
    while shared and sides[0][shared - 1].role not in ("user", "tool"):
        shared -= 1
    if not shared:
        raise Unfit(_APART)
    tools = next((side.tools for side in sides if isinstance(side, ToolConversation)), None)
    names = [next((name for name in columns if row.get(name) is not None), None) for columns in _SCORES]
    chosen, rejected = (number_of(row, name) if name else None for name in names)
    pair_scores = None if chosen is None or rejected is None else (chosen, rejected)
    return Pair(sides[0][:shared], sides[0][shared:], sides[1][shared:], pair_scores, tools)


def conversations(pair: Pair) -> tuple[Messages, Messages]:
    """Both full conversations, the chosen one first."""
    sides = (*pair.prompt, *pair.chosen), (*pair.prompt, *pair.rejected)
    if pair.tools is None:
        return sides
    return ToolConversation(sides[0], pair.tools), ToolConversation(sides[1], pair.tools)


def preference_task(row: Row, number: int) -> Task:
    return last_request(row, _read(row).prompt, number)


def preference_conversation(row: Row) -> Messages:
    return conversations(_read(row))[0]


def _prompt(row: Row) -> Messages:
    """The prompt in the columns prompt, or question, and system."""
    prompt = row.get("prompt")
    messages = as_messages(row.get("question") if prompt in (None, "", []) else prompt, "user", "prompt")
    system = text_of(row, "system", "").strip()
    return (Message("system", system), *messages) if system and messages[0].role != "system" else messages


def _conversations(row: Row) -> list[Messages]:
    """The chosen conversation and the rejected one, with the prompt. Raises Unfit for texts with a flaw."""
    columns = ("chosen", "rejected")
    try:
        sides = [_side(row.get(column), column) for column in columns]
        if sides[0][0].role == sides[1][0].role == "assistant":
            prompt = _prompt(row)
            if prompt[-1].role not in ("user", "tool"):
                raise Unfit(_APART)
            sides = [(*prompt, *side) for side in sides]
        return [conversation(side, row, column) for side, column in zip(sides, columns, strict=True)]
    except Flaw as flaw:
        raise flaw.unfit if isinstance(row.get("rejected"), str) else flaw from flaw


def _side(value: Any, column: str) -> Messages:
    """The messages of a side; a text is a reply, or the whole conversation as HH-RLHF writes it."""
    if not isinstance(value, str) or not value.startswith("\n\nHuman:"):
        return as_messages(value, "assistant", column)
    _, *parts = _SPEAKER.split(value)
    roles = ("user" if speaker == "Human" else "assistant" for speaker in parts[::2])
    texts = zip(roles, parts[1::2], strict=True)
    return as_messages([{"role": role, "content": text.strip()} for role, text in texts], "assistant", column)
