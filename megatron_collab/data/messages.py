"""Messages of rows: OpenAI's API and fine-tuning format, ShareGPT, and texts that hold either as JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import groupby
from typing import Any

from megatron_collab.data.parsing import json_in
from megatron_collab.settings.documents import parse_json
from megatron_collab.types import THOUGHT_BEGIN, THOUGHT_END, Message, ToolCall

Row = Mapping[str, Any]
Messages = tuple[Message, ...]
Tools = tuple[Mapping[str, Any], ...]  # schemas of tools

_ROLES = {role: role for role in ("system", "user", "assistant", "tool")}
_ROLES |= {"developer": "system", "human": "user", "gpt": "assistant"}
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # names that servers give to the thought of a reply
_TOOLS = ("tools", "tool_defs")  # columns of schemas: OpenAI's fine-tuning format, and that of verifiers' exports
# Keys that say whether a message is trained, as 0 and 1 or as false and true: of OpenAI, verl, slime, ms-swift (two),
# tinker-cookbook and verl, and Axolotl (two).
_TRAINED = ("weight", "loss_mask", "step_loss_mask", "loss", "loss_scale", "trainable", "train", "training")
_NULL_MASKS = "step_loss_mask"  # slime excludes a message where it is null; others take null for a missing key
_TRAINED_PARTS = "train_detail"  # Axolotl's key for the characters of a message that are trained
_NOTHING: tuple[Any, ...] = (None, "", [], {})
_KEYS = {"role", "from", "content", "value", "tool_calls", "tool_call_id"}
_PART_KEYS = {"type", "text"}  # of a part of the content
_FUNCTION_KEYS = {"name", "arguments"}
_CALL_KEYS = {"id", "type", "function", *_FUNCTION_KEYS}
_LIST = re.compile(r"\s*\[\s*\{")
_PYTHON = re.compile(r"\s*\[\s*\{\s*'(?:role|from|content|value)'")  # a list as Python prints it
_AFTER = {  # the roles that may follow a role
    "start": ("system", "user"),
    "system": ("user",),
    "user": ("assistant", "calls"),
    "calls": ("tool",),
    "tool": ("tool", "assistant", "calls"),
    "assistant": ("user",),
}
_PLACES = {"start": "at the beginning", "calls": "after tool_calls"}


class Unfit(ValueError):
    """A well-formed row that nothing can be learned from: it is dropped, and counted by this reason."""


class Flaw(ValueError):
    """Messages that are empty or out of turn. Published data sets have some: their rows are `unfit`, not refused."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.unfit = Unfit(reason)


class ToolConversation(tuple[Message, ...]):
    """The messages of a conversation, and `tools`: the schemas shown in its prompt."""

    tools: Tools

    def __new__(cls, messages: Iterable[Message], tools: Iterable[Mapping[str, Any]] = ()) -> ToolConversation:
        conversation = super().__new__(cls, messages)
        conversation.tools = tuple(tools)
        return conversation


def messages_of(value: Any, column: str) -> Messages:
    """The messages {role, content} or {from, value} of a row, without empty system messages. Raises ValueError.

    An assistant message may have `tool_calls`; a `reasoning_content`, which becomes a <think> before the content; and
    `weight` or another of _TRAINED, 0 or false if it is not trained.
    """
    value = listed(value)
    if not value:
        alternative = ", or [] if the user opens the conversation" if column == "prompt" else ""
        raise ValueError(f"no {column}; give a list of messages {{role, content}}{alternative}")
    if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
        is_python = isinstance(value, str) and _PYTHON.match(value)
        remedy = ", but Python's notation of one; write it with json.dumps" if is_python else " {role, content}"
        raise ValueError(f"{column} is not a list of messages{remedy}")
    messages = (_message(entry, column) for entry in _in_order_of_calls(value, column))
    return tuple(message for message in messages if message.role != "system" or message.content.strip())


def as_messages(value: Any, role: str, column: str) -> Messages:
    """The messages of a row; a text that is no list of messages becomes one message of `role`. Raises ValueError."""
    value = listed(value)
    is_text = isinstance(value, str) and not _PYTHON.match(value)
    return messages_of([{"role": role, "content": value}] if is_text else value, column)


def conversation(messages: Messages, row: Row, column: str) -> Messages:
    """`messages` as a conversation to learn from, with the schemas in `tools` of the row if it has some.

    Raises ValueError, and Unfit if no message is trained.
    """
    _check_turns(messages, column)
    if not any(message.trained for message in messages if message.role == "assistant"):
        raise Unfit("in which no message is trained")
    tools = _tools(row)
    called = tools or any(message.role == "tool" or message.tool_calls for message in messages)
    return ToolConversation(messages, tools) if called else messages


def _check_turns(messages: Messages, column: str) -> None:
    """Raises Flaw unless user and assistant speak in turn, the assistant last, and tools when they are called."""
    previous, reason = "start", "that are not user and assistant in turn"
    for message in messages:
        role = "calls" if message.tool_calls else message.role
        if role not in _AFTER[previous]:
            place = _PLACES.get(previous, f"after a message of {previous}")
            rule = "user and assistant take turns, tool messages answer tool_calls"
            raise Flaw(f"{column} has a message of {message.role} {place}; {rule}", reason)
        previous = role
    if previous != "assistant":
        raise Flaw(f"{column} must end with a reply of the assistant", reason)


def content_of(message: Mapping[str, Any], column: str) -> Any:
    """The content of a message; a list of parts {type: text, text} becomes one text. Raises ValueError."""
    content = message.get("content", message.get("value"))
    if not isinstance(content, list):
        return content
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else part
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"{column} has content of type {kind!r}; only text can be read")
    return "".join(part["text"] for part in content)


def unread_parts(row: Row, columns: Iterable[str]) -> Iterator[str]:
    """Every part of the messages in `columns` that holds a value and is not read: keys, those of parts of a content and
    of tool calls (`content.KEY`), and empty system messages.
    """
    for column in columns:
        entries = listed(row.get(column))
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, Mapping):
                role = _ROLES.get(str(speaker(entry)))
                if not entry.keys() <= _KEYS:
                    yield from (f"key {name}" for name in entry.keys() - _KEYS if _is_unread(name, entry[name], role))
                yield from _unread_below(entry)
                if role == "system" and not str(entry.get("content", entry.get("value")) or "").strip():
                    yield "empty system message"


def _unread_below(entry: Mapping[str, Any]) -> Iterator[str]:
    """Every key of the parts of a message's content, and of its calls, that holds a value and is not read."""
    if isinstance(parts := entry.get("content", entry.get("value")), list):
        yield from _unread_keys("content", parts, _PART_KEYS)
    if calls := _list_of_objects(entry, "tool_calls", "calls"):
        yield from _unread_keys("tool_calls", calls, _CALL_KEYS)
        yield from _unread_keys("tool_calls.function", (call.get("function") for call in calls), _FUNCTION_KEYS)


def _unread_keys(where: str, entries: Iterable[Any], read: Set[str]) -> Iterator[str]:
    for entry in entries:
        if isinstance(entry, Mapping):
            yield from (f"key {where}.{name}" for name in entry.keys() - read if entry[name] not in _NOTHING)


def _is_unread(name: str, value: Any, role: str | None) -> bool:
    """Whether a message of `role` loses the value of a key."""
    if name in _TRAINED:
        return role != "assistant" and bool(value)
    is_thought = name in _THOUGHTS and role == "assistant" and isinstance(value, str)
    return not is_thought and value not in _NOTHING


def speaker(message: Mapping[str, Any]) -> Any:
    """The role of a message as its row names it."""
    return message.get("role", message.get("from"))


def listed(value: Any) -> Any:
    """The list of messages in a JSON text; any other value as it is."""
    if not isinstance(value, str) or not _LIST.match(value):
        return value
    try:
        entries = json_in(value, None)
    except ValueError:  # nested too deep
        return value
    is_list = isinstance(entries, list) and all(isinstance(entry, Mapping) for entry in entries)
    return entries if is_list and all({"role", "from"} & entry.keys() for entry in entries) else value


def _in_order_of_calls(entries: Sequence[Mapping[str, Any]], column: str) -> Iterator[Mapping[str, Any]]:
    """`entries`, with the answers of tools in the order of the calls that their tool_call_id names. Raises Flaw.

    Logs have them as they arrived, and templates that show no ids would give a call the answer of another.
    """
    calls: list[Any] = []
    for is_answer, group in groupby(entries, lambda entry: speaker(entry) == "tool"):
        messages = list(group)
        answered = [message.get("tool_call_id") for message in messages] if is_answer and calls else []
        if answered and all(isinstance(name, str) and name for name in (*calls, *answered)):
            if unknown := {*answered} - {*calls}:
                call = min(map(str, unknown))
                fault = f"{column} has an answer to the call {call!r}, which the message before it does not make"
                raise Flaw(fault, "that have an answer to no call")
            messages.sort(key=lambda message: calls.index(message["tool_call_id"]))
        yield from messages
        calls = [call.get("id") for call in _list_of_objects(messages[-1], "tool_calls", "calls")]


def _message(entry: Mapping[str, Any], column: str) -> Message:
    name, content = speaker(entry), content_of(entry, column)
    role = _ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise ValueError(f"{column} has a message of role {name!r}; choose one of {', '.join(_ROLES)}")
    calls = () if entry.get("tool_calls") is None else tuple(map(_call, _list_of_objects(entry, "tool_calls", "calls")))
    if calls and role != "assistant":
        raise ValueError(f"{column} has a message of role {name!r} with tool_calls")
    if content is None and (calls or role == "system"):
        content = ""
    if not isinstance(content, str) or not (content.strip() or calls or role in ("system", "tool")):
        fault = f"{column} has a message without content; give it a text, or remove the row"
        raise Flaw(fault, "that have an empty message")
    if role != "assistant":
        return Message(role, content)
    thought = next((text for key in _THOUGHTS if isinstance(text := entry.get(key), str) and text.strip()), None)
    if thought is not None and THOUGHT_END not in content:
        content = f"{THOUGHT_BEGIN}\n{thought.strip()}\n{THOUGHT_END}\n\n{content}"
    return Message(role, content, calls, _is_trained(entry, column))


def _is_trained(entry: Mapping[str, Any], column: str) -> bool:
    """Whether a reply is trained: unless a key of _TRAINED says 0 or false. Raises ValueError for other values."""
    if entry.get(_TRAINED_PARTS):
        fault = f"{column} has a message with {_TRAINED_PARTS}, and a message is trained as a whole or not at all"
        raise ValueError(f"{fault}; give it train: false, or remove the key")
    for key in _TRAINED:
        value = entry.get(key, 1)
        if value not in (0, 1) and (value is not None or key == _NULL_MASKS):
            raise ValueError(f"{column} has a message of {key} {value!r}; give 0 or 1")
    return all(entry.get(key) != 0 for key in _TRAINED)


def _tools(row: Row) -> Tools:
    """The schemas in the column of tools: a list, its JSON text, or null. Raises ValueError."""
    column = next((name for name in _TOOLS if row.get(name)), "tools")
    schemas = map(_non_null, _list_of_objects(row, column, "schemas"))
    return tuple(schema if "function" in schema else {"type": "function", "function": schema} for schema in schemas)


def _call(call: Mapping[str, Any]) -> ToolCall:
    function = call if call.get("function") is None else call["function"]
    name, arguments = function.get("name"), _from_json(function.get("arguments"), "arguments")
    if not isinstance(name, str) or not isinstance(arguments, Mapping | None):
        raise ValueError("tool_calls has a call without a name, or whose arguments are not an object")
    return ToolCall(name, _non_null(arguments or {}))


def _list_of_objects(entry: Mapping[str, Any], name: str, kind: str) -> Sequence[Mapping[str, Any]]:
    value = _from_json(entry.get(name), name)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(member, Mapping) for member in value):
        raise ValueError(f"{name} is not a list of {kind}; give those of OpenAI's interface")
    return value


def _from_json(value: Any, column: str) -> Any:
    """The value of a JSON text, None if it is blank; any other value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value) if value.strip() else None
    except ValueError as error:
        raise ValueError(f"{column} is not JSON that can be read: {error}") from error


def _non_null(tree: Any) -> Any:
    """`tree` without its null entries, because Arrow gives every row the names of all rows."""
    if isinstance(tree, Mapping):
        return {name: _non_null(value) for name, value in tree.items() if value is not None}
    return [_non_null(value) for value in tree] if isinstance(tree, Sequence) and not isinstance(tree, str) else tree
