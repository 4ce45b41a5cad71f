"""A source's tasks at every depth: of each its prefixes that end with the user, each prompt once.

These are the rows of verl's CollabLLM recipe: the trained turn is the next one of any prefix of a conversation.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from megatron_collab.data.examples import Examples
from megatron_collab.types import Task

_WHOLE = -1  # in place of a number of messages: of a row that cannot be read, which the survey says


def prefixes(task: Task) -> Iterator[Task]:
    """The task at every depth: its messages up to each of the user's; itself where the user opens it."""
    if task.unopened:
        yield task
        return
    for at, message in enumerate(task.messages):
        if at + 1 == len(task.messages):
            yield task
        elif message.role == "user":
            yield replace(task, id=f"{task.id}-{at + 1}", messages=task.messages[: at + 1])


class Prompts:
    """Which prompts were seen, in 16 bytes each; where the user opens the conversation, which goals."""

    def __init__(self) -> None:
        self._seen = set[bytes]()

    def new(self, task: Task) -> bool:
        seen, before = (task.messages, task.goal) if task.unopened else task.messages, len(self._seen)
        self._seen.add(hashlib.blake2b(repr(seen).encode(), digest_size=16).digest())
        return len(self._seen) > before


def at_every_depth(examples: Examples[Task]) -> Examples[Task]:
    """The prefixes of the source's tasks, in the order of its rows; every row is read for it, once."""
    numbers, lengths, prompts = array("q"), array("q"), Prompts()
    for number, row in examples.numbered():
        try:
            found = [len(one.messages) for one in prefixes(examples.read(row, number)) if prompts.new(one)]
        except ValueError:
            found = [_WHOLE]
        numbers.extend([number] * len(found))
        lengths.extend(found)
    base, rows = examples.rows, _Repeated(examples.rows, numbers)

    def read(row: Any, number: int) -> Task:
        task = examples.read(row, numbers[number])
        return next((one for one in prefixes(task) if len(one.messages) == lengths[number]), task)

    def at(number: int) -> str:
        return examples.at(numbers[number])

    why = f"{examples.why}, every prefix of {len(base)} rows"
    found_in = examples.source, rows, read, at, examples.use, examples.format, why, examples.splits
    return Examples(*found_in, distinct=True)


class _Repeated(Sequence[Any]):
    """Rows by `numbers`, of which several in order may be the same."""

    def __init__(self, rows: Any, numbers: Sequence[int]) -> None:
        self._rows, self._numbers = rows, numbers
        self.column_names = getattr(rows, "column_names", [])
        fingerprint = getattr(rows, "fingerprint", None)
        self.fingerprint = fingerprint and ["prefixes", *fingerprint]

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        return self._rows[self._numbers[index]]
