"""The tasks of a source at every depth: all prefixes of each that end with the user, each distinct prompt once.

These are the rows of verl's CollabLLM recipe: the trained turn may follow any prefix of a conversation.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from megatron_collab.data.examples import Examples
from megatron_collab.types import Task

_UNREADABLE = -1  # in place of a number of messages; the survey reports such a row


def prefixes(task: Task) -> Iterator[Task]:
    """The task at every depth: its messages up to each user message; unchanged if the user opens the conversation."""
    if task.unopened:
        yield task
        return
    for at, message in enumerate(task.messages):
        if at + 1 == len(task.messages):
            yield task
        elif message.role == "user":
            yield replace(task, id=f"{task.id}-{at + 1}", messages=task.messages[: at + 1])


class Prompts:
    """The prompts seen so far, 16 bytes each; if the user opens the conversation, the goal counts too."""

    def __init__(self) -> None:
        self._seen = set[bytes]()

    def new(self, task: Task) -> bool:
        prompt, count = (task.messages, task.goal) if task.unopened else task.messages, len(self._seen)
        self._seen.add(hashlib.blake2b(repr(prompt).encode(), digest_size=16).digest())
        return len(self._seen) > count


def at_every_depth(examples: Examples[Task]) -> Examples[Task]:
    """The prefixes of the source's tasks, in the order of its rows. Reads every row once."""
    numbers, lengths, prompts = array("q"), array("q"), Prompts()
    for number, row in examples.numbered():
        try:
            depths = [len(prefix.messages) for prefix in prefixes(examples.read(row, number)) if prompts.new(prefix)]
        except ValueError:
            depths = [_UNREADABLE]
        numbers.extend([number] * len(depths))
        lengths.extend(depths)
    base, rows = examples.rows, _Repeated(examples.rows, numbers)

    def read(row: Any, number: int) -> Task:
        task = examples.read(row, numbers[number])
        return next((prefix for prefix in prefixes(task) if len(prefix.messages) == lengths[number]), task)

    def at(number: int) -> str:
        return examples.at(numbers[number])

    why = f"{examples.why}, every prefix of {len(base)} rows"
    arguments = examples.source, rows, read, at, examples.use, examples.format, why, examples.splits
    return Examples(*arguments, distinct=True)


class _Repeated(Sequence[Any]):
    """The rows of `numbers`, in which a row may repeat."""

    def __init__(self, rows: Any, numbers: Sequence[int]) -> None:
        self._rows, self._numbers = rows, numbers
        self.column_names = getattr(rows, "column_names", [])
        self.fingerprint = ["prefixes", *rows.fingerprint]

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        return self._rows[self._numbers[index]]
