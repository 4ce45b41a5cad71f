"""Conversations with calls of tools, as OpenAI's interface writes them, for supervised training."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron_collab.types import Message, ToolCall

Tools = tuple[Mapping[str, Any], ...]  # schemas of tools


class ToolConversation(tuple[Message, ...]):
    """The messages of a conversation, and `tools`: the schemas that its prompt tells the policy of."""

    tools: Tools

    def __new__(cls, messages: Iterable[Message], tools: Iterable[Mapping[str, Any]] = ()) -> ToolConversation:
        made = super().__new__(cls, messages)
        made.tools = tuple(tools)
        return made


def has_tools(row: Mapping[str, Any]) -> bool:
    """Whether a row with `messages` is for `tool_conversation`."""
    messages = [message for message in row.get("messages") or () if isinstance(message, Mapping)]
    return bool(row.get("tools")) or any(m.get("role") == "tool" or m.get("tool_calls") for m in messages)


def content_of(message: Mapping[str, Any], column: str) -> Any:
    """The content of a message, as one text where it is a list of parts {type: text, text}. Raises ValueError."""
    content = message.get("content")
    if not isinstance(content, list):
        return content
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else part
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"{column} has content of type {kind!r}; only text can be read")
    return "".join(part["text"] for part in content)


def tool_conversation(row: Mapping[str, Any]) -> ToolConversation:
    """The conversation of a row: an assistant message may have `tool_calls`, which tool messages answer.

    Columns: `messages`, and `tools`, a list of schemas or its JSON; arguments of a call are an object or its JSON.
    Entries that are null are left out: Arrow gives every row the names of all. Raises ValueError.
    """
    messages = [_message(message) for message in row["messages"]]
    before = "start"
    for message in messages:
        role = "calls" if message.tool_calls else message.role
        if role not in _AFTER[before]:
            after = {"start": "at the beginning", "calls": "after tool_calls"}.get(
                before, f"after a message of {before}"
            )
            raise ValueError(f"messages has a message of {message.role} {after}; tool messages answer tool_calls")
        before = role
    if before != "assistant":
        raise ValueError("messages must end with a reply of the assistant")
    tools = _filled(_from_json(row.get("tools") or [], "tools"))
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("tools is not a list of schemas; give those of OpenAI's interface")
    return ToolConversation(messages, [tool if "function" in tool else _wrapped(tool) for tool in tools])


# What may follow what.
_AFTER = {
    "start": ("system", "user"),
    "system": ("user",),
    "user": ("assistant", "calls"),
    "calls": ("tool",),
    "tool": ("tool", "assistant", "calls"),
    "assistant": ("user",),
}


def _wrapped(function: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": function}


def _message(given: Mapping[str, Any]) -> Message:
    role, content = given.get("role"), content_of(given, "messages")
    calls = tuple(_call(call) for call in given.get("tool_calls") or ())
    if role not in ("system", "user", "assistant", "tool") or (calls and role != "assistant"):
        raise ValueError(f"messages has a message of role {role!r}{' with tool_calls' if calls else ''}")
    if content is None and calls:
        content = ""
    if not isinstance(content, str) or not (content.strip() or calls or role == "tool"):
        raise ValueError("messages has a message without content")
    return Message(role, content, calls)


def _call(given: Any) -> ToolCall:
    function = given.get("function", given) if isinstance(given, Mapping) else {}
    name, arguments = function.get("name"), _from_json(function.get("arguments") or {}, "arguments")
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise ValueError("tool_calls has a call without a name or with other arguments than an object")
    return ToolCall(name, _filled(arguments))


def _from_json(value: Any, what: str) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"{what} is no JSON: {error}") from error


def _filled(tree: Any) -> Any:
    """`tree` without the entries that are null."""
    if isinstance(tree, Mapping):
        return {name: _filled(value) for name, value in tree.items() if value is not None}
    return [_filled(value) for value in tree] if isinstance(tree, Sequence) and not isinstance(tree, str) else tree
