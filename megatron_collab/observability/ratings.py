"""Ratings of blind comparisons, lines of ratings.jsonl in the folder of the run at the right.

A line has time, rater, task, the two sides (left and right: run, part, digest), which of them was shown at the left
(`shown_left`), and the verdict: the better side, `tie` or `skip`. The run of a side is a path from this folder: names
of folders would not tell two runs of a sweep apart.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from megatron_collab.observability import records
from megatron_collab.observability.conversations import rows_of_part
from megatron_collab.runtime.redact import redacted
from megatron_collab.runtime.text import one_line
from megatron_collab.settings import ConfigError, require
from megatron_collab.types import Ending

FILE = "ratings.jsonl"
FIRST, SECOND, TIE, SKIP = VERDICTS = ("left", "right", "tie", "skip")
_OTHER = {FIRST: SECOND, SECOND: FIRST}
Messages = Sequence[Mapping[str, Any]]


class RatedSide(NamedTuple):
    """The path of a run (`path_of`), the evaluation or training/STEP, and the digest of the conversation's messages."""

    run: str
    part: str
    digest: str


@dataclass(frozen=True)
class Rating:
    """What a rater said about a task at a `time` (UTC); the sides are those of the comparison, wherever shown."""

    time: str
    rater: str
    task: str
    sides: tuple[RatedSide, RatedSide]
    shown_left: str
    verdict: str

    def mirrored(self) -> Rating:
        """The same rating with the sides in the other order."""
        shown, verdict = (_OTHER.get(value, value) for value in (self.shown_left, self.verdict))
        return replace(self, sides=self.sides[::-1], shown_left=shown, verdict=verdict)


def digest(messages: Messages) -> str:
    """Names a conversation: an evaluation that is repeated has others under the same name."""
    return hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()[:16]


def path_of(run: Path, folder: Path) -> str:
    """The path of a run as the ratings in `folder` name it: "." for that of `folder`, "../seed0" for one beside it."""
    return os.path.relpath(os.path.realpath(run), os.path.realpath(folder))


def append(folder: Path, rating: Rating) -> None:
    """Append a rating to those in the run's folder. Raises ConfigError if the folder cannot be written."""
    file = folder / FILE
    require(file.is_file() or not file.exists(), f"{file}: no file; remove it")
    line = {
        "time": rating.time,
        "rater": rating.rater,
        "task": rating.task,
        **{name: side._asdict() for name, side in zip((FIRST, SECOND), rating.sides, strict=True)},
        "shown_left": rating.shown_left,
        "verdict": rating.verdict,
    }
    try:
        with file.open("a+b") as stream:
            end = stream.seek(0, os.SEEK_END)
            stream.seek(max(end - 1, 0))
            torn = stream.read(1) not in (b"", b"\n")  # the line before: its writer was killed
            stream.write(b"\n" * torn + json.dumps(redacted(line)).encode() + b"\n")
    except OSError as error:
        advice = "ratings are kept in the folder of the run at the right: make it writable, or view a copy"
        raise ConfigError(f"{file}: cannot be written: {error.strerror or error}; {advice}") from None


def read(folder: Path) -> list[Rating]:
    """The ratings in the run's folder, in order; lines that are none are left out."""
    return [rating for _, row in records.lines(folder / FILE) if row is not None and (rating := _rating(row))]


def between(ratings: Iterable[Rating], sides: Sequence[tuple[str, str]]) -> Iterator[Rating]:
    """Those of a comparison of two sides (run, part) by time, mirrored if they were compared in the other order."""
    for rating in sorted(ratings, key=lambda rating: rating.time):
        rated = [side[:2] for side in rating.sides]
        if rated == [*sides]:
            yield rating
        elif rated == [*sides][::-1]:
            yield rating.mirrored()


def first_verdicts(ratings: Iterable[Rating]) -> dict[str, dict[str, str]]:
    """By task and rater, the first verdict that is no skip, in order of time."""
    verdicts: dict[str, dict[str, str]] = {}
    for rating in ratings:
        if rating.verdict != SKIP:
            verdicts.setdefault(rating.task, {}).setdefault(rating.rater, rating.verdict)
    return verdicts


def first_ratings(ratings: Iterable[Rating]) -> list[Rating]:
    """Of every rater and every two conversations the first rating that is no skip, by time, with sides in one order."""
    first: dict[tuple[str, tuple[RatedSide, RatedSide], str], Rating] = {}
    for rating in sorted(ratings, key=lambda rating: rating.time):
        ordered = rating if rating.sides[0] <= rating.sides[1] else rating.mirrored()
        if rating.verdict != SKIP:
            first.setdefault((rating.task, ordered.sides, rating.rater), ordered)
    return [*first.values()]


def preferences(ratings: Iterable[Rating]) -> Iterator[tuple[str, RatedSide, RatedSide]]:
    """(task, better side, other side) of every two conversations of which more raters preferred one, by time."""
    verdicts: dict[tuple[str, tuple[RatedSide, RatedSide]], Counter[str]] = {}
    for rating in first_ratings(ratings):
        verdicts.setdefault((rating.task, rating.sides), Counter())[rating.verdict] += 1
    for (task, (first, second)), counts in verdicts.items():
        if counts[FIRST] != counts[SECOND]:
            yield (task, first, second) if counts[FIRST] > counts[SECOND] else (task, second, first)


class RatedPair(NamedTuple):
    """A row {task, chosen, rejected}, conversations up to the last reply; `fault`: why not to train on it, or empty."""

    row: dict[str, Any]
    fault: str


def rated_pairs(folder: Path) -> Iterator[RatedPair]:
    """What raters preferred, in the run's folder.

    It is at fault if a side is not there or has other conversations than when it was rated, or if the better one shows
    how not to reply: the budget cut a turn, or it ended malformed. Raters see messages only, and may prefer those.
    """
    conversations: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    real = Path(os.path.realpath(folder))
    for task, *sides in preferences(read(folder)):
        for side in sides:
            if side[:2] not in conversations:
                conversations[side[:2]] = _first_rows(real / side.run, side.part)
        rows = [conversations[side[:2]].get(task, {}) for side in sides]
        messages = [row.get("messages", []) for row in rows]
        fault = "whose better conversation was cut at the token budget or ended malformed" if _is_bad(rows[0]) else ""
        for side, of_side in zip(sides, messages, strict=True):
            if digest(of_side) != side.digest:
                fault = f"rated before {one_line(side.part, 80)} of {one_line(side.run, 80)} was replaced or moved"
        chosen, rejected = map(_to_last_reply, messages)
        yield RatedPair({"task": task, "chosen": chosen, "rejected": rejected}, fault)


def _first_rows(folder: Path, part: str) -> dict[str, Mapping[str, Any]]:
    rows: dict[str, Mapping[str, Any]] = {}
    for row in rows_of_part(folder, part):
        rows.setdefault(row["task"], row)
    return rows


def _is_bad(row: Mapping[str, Any]) -> bool:
    """Whether a turn was cut, since all of them are trained on, or the conversation ended malformed."""
    return bool(row.get("cut")) or row.get("ending") == Ending.MALFORMED


def _to_last_reply(messages: Messages) -> Messages:
    replies = [at for at, message in enumerate(messages) if message.get("role") == "assistant"]
    return messages[: replies[-1] + 1] if replies else []


def _rating(row: Mapping[str, Any]) -> Rating | None:
    sides = [row.get(name) for name in (FIRST, SECOND)]
    texts = [row.get(name) for name in ("time", "rater", "task", "shown_left", "verdict")]
    parts = [side.get(name) if isinstance(side, dict) else None for side in sides for name in RatedSide._fields]
    if not all(isinstance(text, str) for text in (*texts, *parts)) or texts[-1] not in VERDICTS:
        return None
    if any("\0" in str(part) for part in parts):  # in no path
        return None
    time, rater, task, shown, verdict = map(str, texts)
    a, b = (RatedSide(*map(str, parts[at : at + 3])) for at in (0, 3))
    return Rating(time, rater, task, (a, b), shown, verdict)
