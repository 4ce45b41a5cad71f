"""Conversations as simulated users and judges see them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

from megatron_collab.types import Message, visible

_ROLE_MARK = re.compile(r"^(\\*)\*\*(User|Assistant|Tool)\*\*: ", re.MULTILINE)


def render(messages: Sequence[Message], *, tools: bool = False) -> str:
    """`**Role**: content` for each of the `visible_messages`.

    If a content has such a mark at the start of a line, it gets a backslash before it, so that no message can speak for
    the other side.
    """
    return "\n".join(
        f"**{message.role.capitalize()}**: " + _ROLE_MARK.sub(r"\\\g<0>", message.content)
        for message in visible_messages(messages, tools=tools)
    )


def visible_messages(messages: Sequence[Message], *, tools: bool = False) -> list[Message]:
    """Messages without system messages and thoughts; tool messages, and the calls before them, only with `tools`."""
    messages_to_show = []
    for message, after in zip_longest(messages, messages[1:]):
        about_tools = message.role == "tool" or (message.role == "assistant" and after and after.role == "tool")
        if message.role != "system" and (tools or not about_tools):
            text = visible(message.content) if message.role == "assistant" else message.content
            messages_to_show.append(replace(message, content=text))
    return messages_to_show
