"""Row readers of preferences: a row as a pair of replies, its prompt as a task. They raise ValueError."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron_collab.data.readers import Messages, Row, Unfit, in_turn, last_request, messages_of, opening, text_of
from megatron_collab.data.tool_messages import ToolConversation, Tools, has_tools, tool_conversation
from megatron_collab.types import Message, Task

_SPEAKER = re.compile(r"\n\n(Human|Assistant):")  # how HH-RLHF writes a conversation

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

    The prompt ends with the last message before they differ that the assistant replies to. A row with `tools`, or with
    tool calls in its messages, is read like one of the format `messages`.
    """
    sides = _conversations(row)
    shared = 0
    while shared < min(map(len, sides)) - 1 and sides[0][shared] == sides[1][shared]:
        shared += 1
    while shared and sides[0][shared - 1].role not in ("user", "tool"):
        shared -= 1
    if not shared:
        raise Unfit(_APART)
    tools = sides[0].tools if isinstance(sides[0], ToolConversation) else None
    columns = ("score_chosen", "chosen_score"), ("score_rejected", "rejected_score")
    scores = [next((row[name] for name in names if isinstance(row.get(name), int | float)), None) for names in columns]
    pair_scores = (float(scores[0]), float(scores[1])) if None not in scores else None  # type: ignore[arg-type]
    return Pair(sides[0][:shared], sides[0][shared:], sides[1][shared:], pair_scores, tools)


def conversations(pair: Pair) -> tuple[Messages, Messages]:
    """Both full conversations, the chosen one first."""
    sides = (*pair.prompt, *pair.chosen), (*pair.prompt, *pair.rejected)
    if pair.tools is None:
        return sides
    return ToolConversation(sides[0], pair.tools), ToolConversation(sides[1], pair.tools)


def preference_task(row: Row, number: int) -> Task:
    return last_request(_read(row).prompt, number)


def preference_conversation(row: Row) -> Messages:
    return conversations(_read(row))[0]


def _as_messages(value: Any, role: str) -> list[Any]:
    """The messages of a row; a text becomes one message of `role`."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
        raise ValueError("prompt, chosen and rejected must be texts or lists of messages {role, content}")
    return value


def _prompt(row: Row) -> Messages:
    """The prompt in the columns prompt, or question, and system."""
    messages = opening(row if row.get("prompt") else {"prompt": row.get("question")})
    system = text_of(row, "system", "").strip()
    return (Message("system", system), *messages) if system and messages[0].role != "system" else messages


def _conversations(row: Row) -> list[Messages]:
    """The chosen conversation and the rejected one, with the prompt."""
    columns = ("chosen", "rejected")
    if any(has_tools({"messages": row.get(column), "tools": row.get("tools")}) for column in columns):
        raw_sides = [_as_messages(row.get(column), "assistant") for column in columns]
        are_replies = [message.get("role") == "assistant" for message in raw_sides[0][:1]] == [True]
        prefix = _as_messages(row.get("prompt"), "user") if are_replies else []
        return [tool_conversation({"messages": [*prefix, *side], "tools": row.get("tools")}) for side in raw_sides]
    sides = [_side(row.get(column), column) for column in columns]
    if sides[0][0].role == sides[1][0].role == "assistant":
        prompt = _prompt(row)
        if prompt[-1].role != "user":
            raise Unfit(_APART)
        sides = [(*prompt, *side) for side in sides]
    return [in_turn(side, column) for side, column in zip(sides, columns, strict=True)]


def _side(value: Any, column: str) -> Messages:
    if not isinstance(value, str):
        return messages_of(value, column)
    if not value.strip():
        raise Unfit("that have an empty message")
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
