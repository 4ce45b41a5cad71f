"""Tasks and conversations from JSONL or Parquet, checked row by row, the order they are taken in, and SFT's batches."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import datasets
import numpy as np
from datasets.exceptions import DatasetGenerationError

from megatron_collab.config import Config, DataConfig, Extension, make
from megatron_collab.data.chat_template import ChatRenderer
from megatron_collab.data.tool_messages import ToolConversation, has_tools, tool_conversation
from megatron_collab.types import Batch, Message, Sample, Task

ROLES = ("system", "user", "assistant")
Row = Mapping[str, Any]
_Read = TypeVar("_Read")


class TaskReader(Extension):
    """Base of the readers that data.format may name as package.module:Class; a function will do as well."""

    def __call__(self, path: Path) -> Iterable[Task]:
        """The tasks in data.train or data.eval. Raises ValueError."""
        raise NotImplementedError


def load_tasks(path: Path, setting: str = "data.train", config: DataConfig | None = None) -> list[Task]:
    """The tasks in a file, in its order, from JSONL or Parquet, or by the reader that data.format names.

    Columns: `prompt` (messages {role, content}, the last of the user) and `goal`; optional `answer`, `user` (name of
    the scripted user), `id` (else the row's number) and `metadata`. Raises ConfigError for a reader that cannot be
    made, ValueError naming `setting`, file and row.
    """
    where = f"{setting}={path}"
    if config is None or config.format == "auto":
        return _each(_task, _rows(path, where), where)
    read = make(config.format, "data.format", TaskReader, config.format_options, "data.format_options.")
    if not (tasks := _each(_read_task, read(path), where)):
        raise ValueError(f"{where}: data.format reads no tasks from it")
    return tasks


def load_conversations(path: Path) -> list[tuple[Message, ...]]:
    """The conversations in data.train, in its order.

    Column: `messages` {role, content}: a system message if any, then user and assistant in turn, the last of the
    assistant. With calls of tools: see `tool_conversation`. Raises ValueError naming the setting, file and row.
    """
    return _each(_conversation, _rows(path, f"data.train={path}"), f"data.train={path}")


def rows_of_step(n: int, seed: int, step: int, size: int) -> list[int]:
    """Rows of `n` for a step of `size`, without a saved position: every epoch has an order drawn from the seed."""
    return [int(_order(n, seed, at // n)[at % n]) for at in range(step * size, (step + 1) * size)]


@lru_cache(maxsize=2)
def _order(n: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(n)


class SupervisedData:
    """Batches of data.train by step; the same on every rank, from (run.seed, step) alone."""

    def __init__(self, config: Config) -> None:
        self.renderer = ChatRenderer(config.model.path)
        self.conversations = load_conversations(Path(config.data.train))
        self.seed, self.size = config.run.seed, config.train.prompts_per_step

    def batch(self, step: int) -> Batch:
        rows = rows_of_step(len(self.conversations), self.seed, step, self.size)
        return Batch(tuple(rendered(self.renderer, self.conversations[row]) for row in rows))


def rendered(renderer: ChatRenderer, messages: Sequence[Message]) -> Sample:
    """Token ids of a conversation with a loss on every assistant message, its end-of-turn token included.

    Built from the pieces a rollout is built from, so that training and sampling see the same stream.
    """
    if isinstance(messages, ToolConversation):
        renderer = renderer.with_tools(messages.tools)
    mine = [i for i, message in enumerate(messages) if message.role == "assistant"]
    token_ids = renderer.first(messages[: mine[0]])
    mask = [0.0] * len(token_ids)
    for i, following in zip(mine, [*mine[1:], len(messages)], strict=True):
        reply = renderer.call(messages[i]) if messages[i].tool_calls else renderer.reply(messages[i].content)
        between = renderer.next(messages[i + 1 : following], reply) if i + 1 < len(messages) else ()
        token_ids += reply + between
        mask += [1.0] * len(reply) + [0.0] * len(between)
    loss_mask = np.array(mask, np.float32)
    return Sample(np.array(token_ids, np.int64), loss_mask, np.zeros_like(loss_mask))


def refuse_unwritable(conversations: Sequence[Sequence[Message]], renderer: ChatRenderer, path: str) -> None:
    """Raise ValueError, naming the row, for calls of tools that the chat template cannot write."""
    _each(
        lambda messages, _: isinstance(messages, ToolConversation) and rendered(renderer, messages),
        conversations,
        f"data.train={path}",
    )


def task_row(task: Task) -> dict[str, Any]:
    """A task as a row that `load_tasks` reads."""
    prompt = [message.as_dict() for message in task.messages]
    row = {"id": task.id, "prompt": prompt, "goal": task.goal, "answer": task.answer, "user": task.user}
    return row | ({"metadata": dict(task.metadata)} if task.metadata else {})


def write_jsonl(path: Path, rows: Iterable[Row]) -> None:
    with path.open("w") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _rows(path: Path, where: str) -> list[dict[str, Any]]:
    datasets.disable_progress_bars()
    parquet = path.suffix == ".parquet"
    read = datasets.Dataset.from_parquet if parquet else datasets.Dataset.from_json
    # The library's cache would go by the file's name and be left in the home folder.
    with tempfile.TemporaryDirectory() as cache, path.open() as lines:
        try:
            blank = not parquet and not any(map(str.strip, lines))  # which the library's reader does not survive
            rows = [] if blank else read(str(path), cache_dir=cache, keep_in_memory=True).to_list()
        except DatasetGenerationError as error:
            reason = error.__cause__ or error
            raise ValueError(f"{where}: cannot be read ({reason}); give JSONL or Parquet") from error
    if not rows:
        raise ValueError(f"{where}: has no rows")
    return rows


def _each(read: Callable[[Any, int], _Read], rows: Iterable[Any], where: str) -> list[_Read]:
    found = []
    for number, row in enumerate(rows):
        try:
            found.append(read(row, number))
        except ValueError as error:
            raise ValueError(f"{where} row {number}: {error}") from error
    return found


def _read_task(task: Any, number: int) -> Task:
    if not isinstance(task, Task):
        raise ValueError(f"data.format gives a {type(task).__name__}; it must be a megatron_collab.types.Task")
    last = task.messages[-1].role if task.messages else "none"
    if last != "user":
        raise ValueError(f"the prompt ends with a message of the {last}; its last message must be the user's")
    return task


def _task(row: Row, number: int) -> Task:
    texts = {"id": str(number), "goal": None, "answer": "", "user": ""}
    found = {column: _text(row, column, default) for column, default in texts.items()}
    return _read_task(Task(messages=_messages(row, "prompt"), metadata=row.get("metadata") or {}, **found), number)


def _conversation(row: Row, number: int) -> tuple[Message, ...]:
    if has_tools(row):
        return tool_conversation(row)
    messages = _messages(row, "messages")
    turns = [message.role for message in messages if message.role != "system"]
    if turns != ["user", "assistant"] * (len(turns) // 2) or not turns or "system" in [m.role for m in messages[1:]]:
        raise ValueError("messages must be user and assistant in turn, the assistant last (a system message first)")
    return messages


def _messages(row: Row, column: str) -> tuple[Message, ...]:
    found = row.get(column)
    if not found:
        raise ValueError(f"no {column}; give a list of messages {{role, content}}")
    if not isinstance(found, list) or not all(isinstance(message, dict) for message in found):
        raise ValueError(f"{column} is not a list of messages {{role, content}}")
    for message in found:
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise ValueError(f"{column} has a message of role {role!r}; choose one of {', '.join(ROLES)}")
        if not isinstance(content, str) or not content.strip():
            raise ValueError(f"{column} has a message without content")
    return tuple(Message(message["role"], message["content"]) for message in found)


def _text(row: Row, column: str, default: str | None = None) -> str:
    value = row.get(column)
    if value is None and default is not None:
        return default
    if not isinstance(value, str) or (default is None and not value.strip()):
        raise ValueError(f"no {column}; give a string" if value is None else f"{column} is not a string with content")
    return value
