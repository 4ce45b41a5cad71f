"""Row readers: small pure functions from a row to a task or a conversation. They raise ValueError."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from math import isfinite, nan
from typing import Any, NamedTuple

from megatron_collab.data.answers import final_answer
from megatron_collab.data.messages import Flaw, Messages, Row, Unfit, as_messages, conversation, listed, messages_of
from megatron_collab.data.parsing import json_in, kind_of_value
from megatron_collab.types import Message, Task, visible

# Without the colon of a path: KIND, KIND/ARGUMENT, an entry of users, or nothing; NAME? only applies if it is an entry.
_USER = re.compile(r"(?:[\w-]+(?:/[^:]*)?)?|.*\?", re.DOTALL)
ANSWERS = ("answer", "solution", "label")  # columns with the answer to a prompt
CRITERIA = ("rubric", "rubrics")  # columns with the criteria of the metric `rubric`
# Columns of the recipe's rows that neither metrics nor users need.
_BULKY = ("prompt", "completion", "sessions", "rewards", "single_turn_metadata", "single_turn_completion")
_VERIFIED = ("ground_truth", "style")  # of reward_model: the answer, and how verl compares with it
# Columns of verl's rows that are read, or that hold the same as another.
_RECIPE = ("prompt", "raw_prompt", "extra_info", "reward_model", "data_source", "ground_truth", "index", "metadata")


class Candidate(NamedTuple):
    """A scored reply: its conversation, the number of its turn, and the score."""

    conversation: str
    turn: int
    score: float


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


def text_of(row: Row, column: str, default: str | None = None) -> str:
    """A text of a row, or a number as it was written; `default` if the column is null. Raises ValueError otherwise."""
    value = row.get(column)
    if isinstance(value, str):
        if default is None and not value.strip():
            raise ValueError(f"{column} is not a string with content")
        return value
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        fault = f"no {column}" if value is None else f"{column} is {kind_of_value(value)}"
        raise ValueError(f"{fault}; give a text or a number")
    return str(value)


def _is_text(row: Row, column: str) -> bool:
    with suppress(ValueError):
        return bool(text_of(row, column))
    return False


def number_of(row: Row, column: str) -> float:
    """A finite number of a row, also as a text, because tables have texts. Raises ValueError."""
    text = text_of(row, column)
    try:
        number = float(text)
    except ValueError:
        number = nan
    if not isfinite(number):
        raise ValueError(f"{column} is {text[:40]!r}, not a finite number; correct it, or remove the row")
    return number


def answer_of(row: Row, *columns: str) -> str | None:
    """The answer in the first of the columns that has one; None if none has. Raises ValueError if it is no text."""
    column = next((column for column in columns if row.get(column) not in (None, "")), None)
    return None if column is None else final_answer(text_of(row, column))


def opening(row: Row) -> Messages:
    """The prompt of a row: messages, or a text as the user's only message.

    The user opens the conversation if the prompt is [], or if no row has that column.
    """
    prompt = row.get("prompt", [])
    return () if prompt in ([], "[]") else as_messages(prompt, "user", "prompt")


def task(row: Row, number: int) -> Task:
    defaults = {"id": str(number), "goal": None, "answer": "", "user": ""}
    values = {column: text_of(row, column, default) for column, default in defaults.items()}
    return Task(values["id"], opening(row), values["goal"], values["answer"], values["user"], _metadata(row))


def _metadata(row: Row) -> Mapping[str, Any]:
    """The object in the column `metadata`, or in its JSON text."""
    value = row.get("metadata")
    value = json_in(value, value) if isinstance(value, str) else value
    if value in (None, ""):
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"metadata is {kind_of_value(value)}; give an object {{name: value}}")
    return value


def with_metadata(task: Task, row: Row) -> Task:
    """`task` with the column `metadata`, if that is an object, and with the columns of criteria in its metadata."""
    column = {} if any(unread_metadata(row)) else _metadata(row)
    criteria = {name: row[name] for name in CRITERIA if row.get(name) not in (None, "", [])}
    return replace(task, metadata={**column, **task.metadata, **criteria}) if column or criteria else task


def unread_metadata(row: Row) -> Iterator[str]:
    """The column `metadata` if it is no object, as in published rows that keep another thing by this name."""
    try:
        _metadata(row)
    except ValueError:
        yield "column metadata"


def collabllm_task(row: Row, number: int) -> Task:
    """The user's goal is single_turn_prompt, which only the user knows; rows built here may name the user."""
    goal, answer = text_of(row, "single_turn_prompt"), text_of(row, "single_turn_completion", "")
    metadata, messages = _object(row, "single_turn_metadata"), _collabllm_prompt(row)
    user = text_of(row, "user", "")
    return Task(f"{text_of(row, 'conv_id')}-{len(messages)}-{number}", messages, goal, answer, user, metadata)


def collabllm_conversation(row: Row) -> Messages:
    completion = text_of(row, "completion", "")
    if not completion.strip():
        raise Unfit("whose completion is empty")
    return conversation((*_collabllm_prompt(row), Message("assistant", completion)), row, "prompt and completion")


def _collabllm_prompt(row: Row) -> Messages:
    """The prompt. Raises Unfit if a message is empty, because nothing can be learned from it."""
    try:
        return messages_of(row.get("prompt"), "prompt")
    except Flaw as flaw:
        raise flaw.unfit from flaw


def candidate(row: Row) -> Candidate:
    return Candidate(text_of(row, "conv_id"), int(number_of(row, "turn_id")), number_of(row, "score"))


def recipe_task(row: Row, number: int) -> Task:
    """The user's goal is in extra_info.interaction_kwargs, the answer in reward_model.

    extra_info also holds the task description and the user's name. In verl that name is an interaction, so it is marked
    with ? as a user that may not exist. What else reward_model holds is metadata, as all of extra_info is.
    """
    extra = _object(row, "extra_info")
    interaction = _object(extra, "interaction_kwargs")
    messages = messages_of(row.get("prompt"), "prompt")
    goals = {**extra, **interaction, "request": messages[-1].content}
    columns = ("single_turn_prompt", "query", "question", "request")
    goal = next(text for column in columns if (text := text_of(goals, column, "")).strip())
    verified = _object(row, "reward_model")
    truths = {**row, **verified}
    metadata = {**_object(extra, "single_turn_metadata"), **{k: v for k, v in extra.items() if k not in _BULKY}}
    shown = {"data_source": row.get("data_source"), "task_desc": interaction.get("task_desc")}
    extras = {name: value for name, value in verified.items() if name not in _VERIFIED}
    shown["reward_model"] = extras["reward_model"] if [*extras] == ["reward_model"] else extras  # of a plain value
    metadata |= {name: value for name, value in shown.items() if value not in (None, "", {})}
    user = text_of(interaction, "name", "")
    answer = text_of(truths, "ground_truth", "")
    return Task(text_of(row, "index", str(number)), messages, goal, answer, f"{user}?" if user else "", metadata)


def unread_of_recipe(row: Row) -> Iterator[str]:
    """The columns with values that `recipe_task` does not read."""
    read = (*_RECIPE, *CRITERIA)
    yield from (f"column {name}" for name, value in row.items() if name not in read and value not in (None, "", [], {}))


def last_request(row: Row, messages: Messages, number: int) -> Task:
    """The conversation up to the user's last message; the answer is in the column `answer`, else in the next reply."""
    last = max((at for at, message in enumerate(messages) if message.role == "user"), default=-1)
    if last < 0:
        raise ValueError("has no message of the user")
    goal = next(message.content for message in messages if message.role == "user")
    replies = [visible(message.content) for message in messages[last + 1 :] if message.role == "assistant"]
    reply, answer = final_answer("".join(replies[-1:])), answer_of(row, "answer")
    return Task(str(number), messages[: last + 1], goal, reply if answer is None else answer, "")


def messages_conversation(row: Row, column: str = "messages") -> Messages:
    return conversation(messages_of(row.get(column), column), row, column)


def messages_task(row: Row, number: int) -> Task:
    return last_request(row, messages_of(row.get("messages"), "messages"), number)


def prompt_task(row: Row, number: int) -> Task:
    """A prompt, whose answer TRL's rows call `solution`, slime's `label`; they may be of other kinds in other rows."""
    columns = [column for column in ANSWERS if column == "answer" or _is_text(row, column)]
    return replace(last_request(row, opening(row), number), answer=answer_of(row, *columns) or "")


def unread_answers(row: Row) -> Iterator[str]:
    """The columns with values that `prompt_task` takes for no answer, such as the label of a classifier."""
    columns = (column for column in ANSWERS if row.get(column) not in (None, "", [], {}))
    yield from (f"column {column}" for column in columns if not _is_text(row, column))


def completion_task(row: Row, number: int) -> Task:
    return last_request(row, completion_conversation(row), number)


def completion_conversation(row: Row) -> Messages:
    reply = as_messages(row.get("completion"), "assistant", "completion")
    return conversation((*opening(row), *reply), row, "prompt and completion")


def sharegpt_task(row: Row, number: int) -> Task:
    return last_request(row, sharegpt_conversation(row), number)


def sharegpt_conversation(row: Row) -> Messages:
    try:
        return conversation(messages_of(row.get("conversations"), "conversations"), row, "conversations")
    except Flaw as flaw:
        raise flaw.unfit from flaw


def problem_task(row: Row, number: int, problem: Sequence[str], solution: str) -> Task:
    """A task of the texts in the columns `problem`; the answer is in `answer`, else in the worked `solution`."""
    answer = answer_of(row, "answer", solution)
    return _request_task(number, _request(row, problem), text_of(row, solution) if answer is None else answer)


def problem_conversation(row: Row, problem: Sequence[str], solution: str) -> Messages:
    return (Message("user", _request(row, problem)), Message("assistant", text_of(row, solution)))


def _request(row: Row, columns: Sequence[str]) -> str:
    """The texts of the columns as one request; all but the first may be missing."""
    if row.get("history") not in (None, "", [], "[]"):
        raise ValueError("history has earlier turns, which are not read; give the conversation as messages")
    first, *further_columns = columns
    texts = [text_of(row, first), *(text_of(row, column, "") for column in further_columns)]
    return "\n\n".join(text for text in texts if text.strip())


def text_task(row: Row, number: int) -> Task:
    if not text_of(row, "text", "").strip():
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


def prompt_is_request(row: Row) -> bool:
    """Whether the prompt is a text, or messages beside an answer or criteria; others may lack the goal of a task."""
    answered = any(column in row for column in (*ANSWERS, *CRITERIA)) and not prompt_ends_with_assistant(row)
    return isinstance(listed(row.get("prompt")), str) or answered


def prompt_ends_with_assistant(row: Row) -> bool:
    prompt = listed(row.get("prompt"))
    return isinstance(prompt, list) and bool(prompt) and prompt[-1].get("role") == "assistant"
