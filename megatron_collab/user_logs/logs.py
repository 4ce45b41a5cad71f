"""Conversations of a product's log: read, freed of personal data and duplicates, described in a data set card.

A log is messier than training data: the user may speak last, or twice in a row, and tools speak in between. Only the
messages of the user and of the assistant are used.
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
from megatron_collab.data.messages import Messages, Row, Unfit, content_of, messages_of, speaker
from megatron_collab.data.rows import Rows
from megatron_collab.runtime import files
from megatron_collab.types import Message
from megatron_collab.user_logs.personal import PersonalData, Placeholders

PERSON_COLUMNS = ("user_id", "user", "person", "customer_id")  # tried for the person if no column is named
NEAR = 0.8  # Jaccard similarity of two users' words; from here on the later conversation is dropped
_SHINGLE, _PERMUTATIONS = 3, 128  # words; hashes of a MinHash
_SHORTEST_NAME = 4  # characters; shorter names of a person in the log are not searched for in texts
_CONTINUED, _REPEATED, _NEAR = (
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
class LoggedConversation:
    """A conversation of the log without personal data: its person, and the messages of user and assistant.

    `placeholders` grow as more personal data in it becomes known.
    """

    person: str
    messages: Messages
    placeholders: Placeholders

    @property
    def user_texts(self) -> list[str]:
        """The texts of the user's messages."""
        return [message.content for message in self.messages if message.role == "user"]

    @property
    def opening(self) -> list[str]:
        """The user's first message, or several in a row, without a greeting of the assistant before it."""
        from_user = dropwhile(lambda message: message.role != "user", self.messages)
        return [message.content for message in takewhile(lambda message: message.role == "user", from_user)]

    @property
    def name(self) -> str:
        """A digest of the messages, to find the conversation in the log."""
        text = json.dumps([message.as_dict() for message in self.messages])
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def read_log(
    rows: Rows,
    data: PersonalData,
    person: str | None,
    dropped: Counter[str],
    done: Callable[[int], object] = lambda rows: None,
) -> list[LoggedConversation]:
    """The conversations of `rows`; `dropped` counts rows without one, by reason, and `done` is called for each row.

    `person`: the column with the person. If it is None, or empty in a row, the conversation counts as another person's.
    Raises ValueError naming the first bad row.
    """
    conversations = list[LoggedConversation]()
    for number, row in enumerate(rows):
        done(1)
        try:
            messages = _messages(row)
        except Unfit as reason:
            dropped[str(reason)] += 1
            continue
        except ValueError as error:
            raise ValueError(f"{rows.at(number)}: {_without_personal(error, row, data)}") from error
        value = row.get(person) if person else None
        person_name = "" if value is None else str(value)
        placeholders = Placeholders(data, [person_name] if len(person_name) >= _SHORTEST_NAME else [])
        for message in messages:
            placeholders.read(message.content)
        clean = tuple(Message(message.role, placeholders.replaced(message.content)) for message in messages)
        conversations.append(LoggedConversation(person_name or f"row {number}", clean, placeholders))
    return conversations


def _without_personal(error: ValueError, row: Row, data: PersonalData) -> str:
    """The text of an error, which may quote the row."""
    placeholders = Placeholders(data)
    placeholders.read(json.dumps(row, ensure_ascii=False, default=str))
    return placeholders.replaced(str(error))


def _messages(row: Row) -> Messages:
    column = next((name for name in ("conversations", "messages", "conversation") if row.get(name) is not None), None)
    if column is None:
        raise ValueError("no messages; give a list of messages {role, content}, or conversations of {from, value}")
    entries = row[column]
    if isinstance(entries, list):
        entries = [_text_only(message) for message in entries if _has_text(message, column)]
    messages = messages_of(entries, column) if entries or not isinstance(entries, list) else ()
    messages = tuple(message for message in messages if message.role != "system")
    if not any(message.role == "user" for message in messages):
        raise Unfit("without a message of the user")
    return messages


def _text_only(message: Any) -> Any:
    """A message without calls and thoughts."""
    keys = ("role", "from", "content", "value")
    return {key: message[key] for key in keys if key in message} if isinstance(message, Mapping) else message


def _has_text(message: Any, column: str) -> bool:
    """Whether it is a message of user or assistant with a text, or an invalid one; not a tool call or its result."""
    if not isinstance(message, Mapping):
        return True
    if speaker(message) in ("system", "developer", "tool", "function"):
        return False
    try:
        content = content_of(message, column)
    except ValueError as error:  # an image
        raise Unfit("with content that is no text") from error
    return content is not None and (not isinstance(content, str) or bool(content.strip()))


def distinct(logged: Sequence[LoggedConversation], dropped: Counter[str]) -> list[LoggedConversation]:
    """Removes conversations that another one continues, and those whose user text equals or nearly equals that of an
    earlier one: the Jaccard similarity of their shingles (of 3 words) is NEAR or more.

    MinHash (Broder, 1997) finds candidates for the latter, which are compared exactly. `dropped` counts removals.
    """
    prefixes = {digest for conversation in logged for digest in _prefixes(conversation.messages[:-1])}
    kept = list[LoggedConversation]()
    seen, near = set[str](), _NearDuplicates()
    for conversation in logged:
        words = [_normal(text) for text in conversation.user_texts]
        text = "\n".join(words)
        if list(_prefixes(conversation.messages))[-1] in prefixes:
            dropped[_CONTINUED] += 1
        elif text in seen:
            dropped[_REPEATED] += 1
        elif not near.add(_shingles(" ".join(words).split())):
            dropped[_NEAR] += 1
        else:
            seen.add(text)
            kept.append(conversation)
    return kept


def _prefixes(messages: Messages) -> Iterator[bytes]:
    """A digest of each prefix, that of the full conversation last."""
    digest = hashlib.blake2b(digest_size=16)
    for message in messages:
        digest.update(json.dumps([message.role, message.content]).encode())
        yield digest.digest()


def _normal(text: str) -> str:
    """The words and placeholders of a text, NFKC-normalized, without case and punctuation."""
    return " ".join(re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold()))


def _shingles(words: Sequence[str]) -> frozenset[str]:
    return frozenset(" ".join(words[at : at + _SHINGLE]) for at in range(max(len(words) - _SHINGLE + 1, 1)))


class _NearDuplicates:
    def __init__(self) -> None:
        from datasketch import MinHashLSH  # takes a second

        # A slightly lower threshold, because MinHash only estimates.
        self._index = MinHashLSH(threshold=NEAR - 0.1, num_perm=_PERMUTATIONS)
        self._shingles = list[frozenset[str]]()

    def add(self, shingles: frozenset[str]) -> bool:
        """Adds the shingles, unless their similarity to earlier ones is NEAR or more. Returns whether it added them."""
        from datasketch import MinHash

        hashed = MinHash(_PERMUTATIONS)
        hashed.update_batch([shingle.encode() for shingle in sorted(shingles)])
        candidates = (self._shingles[number] for number in self._index.query(hashed))
        if any(len(shingles & other) >= NEAR * len(shingles | other) for other in candidates):
            return False
        self._index.insert(len(self._shingles), hashed)
        self._shingles.append(shingles)
        return True


def write(
    folder: Path,
    sides: Mapping[str, Sequence[Row]],
    logged: Mapping[str, LoggedConversation],
    column: str | None,
    before: Mapping[str, Mapping[str, int]],
    dropped: Mapping[str, int],
    model: str,
) -> None:
    """Writes SIDE.jsonl for each of `sides`, which hold rows of tasks, and README.md, the data set card, to `folder`.

    `logged`: the conversation of each row, by its id; `column`: the column with the person; `before`: by id and
    kind, the number of replacements made before `model` was asked.
    """
    rows = [row for side in sides.values() for row in side]
    metadata = [row["metadata"] for row in rows]
    first, total = Counter[str](), Counter[str]()
    for row in rows:
        first.update(before[row["id"]])
        total.update(logged[row["id"]].placeholders.counts)
    messages = sorted(entry["messages"] for entry in metadata)
    reached = Counter(entry["reached"] for entry in metadata)
    has_openings = any(row["prompt"] for row in rows)
    card = CARD.format(
        files="\n".join(f"  - split: {side}\n    path: {side}.jsonl" for side in sides),
        kept=len(rows),
        people=f" of {len({logged[row['id']].person for row in rows})} people" if column else "",
        split="No person\nis in both files." if column else "No column\nsays whose they are: a person may be in both.",
        model=model,
        reached=", ".join(f"{name} {count}" for name, count in sorted(reached.items())),
        gave_up=f"{sum(entry['gave_up'] for entry in metadata)} of {len(metadata)}",
        messages=f"{messages[0]} to {messages[-1]}, the median {messages[len(messages) // 2]}",
        prompt="the user's first message" if has_openings else "empty: the simulated user opens the conversation",
        dropped="\n".join(f"- {count} {reason}" for reason, count in sorted(dropped.items())) or "Nothing.",
        scrubbed="\n".join(f"| {kind} | {first[kind]} | {total[kind] - first[kind]} |" for kind in sorted(total))
        or "| none | 0 | 0 |",
    )
    folder.mkdir(parents=True, exist_ok=True)
    for side, side_rows in sides.items():
        unfinished = folder / f".{side}.jsonl"
        write_jsonl(unfinished, side_rows)
        unfinished.replace(folder / f"{side}.jsonl")
    files.replace(folder / "README.md", card)
