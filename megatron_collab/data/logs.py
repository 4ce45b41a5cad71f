"""Conversations of a product's log: read, without what is personal and what is there twice, split by person, described.

A log is messier than data to train on: the user may have the last word, or two in a row, and tools speak between. What
counts here are the messages of the user and of the assistant.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

from megatron_collab.data.datasets import write_jsonl
from megatron_collab.data.personal import PersonalData, Placeholders
from megatron_collab.data.readers import Messages, Row, Unfit, messages_of, sharegpt_messages
from megatron_collab.data.rows import Rows
from megatron_collab.data.tool_messages import content_of
from megatron_collab.runtime import files
from megatron_collab.types import Message

PERSON_COLUMNS = ("user_id", "user", "person", "customer_id")  # in which the person is looked for where none is named
NEAR = 0.8  # Jaccard similarity of two users' words from which on the later conversation is dropped
_SHINGLE, _PERMUTATIONS = 3, 128  # words; hashes of a MinHash
_SHORTEST_NAME = 4  # characters of what a log calls a person, to be looked for in texts
_AGAIN, _REPEATED, _NEAR = (
    "that were logged again as they went on",
    "whose user says the same as another one's",
    f"whose user says nearly the same as another one's (from {NEAR:g} of the words on)",
)


CARD = """---
configs:
- config_name: default
  data_files:
{files}
---
# Tasks from a log

{kept} conversations{people}, each as a task: what its user wanted, who they are and how they write. {split}

| | |
|---|---|
| described by | {model} |
| reached what they wanted | {reached} |
| gave up | {gave_up} |
| messages of a user | {messages} |

Columns: `prompt`, {prompt}; `goal`, what the user wants and knows; `metadata.persona`, who they are, how they write
and how long they try, which the simulated user is told; and what was counted or told: `metadata.reached`,
`metadata.gave_up`, `metadata.messages` of the user, `metadata.words` of a message (median).

## Conversations that were left out

{dropped}

## What was replaced

| kind | before the model was asked | as it told, in what is written here |
|---|---|---|
{scrubbed}

Each by a placeholder such as `<EMAIL_1>`, the same one in all texts of a conversation. What has no form and the model
did not tell, as a name that it overlooked, is still there: look at the rows before you pass them on.
"""


@dataclass(frozen=True)
class Logged:
    """A conversation of the log, without what is personal: whose it is, the messages of user and assistant.

    `placeholders` know more as more is told of what is personal in it.
    """

    person: str
    messages: Messages
    placeholders: Placeholders

    @property
    def said(self) -> list[str]:
        """What the user says."""
        return [message.content for message in self.messages if message.role == "user"]

    @property
    def opening(self) -> list[str]:
        """What the user says first, without the greeting of an assistant before it: a message, or several in a row."""
        unsaid = dropwhile(lambda message: message.role != "user", self.messages)
        return [message.content for message in takewhile(lambda message: message.role == "user", unsaid)]

    @property
    def name(self) -> str:
        """A digest of the messages, to find them by in the log."""
        said = json.dumps([message.as_dict() for message in self.messages])
        return hashlib.blake2b(said.encode(), digest_size=6).hexdigest()


def read_log(
    rows: Rows,
    data: PersonalData,
    person: str | None,
    dropped: Counter[str],
    done: Callable[[int], object] = lambda rows: None,
) -> list[Logged]:
    """The conversations of `rows`; `dropped` counts those that hold none, and `done` is told of each row.

    `person`: the column that says whose it is; None: each is of another person, and so is one without a value. Raises
    ValueError for the first bad row, which it names.
    """
    found = list[Logged]()
    for number, row in enumerate(rows):
        done(1)
        try:
            messages = _messages(row)
        except Unfit as reason:
            dropped[str(reason)] += 1
            continue
        except ValueError as error:
            raise ValueError(f"{rows.at(number)}: {error}") from error
        told = row.get(person) if person else None
        called = "" if told is None else str(told)
        placeholders = Placeholders(data, [called] if len(called) >= _SHORTEST_NAME else [])
        for message in messages:
            placeholders.read(message.content)
        clean = tuple(Message(message.role, placeholders.replaced(message.content)) for message in messages)
        found.append(Logged(called or f"row {number}", clean, placeholders))
    return found


def _messages(row: Row) -> Messages:
    if row.get("conversations") is not None:
        messages = sharegpt_messages(row)
    else:
        column = next((name for name in ("messages", "conversation") if row.get(name) is not None), None)
        if column is None:
            raise ValueError("no messages; give a list of messages {role, content}, or conversations of {from, value}")
        given = row[column]
        if isinstance(given, list):
            given = [message for message in given if not isinstance(message, dict) or _is_said(message, column)]
        messages = messages_of(given, column) if given or not isinstance(given, list) else ()
    messages = tuple(message for message in messages if message.role != "system")
    if not any(message.role == "user" for message in messages):
        raise Unfit("without a message of the user")
    return messages


def _is_said(message: Mapping[str, Any], column: str) -> bool:
    """Whether it is a message of user or assistant with a text, or a wrong one; not a call of tools or its answer."""
    if message.get("role") in ("system", "developer", "tool", "function"):
        return False
    try:
        content = content_of(message, column)
    except ValueError as error:  # a picture
        raise Unfit("with content that is no text") from error
    return content is not None and (not isinstance(content, str) or bool(content.strip()))


def distinct(logged: Sequence[Logged], dropped: Counter[str]) -> list[Logged]:
    """Without conversations that are the beginning of another one, and those whose user says the same, or nearly the
    same, as that of an earlier one: of N words in a row, both have NEAR of all that either has (Jaccard).

    Candidates for the latter are found by MinHash (Broder, 1997), and compared in full. `dropped` counts them.
    """
    begun = {digest for one in logged for digest in _prefixes(one.messages[:-1])}
    kept = list[Logged]()
    there, near = set[str](), _NearDuplicates()
    for one in logged:
        words = [_normal(text) for text in one.said]
        text = "\n".join(words)
        if list(_prefixes(one.messages))[-1] in begun:
            dropped[_AGAIN] += 1
        elif text in there:
            dropped[_REPEATED] += 1
        elif not near.add(_shingles(" ".join(words).split())):
            dropped[_NEAR] += 1
        else:
            there.add(text)
            kept.append(one)
    return kept


def _prefixes(messages: Messages) -> Iterator[bytes]:
    """A digest of each beginning, the whole last."""
    digest = hashlib.blake2b(digest_size=16)
    for message in messages:
        digest.update(json.dumps([message.role, message.content]).encode())
        yield digest.digest()


def _normal(text: str) -> str:
    """Its words and placeholders, without case, punctuation and the form of characters."""
    return " ".join(re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold()))


def _shingles(words: Sequence[str]) -> frozenset[str]:
    return frozenset(" ".join(words[at : at + _SHINGLE]) for at in range(max(len(words) - _SHINGLE + 1, 1)))


class _NearDuplicates:
    def __init__(self) -> None:
        from datasketch import MinHashLSH  # which takes a second

        # Candidates from a little below on: MinHash estimates.
        self._index = MinHashLSH(threshold=NEAR - 0.1, num_perm=_PERMUTATIONS)
        self._there = list[frozenset[str]]()

    def add(self, shingles: frozenset[str]) -> bool:
        """Add one, unless another that was added has NEAR of the shingles of both; returns whether it was added."""
        from datasketch import MinHash

        hashed = MinHash(_PERMUTATIONS)
        hashed.update_batch([shingle.encode() for shingle in sorted(shingles)])
        candidates = (self._there[number] for number in self._index.query(hashed))
        if any(len(shingles & other) >= NEAR * len(shingles | other) for other in candidates):
            return False
        self._index.insert(len(self._there), hashed)
        self._there.append(shingles)
        return True


def write(
    folder: Path,
    sides: Mapping[str, Sequence[Row]],
    logged: Mapping[str, Logged],
    by: str | None,
    before: Mapping[str, Mapping[str, int]],
    dropped: Mapping[str, int],
    model: str,
) -> None:
    """SIDE.jsonl in `folder` for each of `sides`, which hold rows of tasks, and README.md, the data set's card.

    `logged`: the conversation of each row, by its id; `by`: the column that says whose it is; `before`: by the id, and
    by kind, how much was replaced in it before `model` was asked.
    """
    rows = [row for side in sides.values() for row in side]
    about = [row["metadata"] for row in rows]
    first, all_of = Counter[str](), Counter[str]()
    for row in rows:
        first.update(before[row["id"]])
        all_of.update(logged[row["id"]].placeholders.counts)
    messages = sorted(each["messages"] for each in about)
    reached = Counter(each["reached"] for each in about)
    opened = any(row["prompt"] for row in rows)
    card = CARD.format(
        files="\n".join(f"  - split: {side}\n    path: {side}.jsonl" for side in sides),
        kept=len(rows),
        people=f" of {len({logged[row['id']].person for row in rows})} people" if by else "",
        split="No person\nis in both files." if by else "No column\nsays whose they are: a person may be in both.",
        model=model,
        reached=", ".join(f"{name} {count}" for name, count in sorted(reached.items())),
        gave_up=f"{sum(each['gave_up'] for each in about)} of {len(about)}",
        messages=f"{messages[0]} to {messages[-1]}, the median {messages[len(messages) // 2]}",
        prompt="the user's first message" if opened else "empty: the simulated user opens the conversation",
        dropped="\n".join(f"- {count} {reason}" for reason, count in sorted(dropped.items())) or "Nothing.",
        scrubbed="\n".join(f"| {kind} | {first[kind]} | {all_of[kind] - first[kind]} |" for kind in sorted(all_of))
        or "| none | 0 | 0 |",
    )
    folder.mkdir(parents=True, exist_ok=True)
    for side, given in sides.items():
        unfinished = folder / f".{side}.jsonl"
        write_jsonl(unfinished, given)
        unfinished.replace(folder / f"{side}.jsonl")
    files.replace(folder / "README.md", card)
