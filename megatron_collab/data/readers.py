"""Row readers: small pure functions from a row to a task or a conversation. They raise ValueError."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from megatron_collab.data.parsing import json_in
from megatron_collab.data.tool_messages import content_of, has_tools, tool_conversation
from megatron_collab.types import Message, Task

Row = Mapping[str, Any]
Messages = tuple[Message, ...]
ROLES = ("system", "user", "assistant")
_SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
# Without the colon of a path: KIND, KIND/ARGUMENT, an entry of users, or nothing; NAME? only applies if it is an entry.
_USER = re.compile(r"(?:[\w-]+(?:/[^:]*)?)?|.*\?", re.DOTALL)
# Columns of the recipe's rows that neither metrics nor users need.
_BULKY = ("prompt", "completion", "sessions", "rewards", "single_turn_metadata", "single_turn_completion")


class Unfit(ValueError):
    """A well-formed row that nothing can be learned from: it is dropped, and counted by this reason."""


class Candidate(NamedTuple):
    """A scored reply: its conversation, the number of its turn, and the score."""

    conversation: str
    turn: int
    score: float


def messages_of(value: Any, column: str, roles: Collection[str] = ROLES) -> Messages:
    """The messages {role, content} of a row."""
    if not value:
        alternative = ", or [] if the user opens the conversation" if column == "prompt" else ""
        raise ValueError(f"no {column}; give a list of messages {{role, content}}{alternative}")
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise ValueError(f"{column} is not a list of messages {{role, content}}")
    messages = []
    for message in value:
        role, content = message.get("role"), content_of(message, column)
        if role not in roles:
            raise ValueError(f"{column} has a message of role {role!r}; choose one of {', '.join(roles)}")
        if not isinstance(content, str) or not content.strip():
            raise ValueError(f"{column} has a message without content; give it a text, or remove the row")
        messages.append(Message(role, content))
    return tuple(messages)


def checked_task(task: Any) -> Task:
    """Returns `task` if its messages are user and assistant in turn, the user last, or if there are none.

    Its user must be a name, not the path of a class: data must not choose which code is imported.
    """
    if not isinstance(task, Task):
        raise ValueError(f"data.format gives a {type(task).__name__}; it must be a megatron_collab.types.Task")
    if not _USER.fullmatch(task.user):
        remedy = "give a built-in kind, or the name of an entry of users, whose class may be a path"
        raise ValueError(f"the user {task.user[:80]!r} is no name, and rows name no code; {remedy}")
    roles = [message.role for message in task.messages]
    if task.unopened and len(roles) < 2:
        return task
    last = roles[-1]
    if last != "user":
        raise ValueError(f"the prompt ends with a message of the {last}; its last message must be the user's")
    if "system" in roles[1:]:
        raise ValueError("the prompt has a system message after its first message; put it first")
    if repeated := next((role for role, following in pairwise(roles) if role == following), None):
        raise ValueError(f"the prompt has two messages of the {repeated} in a row; join them")
    return task


def in_turn(messages: Messages, column: str = "messages") -> Messages:
    """Returns `messages` if they are a conversation that can be learned from; raises ValueError otherwise."""
    turns = [message.role for message in messages if message.role != "system"]
    if turns != ["user", "assistant"] * (len(turns) // 2) or not turns or "system" in [m.role for m in messages[1:]]:
        raise ValueError(f"{column} must be user and assistant in turn, the assistant last (a system message first)")
    return messages


def final_answer(text: str) -> str:
    """The answer of a worked solution: the text after #### (GSM8K), else in the last \\boxed{…} (MATH), else all."""
    if "####" in text:
        return text.rpartition("####")[2].strip().replace(",", "")
    begin = text.rfind("\\boxed{")
    if begin < 0:
        return text.strip()
    depth = 0
    for at in range(begin, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if text[at] == "}" and depth == 0:
            return text[begin + len("\\boxed{") : at].strip()
    return text[begin + len("\\boxed{") :].strip()


def text_of(row: Row, column: str, default: str | None = None) -> str:
    """A string of a row."""
    value = row.get(column)
    if value is None and default is not None:
        return default
    if not isinstance(value, str) or (default is None and not value.strip()):
        raise ValueError(f"no {column}; give a string" if value is None else f"{column} is not a string with content")
    return value


def with_text(row: Row, *columns: str) -> Row:
    """The row with the numbers of these columns as texts, because tables hold 4.0 for 4, and NaN for a gap."""
    numbers = {column: row.get(column) for column in columns}
    texts = {
        column: str(n).removesuffix(".0") for column, n in numbers.items() if isinstance(n, int | float) and n == n
    }
    return {**row, **texts} if texts else row


def opening(row: Row) -> Messages:
    """The prompt of a row: messages, or a text as the user's only message.

    The user opens the conversation if the prompt is [], or if no row has that column.
    """
    prompt = row.get("prompt", [])
    if prompt == []:
        return ()
    return (Message("user", text_of(row, "prompt")),) if isinstance(prompt, str) else messages_of(prompt, "prompt")


def task(row: Row, number: int) -> Task:
    row = with_text(row, "id", "answer")
    defaults = {"id": str(number), "goal": None, "answer": "", "user": ""}
    values = {column: text_of(row, column, default) for column, default in defaults.items()}
    return Task(values["id"], opening(row), values["goal"], values["answer"], values["user"], _metadata(row))


def _metadata(row: Row) -> Mapping[str, Any]:
    """The object in the column `metadata`, or in its JSON text."""
    value = row.get("metadata")
    if isinstance(value, str) and value.strip():
        value = json_in(value, value)
    if value and not isinstance(value, Mapping):
        raise ValueError(f"metadata is a {type(value).__name__}; give an object {{name: value}}")
    return value or {}


def collabllm_task(row: Row, number: int) -> Task:
    """The user's goal is single_turn_prompt, which only the user knows; rows built here may name the user."""
    goal, answer = text_of(row, "single_turn_prompt"), text_of(row, "single_turn_completion", "")
    metadata, messages = _object(row, "single_turn_metadata"), _collabllm_prompt(row)
    user = text_of(row, "user", "")
    return Task(f"{row['conv_id']}-{len(messages)}-{number}", messages, goal, answer, user, metadata)


def collabllm_conversation(row: Row) -> Messages:
    if not (row.get("completion") or "").strip():
        raise Unfit("whose completion is empty")
    return in_turn((*_collabllm_prompt(row), Message("assistant", text_of(row, "completion"))), "prompt and completion")


def _collabllm_prompt(row: Row) -> Messages:
    """The prompt. Raises Unfit if a message is empty, because nothing can be learned from it."""
    prompt = row.get("prompt")
    if isinstance(prompt, list) and any(
        isinstance(message, dict) and message.get("content") in ("", None) for message in prompt
    ):
        raise Unfit("that have an empty message")
    return messages_of(prompt, "prompt")


def candidate(row: Row) -> Candidate:
    if not isinstance(score := row.get("score"), int | float):
        raise ValueError("no score; give a number")
    return Candidate(str(row["conv_id"]), int(row["turn_id"]), float(score))


def recipe_task(row: Row, number: int) -> Task:
    """The user's goal is in extra_info.interaction_kwargs, the answer in reward_model.

    extra_info also holds the task description and the user's name. In verl that name is an interaction, so it is marked
    with ? as a user that may not exist.
    """
    extra = _object(row, "extra_info")
    interaction = _object(extra, "interaction_kwargs")
    messages = messages_of(row.get("prompt"), "prompt")
    goals = (interaction.get("single_turn_prompt"), interaction.get("query"), extra.get("question"))
    goal = next((text for text in goals if text), messages[-1].content)
    truths = (_object(row, "reward_model").get("ground_truth"), row.get("ground_truth"))
    answer = next((str(text) for text in truths if text is not None), "")
    metadata = {**_object(extra, "single_turn_metadata"), **{k: v for k, v in extra.items() if k not in _BULKY}}
    if row.get("data_source"):
        metadata["data_source"] = row["data_source"]
    if interaction.get("task_desc"):
        metadata["task_desc"] = interaction["task_desc"]
    user = f"{interaction['name']}?" if interaction.get("name") else ""
    return Task(str(row.get("index") or number), messages, str(goal), answer, user, metadata)


def last_request(messages: Messages, number: int) -> Task:
    """The conversation up to the user's last message; the assistant's next message is the answer."""
    last = max((at for at, message in enumerate(messages) if message.role == "user"), default=-1)
    if last < 0:
        raise ValueError("has no message of the user")
    goal = next(message.content for message in messages if message.role == "user")
    answer = "".join(message.content for message in messages[last + 1 : last + 2])
    return Task(str(number), messages[: last + 1], goal, answer, "")


def messages_conversation(row: Row) -> Messages:
    if has_tools(row):
        return tool_conversation(row)
    return in_turn(messages_of(row.get("messages"), "messages"))


def messages_task(row: Row, number: int) -> Task:
    return last_request(messages_of(row.get("messages"), "messages"), number)


def prompt_conversation(row: Row) -> Messages:
    return in_turn(messages_of(row.get("prompt"), "prompt"), "prompt")


def prompt_task(row: Row, number: int) -> Task:
    return _request_task(number, text_of(row, "prompt"), text_of(with_text(row, "answer"), "answer", ""))


def completion_task(row: Row, number: int) -> Task:
    return last_request(completion_conversation(row), number)


def completion_conversation(row: Row) -> Messages:
    completion = row.get("completion")
    is_text = isinstance(completion, str)
    reply = (Message("assistant", text_of(row, "completion")),) if is_text else messages_of(completion, "completion")
    return in_turn((*opening(row), *reply), "prompt and completion")


def sharegpt_task(row: Row, number: int) -> Task:
    return last_request(sharegpt_conversation(row), number)


def sharegpt_conversation(row: Row) -> Messages:
    messages = sharegpt_messages(row)
    try:
        return in_turn(messages)
    except ValueError as error:
        raise Unfit("that are not user and assistant in turn") from error


def sharegpt_messages(row: Row) -> Messages:
    turns = row.get("conversations")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError("conversations is not a list of messages {from, value}")
    for turn in turns:
        if turn.get("from") not in _SHAREGPT_ROLES:
            roles = ", ".join(_SHAREGPT_ROLES)
            raise ValueError(f"conversations has a message from {turn.get('from')!r}; choose one of {roles}")
    if not all(isinstance(turn.get("value"), str) and turn["value"].strip() for turn in turns):
        raise Unfit("that have an empty message")
    return tuple(Message(_SHAREGPT_ROLES[turn["from"]], turn["value"]) for turn in turns)


def question_task(row: Row, number: int) -> Task:
    row = with_text(row, "answer")
    return _request_task(number, text_of(row, "question"), final_answer(text_of(row, "answer")))


def question_conversation(row: Row) -> Messages:
    answer = text_of(with_text(row, "answer"), "answer")
    return (Message("user", text_of(row, "question")), Message("assistant", answer))


def problem_task(row: Row, number: int) -> Task:
    return _request_task(number, text_of(row, "problem"), final_answer(text_of(row, "solution")))


def problem_conversation(row: Row) -> Messages:
    return (Message("user", text_of(row, "problem")), Message("assistant", text_of(row, "solution")))


def text_task(row: Row, number: int) -> Task:
    if not (row["text"] or "").strip():
        raise Unfit("that are blank")
    return _request_task(number, text_of(row, "text"), "")


def _request_task(number: int, request: str, answer: str) -> Task:
    """A task whose first message states the whole request."""
    return Task(str(number), (Message("user", request),), request, answer, "")


def _object(row: Row, column: str) -> dict[str, Any]:
    """The object in a column, or in its JSON text, without its null entries; {} if the column is missing."""
    value = row.get(column)
    if isinstance(value, str):
        value = json_in(value, {column: value})
    if not isinstance(value, Mapping):
        return {} if value is None else {column: value}
    return {name: entry for name, entry in value.items() if entry is not None}


def prompt_is_text(row: Row) -> bool:
    return isinstance(row.get("prompt"), str)


def prompt_ends_with_assistant(row: Row) -> bool:
    prompt = row.get("prompt")
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and isinstance(prompt[-1], dict)
        and prompt[-1].get("role") == "assistant"
    )
