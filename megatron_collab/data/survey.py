"""Every row is read once before a run starts: bad ones are refused, and it is counted which are left out and why."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError

from megatron_collab.data.examples import Examples
from megatron_collab.data.formats import FORMATS, Format
from megatron_collab.data.readers import Candidate, Messages, Unfit
from megatron_collab.types import Task

Lacks = Callable[[Task], str | None]  # what a task lacks that a metric or a user needs; None: nothing
Needs = Mapping[str, Lacks]  # by setting


@dataclass(frozen=True)
class Survey:
    """Of a source the numbers of the rows that are left out, how many for which reason, and of each user that tasks
    name the id of the first such task. `lacking`: by setting how many of the taken tasks lack what it needs of them."""

    left_out: Sequence[int] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)
    users: Mapping[str, str] = field(default_factory=dict)
    lacking: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def survey(
    examples: Examples[Any],
    longest: int,
    at_most: Callable[[Messages], int],
    tokens: Callable[[Any], int],
    needs: Mapping[str, Lacks] = {},
) -> Survey:
    """Read every row; those of more than `longest` tokens, and those that are not to be learned from, are left out.

    `tokens` of an example are asked for only where `at_most`, a bound of its messages', is above `longest`. Raises
    ValueError for a bad row, naming setting, file and row.
    """
    left_out, dropped, users = list[int](), Counter[str](), dict[str, str]()
    lacking = {setting: Counter[str]() for setting in needs}
    format = FORMATS.get(examples.format)
    taken = _taken(examples, format) if format and format.candidate else None
    for number, row in examples.numbered():
        try:
            example = examples.read(row, number)
            if taken is not None and number not in taken:
                raise Unfit("in place of which another candidate is taken")
            messages = example.messages if isinstance(example, Task) else example
            if at_most(messages) > longest and _counted(example, tokens, examples.at, number) > longest:
                raise Unfit(f"of more than {longest} tokens")
        except Unfit as reason:
            left_out.append(number)
            dropped[str(reason)] += 1
        else:
            if isinstance(example, Task):
                users.setdefault(example.user, example.id)
                for setting, lacks in needs.items():
                    if what := lacks(example):
                        lacking[setting][what] += 1
    return Survey(left_out, dict(dropped), users, {setting: dict(found) for setting, found in lacking.items() if found})


def _counted(example: Any, tokens: Callable[[Any], int], at: Callable[[int], str], number: int) -> int:
    try:
        return tokens(example)
    except TemplateError as error:
        raise ValueError(f"{at(number)}: the chat template of model.path refuses it: {error}") from error
    except ValueError as error:  # calls of tools that the template does not write
        raise ValueError(f"{at(number)}: {error}") from error


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
