"""Conversations as simulated users and judges see them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from megatron_collab.types import Message, visible

_ROLE_MARK = re.compile(r"^(\\*)\*\*(User|Assistant|Tool)\*\*: ", re.MULTILINE)


def render(messages: Sequence[Message], *, tools: bool = False) -> str:
    """`**Role**: content` a message, of those that are `shown`.

    A content that itself holds such a mark at the start of a line gets a backslash before it, so that no message can
    speak for the other side.
    """
    return "\n".join(
        f"**{message.role.capitalize()}**: " + _ROLE_MARK.sub(r"\\\g<0>", message.content)
        for message in shown(messages, tools=tools)
    )


def shown(messages: Sequence[Message], *, tools: bool = False) -> list[Message]:
    """The messages without system messages and the assistant's thoughts.

    Tool messages, and the assistant's messages that one follows (calls, no replies), are shown with `tools` only.
    """
    return [
        replace(message, content=visible(message.content)) if message.role == "assistant" else message
        for message in (messages if tools else without_tools(messages))
        if message.role != "system"
    ]


def without_tools(messages: Sequence[Message]) -> list[Message]:
    """What user and assistant said to each other: neither tool messages nor the assistant's calls."""
    roles = [*(message.role for message in messages), ""]
    hidden = [role == "tool" or (role == "assistant" and after == "tool") for role, after in pairwise(roles)]
    return [message for message, hide in zip(messages, hidden, strict=True) if not hide]
