"""Conversations as text, the way simulated users and judges are shown them, and back."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_collab.thoughts import visible
from megatron_collab.types import Message

_ROLE_MARK = re.compile(r"^(\\*)\*\*(User|Assistant|Tool)\*\*: ", re.MULTILINE)


def render(messages: Sequence[Message], *, tools: bool = False) -> str:
    """`**Role**: content` a message, without system messages and the assistant's thoughts.

    Tool messages, and the assistant's messages that one follows (calls, no replies), are shown with `tools` only. A
    content that itself holds such a mark at the start of a line gets a backslash before it, so that no message can
    speak for the other side.
    """
    return "\n".join(
        f"**{message.role.capitalize()}**: " + _ROLE_MARK.sub(r"\\\g<0>", _spoken(message))
        for message in (messages if tools else without_tools(messages))
        if message.role != "system"
    )


def without_tools(messages: Sequence[Message]) -> list[Message]:
    """What user and assistant said to each other: neither tool messages nor the assistant's calls."""
    follows = (*messages[1:], None)
    return [
        message
        for message, after in zip(messages, follows, strict=True)
        if message.role != "tool" and (message.role != "assistant" or after is None or after.role != "tool")
    ]


def read(text: str) -> list[Message]:
    """The messages of a rendered conversation: the inverse of `render`."""
    marks = [mark for mark in _ROLE_MARK.finditer(text) if not mark.group(1)]
    ends = [mark.start() - 1 for mark in marks[1:]] + [len(text)]
    return [
        Message(mark.group(2).lower(), _ROLE_MARK.sub(lambda quoted: quoted.group(0)[1:], text[mark.end() : end]))
        for mark, end in zip(marks, ends, strict=True)
    ]


def _spoken(message: Message) -> str:
    return visible(message.content) if message.role == "assistant" else message.content
