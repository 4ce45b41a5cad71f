"""Every row is read once before a run starts: bad ones are refused, and it is counted which are left out and why."""

from __future__ import annotations

import hashlib
import json
import textwrap
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jinja2 import TemplateError

from megatron_collab.data.examples import Examples
from megatron_collab.data.formats import FORMATS, Format
from megatron_collab.data.parsing import NAMED, refused
from megatron_collab.data.readers import Candidate, Unfit
from megatron_collab.types import Task

Lacks = Callable[[Task], str | None]  # what a task lacks that a metric or a user needs; None: nothing


def _nothing(task: Task) -> None:
    """Nothing is asked of it."""


@dataclass(frozen=True)
class Needs:
    """What is asked of every task. `lacks`, by setting: without it the metric does not apply, or the user cannot play.

    `check` raises ValueError for a task that its user, a metric or a tool cannot read. `decides`: what both follow
    from, as JSON.
    """

    lacks: Mapping[str, Lacks] = field(default_factory=dict)
    check: Callable[[Task], None] = _nothing
    decides: Any = None


_NO_NEEDS = Needs()


@dataclass(frozen=True)
class Survey:
    """Of a source the numbers of the rows that are left out, how many for which reason, and of each user that tasks
    name the id of the first such task. `lacking`: by setting how many of the taken tasks lack what it needs of them.
    `repeated`: what is said of ids that several tasks have."""

    left_out: Sequence[int] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)
    users: Mapping[str, str] = field(default_factory=dict)
    lacking: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    repeated: str = ""


def survey(
    examples: Examples[Any],
    longest: int,
    at_most: Callable[[Any], int],
    tokens: Callable[[Any], int],
    needs: Needs = _NO_NEEDS,
) -> Survey:
    """Read every row; those of more than `longest` tokens, and those that are not to be learned from, are left out.

    `tokens` of an example are asked for only where `at_most`, a bound of them, is above `longest`. Raises
    ValueError for bad rows, naming setting, file and row of the first, and how many there are.
    """
    left_out, dropped, users = list[int](), Counter[str](), dict[str, str]()
    bad, first_bad = list[int](), ""
    lacking = {setting: Counter[str]() for setting in needs.lacks}
    ids = _Ids()
    format = FORMATS.get(examples.format)
    taken = _taken(examples, format) if format and format.candidate and not examples.distinct else None
    for number, row in examples.numbered():
        try:
            example = examples.read(row, number)
            if taken is not None and number not in taken:
                raise Unfit("in place of which another candidate is taken")
            if at_most(example) > longest and _counted(example, tokens, examples.at, number) > longest:
                raise Unfit(f"of more than {longest} tokens")
            lacked = _lacked(example, needs, examples.at, number) if isinstance(example, Task) else {}
        except Unfit as reason:
            left_out.append(number)
            dropped[str(reason)] += 1
        except ValueError as error:
            bad.append(number)
            first_bad = first_bad or str(error)
        else:
            if isinstance(example, Task):
                ids.add(example.id, number)
                users.setdefault(example.user, example.id)
                for setting, what in lacked.items():
                    lacking[setting][what] += 1
    if bad:
        others = [examples.at(number).rpartition(" ")[2] for number in bad[1:NAMED]]
        raise ValueError(refused(first_bad, others, len(bad), len(examples.rows)))
    counted = {setting: dict(found) for setting, found in lacking.items() if found}
    return Survey(left_out, dict(dropped), users, counted, ids.said(examples))


class _Ids:
    """Which ids are there twice, in 16 bytes a row."""

    def __init__(self) -> None:
        self._hashes, self._numbers = array("q"), array("q")

    def add(self, name: str, number: int) -> None:
        self._hashes.append(hash(name))
        self._numbers.append(number)

    def said(self, examples: Examples[Any]) -> str:
        """How many have the id of an earlier one, and which is the first; empty where none has."""
        hashes, numbers = np.array(self._hashes), np.array(self._numbers)
        order = np.argsort(hashes, kind="stable")
        again = order[1:][hashes[order][1:] == hashes[order][:-1]]
        if not len(again):
            return ""
        first = int(again.min())
        before, number = int(numbers[np.argmax(hashes == hashes[first])]), int(numbers[first])
        name = textwrap.shorten(repr(examples.read(examples.rows[number], number).id), 60, placeholder=" …")
        rows = (examples.at(at).rpartition(" ")[2] for at in (number, before))
        which = "row {} that of row {}".format(*rows)
        return f"ids that several rows have: {len(again)} have that of an earlier one, the first is {which} ({name})"


def _lacked(task: Task, needs: Needs, at: Callable[[int], str], number: int) -> dict[str, str]:
    """What a task lacks, by setting, once it is checked."""
    try:
        needs.check(task)
        return {setting: what for setting, lacks in needs.lacks.items() if (what := lacks(task))}
    except Exception as error:  # of a user, a metric or a tool from anywhere
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"{at(number)}: {reason}") from error


def _counted(example: Any, tokens: Callable[[Any], int], at: Callable[[int], str], number: int) -> int:
    try:
        return tokens(example)
    except ValueError as error:  # calls of tools that the template does not write
        raise ValueError(f"{at(number)}: {error}") from error
    except (TemplateError, ArithmeticError, LookupError, RecursionError, TypeError) as error:
        raise ValueError(f"{at(number)}: the chat template of model.path refuses it: {error}") from error


def first_of_prompts(candidates: Sequence[tuple[int, Candidate, str]]) -> set[int]:
    """The numbers of the first row of each prompt; of a row its number, its candidate and its prompt."""
    first: dict[str, int] = {}
    for number, _, prompt in candidates:
        first.setdefault(prompt, number)
    return set(first.values())


def best_of_conversations(candidates: Sequence[tuple[int, Candidate, str]]) -> set[int]:
    """The numbers of the rows with the best score of the last turn of each conversation, the first of equal ones."""
    best: dict[str, tuple[tuple[int, float], int]] = {}
    for number, candidate, _ in candidates:
        rank = candidate.turn, candidate.score
        if candidate.conversation not in best or rank > best[candidate.conversation][0]:
            best[candidate.conversation] = rank, number
    return {number for _, number in best.values()}


def candidates_of(examples: Examples[Any], format: Format) -> list[tuple[int, Candidate, str]]:
    """Number, candidate and a digest of the prompt of every row. Raises ValueError naming the row."""
    found = []
    for number, row in examples.numbered():
        try:
            assert format.candidate
            candidate = format.candidate(row)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{examples.at(number)}: {error}") from error
        prompt = json.dumps(row["prompt"], sort_keys=True).encode()
        found.append((number, candidate, hashlib.blake2b(prompt, digest_size=16).hexdigest()))
    return found


def _taken(examples: Examples[Any], format: Format) -> set[int]:
    """For tasks a row of each prompt, for conversations the best of each conversation."""
    candidates = candidates_of(examples, format)
    return first_of_prompts(candidates) if examples.use == "task" else best_of_conversations(candidates)
