"""Conversations with tool calls in the format of OpenAI's API, for supervised training."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron_collab.types import Message, ToolCall

Tools = tuple[Mapping[str, Any], ...]  # schemas of tools


class ToolConversation(tuple[Message, ...]):
    """The messages of a conversation, and `tools`: the schemas shown in its prompt."""

    tools: Tools

    def __new__(cls, messages: Iterable[Message], tools: Iterable[Mapping[str, Any]] = ()) -> ToolConversation:
        conversation = super().__new__(cls, messages)
        conversation.tools = tuple(tools)
        return conversation


def has_tools(row: Mapping[str, Any]) -> bool:
    """Whether a row with `messages` must be read by `tool_conversation`."""
    messages = [message for message in row.get("messages") or () if isinstance(message, Mapping)]
    return bool(row.get("tools")) or any(m.get("role") == "tool" or m.get("tool_calls") for m in messages)


def content_of(message: Mapping[str, Any], column: str) -> Any:
    """The content of a message; a list of parts {type: text, text} becomes one text. Raises ValueError."""
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
    Null entries are removed, because Arrow gives every row the names of all rows. Raises ValueError.
    """
    messages = [_message(message) for message in row["messages"]]
    previous = "start"
    for message in messages:
        role = "calls" if message.tool_calls else message.role
        if role not in _AFTER[previous]:
            after = {"start": "at the beginning", "calls": "after tool_calls"}.get(
                previous, f"after a message of {previous}"
            )
            raise ValueError(f"messages has a message of {message.role} {after}; tool messages answer tool_calls")
        previous = role
    if previous != "assistant":
        raise ValueError("messages must end with a reply of the assistant")
    tools = _non_null(_from_json(row.get("tools") or [], "tools"))
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("tools is not a list of schemas; give those of OpenAI's interface")
    return ToolConversation(messages, [tool if "function" in tool else _wrap(tool) for tool in tools])


# The roles that may follow a role.
_AFTER = {
    "start": ("system", "user"),
    "system": ("user",),
    "user": ("assistant", "calls"),
    "calls": ("tool",),
    "tool": ("tool", "assistant", "calls"),
    "assistant": ("user",),
}


def _wrap(function: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": function}


def _message(message: Mapping[str, Any]) -> Message:
    role, content = message.get("role"), content_of(message, "messages")
    calls = tuple(_call(call) for call in message.get("tool_calls") or ())
    if role not in ("system", "user", "assistant", "tool") or (calls and role != "assistant"):
        raise ValueError(f"messages has a message of role {role!r}{' with tool_calls' if calls else ''}")
    if content is None and calls:
        content = ""
    if not isinstance(content, str) or not (content.strip() or calls or role == "tool"):
        raise ValueError("messages has a message without content")
    return Message(role, content, calls)


def _call(call: Any) -> ToolCall:
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    name, arguments = function.get("name"), _from_json(function.get("arguments") or {}, "arguments")
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise ValueError("tool_calls has a call without a name, or whose arguments are not an object")
    return ToolCall(name, _non_null(arguments))


def _from_json(value: Any, column: str) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"{column} is not JSON: {error}") from error


def _non_null(tree: Any) -> Any:
    """`tree` without its null entries."""
    if isinstance(tree, Mapping):
        return {name: _non_null(value) for name, value in tree.items() if value is not None}
    return [_non_null(value) for value in tree] if isinstance(tree, Sequence) and not isinstance(tree, str) else tree
