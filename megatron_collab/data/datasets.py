"""Tasks and conversations from JSONL or Parquet, checked row by row, and the order they are taken in."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets.exceptions import DatasetGenerationError

from megatron_collab.config import DataConfig, Extension, make
from megatron_collab.types import Message, Task

ROLES = ("system", "user", "assistant")
Row = Mapping[str, Any]


class TaskReader(Extension):
    """Base of the readers that data.format may name as package.module:Class; a function will do as well."""

    def __call__(self, path: Path) -> Iterable[Task]:
        """The tasks in data.train or data.eval. Raises ValueError."""
        raise NotImplementedError


def task_reader(config: DataConfig) -> Callable[[Path], Iterable[Task]] | None:
    """The reader that data.format names; None for "auto". Raises ConfigError."""
    if config.format == "auto":
        return None
    return make(config.format, "data.format", TaskReader, config.format_options, "data.format_options.")


def load_tasks(
    path: Path, setting: str = "data.train", reader: Callable[[Path], Iterable[Task]] | None = None
) -> list[Task]:
    """The tasks in a file, in its order, by `reader`, or from JSONL or Parquet.

    Columns: `prompt` (messages {role, content}, the last of the user) and `goal`; optional `answer`, `user` (name of
    the scripted user), `id` (else the row's number) and `metadata`. Raises ValueError naming `setting`, file and row.
    """
    if reader is None:
        return [_checked(_task, row, setting, path, number) for number, row in enumerate(_rows(path, setting))]
    tasks = [_checked(_read_task, task, setting, path, number) for number, task in enumerate(reader(path))]
    if not tasks:
        raise ValueError(f"{setting}={path}: data.format reads no tasks from it")
    return tasks


def load_conversations(path: Path, setting: str = "data.train") -> list[tuple[Message, ...]]:
    """The conversations in a file, in its order.

    Column: `messages` {role, content}: a system message if any, then user and assistant in turn, the last of the
    assistant. Raises ValueError naming `setting`, file and row.
    """
    return [_checked(_conversation, row, setting, path, number) for number, row in enumerate(_rows(path, setting))]


class Cursor:
    """Which of `n` rows a step takes: every epoch in an order of its own, drawn from the seed.

    A pure function of (n, seed, step, size), so a run that starts again needs no saved position.
    """

    def __init__(self, n: int, seed: int) -> None:
        self.n = n
        self.seed = seed

    def batch(self, step: int, size: int) -> list[int]:
        """Row numbers of `step`, when every step takes `size` rows."""
        positions = range(step * size, (step + 1) * size)
        return [int(_order(self.n, self.seed, at // self.n)[at % self.n]) for at in positions]


@lru_cache(maxsize=2)
def _order(n: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(n)


def task_row(task: Task) -> dict[str, Any]:
    """A task as a row that `load_tasks` reads."""
    prompt = [message.as_dict() for message in task.messages]
    row = {"id": task.id, "prompt": prompt, "goal": task.goal, "answer": task.answer, "user": task.user}
    return row | ({"metadata": dict(task.metadata)} if task.metadata else {})


def write_jsonl(path: Path, rows: Iterable[Row]) -> None:
    with path.open("w") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


class _BadRow(ValueError):
    """What is wrong with one row."""


def _rows(path: Path, setting: str) -> list[dict[str, Any]]:
    datasets.disable_progress_bars()
    parquet = path.suffix == ".parquet"
    read = datasets.Dataset.from_parquet if parquet else datasets.Dataset.from_json
    # The library's cache would go by the file's name and be left in the home folder.
    with tempfile.TemporaryDirectory() as cache:
        try:
            blank = not parquet and _is_blank(path)  # which the library's reader does not survive
            rows = [] if blank else read(str(path), cache_dir=cache, keep_in_memory=True).to_list()
        except DatasetGenerationError as error:
            reason = error.__cause__ or error
            raise ValueError(f"{setting}={path}: cannot be read ({reason}); give JSONL or Parquet") from error
    if not rows:
        raise ValueError(f"{setting}={path}: has no rows")
    return rows


def _is_blank(path: Path) -> bool:
    with path.open() as lines:
        return not any(line.strip() for line in lines)


def _checked(read: Any, row: Any, setting: str, path: Path, number: int) -> Any:
    try:
        return read(row, number)
    except _BadRow as error:
        raise ValueError(f"{setting}={path} row {number}: {error}") from error


def _read_task(task: Any, number: int) -> Task:
    if not isinstance(task, Task):
        raise _BadRow(f"data.format gives a {type(task).__name__}; it must be a megatron_collab.types.Task")
    _check_prompt(task.messages)
    return task


def _check_prompt(messages: Sequence[Message]) -> None:
    last = messages[-1].role if messages else "none"
    if last != "user":
        raise _BadRow(f"the prompt ends with a message of the {last}; its last message must be the user's")


def _task(row: Row, number: int) -> Task:
    messages = _messages(row, "prompt")
    _check_prompt(messages)
    return Task(
        id=_text(row, "id", str(number)),
        messages=messages,
        goal=_text(row, "goal"),
        answer=_text(row, "answer", ""),
        user=_text(row, "user", ""),
        metadata=row.get("metadata") or {},
    )


def _conversation(row: Row, number: int) -> tuple[Message, ...]:
    messages = _messages(row, "messages")
    turns = [message.role for message in messages if message.role != "system"]
    if turns != ["user", "assistant"] * (len(turns) // 2) or not turns or "system" in [m.role for m in messages[1:]]:
        raise _BadRow("messages must be user and assistant in turn, ending with the assistant (a system message first)")
    return messages


def _messages(row: Row, column: str) -> tuple[Message, ...]:
    found = row.get(column)
    if not found:
        raise _BadRow(f"no {column}; give a list of messages {{role, content}}")
    if not isinstance(found, list) or not all(isinstance(message, dict) for message in found):
        raise _BadRow(f"{column} is not a list of messages {{role, content}}")
    for message in found:
        if message.get("role") not in ROLES:
            raise _BadRow(f"{column} has a message of role {message.get('role')!r}; choose one of {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str) or not message["content"].strip():
            raise _BadRow(f"{column} has a message without content")
    return tuple(Message(message["role"], message["content"]) for message in found)


def _text(row: Row, column: str, default: str | None = None) -> str:
    value = row.get(column)
    if value is None and default is not None:
        return default
    if not isinstance(value, str) or (default is None and not value.strip()):
        raise _BadRow(f"no {column}; give a string" if value is None else f"{column} is not a string with content")
    return value
