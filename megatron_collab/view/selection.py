"""Which futures the page asks for: the parameters of an address, checked and bounded."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_collab.observability.transcript_index import Index, Query
from megatron_collab.observability.transcripts import SCORE, TERMS, words_of
from megatron_collab.runtime.text import one_line
from megatron_collab.settings import require

MOST_FUTURES, FUTURES = 200, 50  # of an answer, and the default
MOST_WORDS, MOST_RANGES, LONGEST = 20, 20, 400  # LONGEST: characters of a parameter
_PLACES = ("step", "task", "ending", "advantage")  # what an index can sort by, but not filter by a range
_BOUNDS = {"low.": 0, "high.": 1}
_NAMES = ("first_step", "last_step", "task", "ending", "words", "sort", "descending", "offset", "limit")
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Selection:
    """A part of the futures that meet `query`: `limit` ones from `offset` on.

    `sort`: a column, or empty for the order of the run.
    """

    query: Query
    sort: str
    descending: bool
    offset: int
    limit: int

    def of(self, index: Index) -> tuple[int, Array]:
        """How many futures of `index` are selected, and the numbers of this part. Raises ConfigError."""
        futures = index.select(self.query)
        total, end = len(futures), self.offset + self.limit
        if self.sort:
            known = [*_PLACES, *columns(index)]
            message = f"sort={one_line(self.sort, 80)}: no such column; choose one of {', '.join(known)}"
            require(self.sort in known, message)
            futures = index.sort(futures, _value_name(self.sort), self.descending, end)
        return total, futures[self.offset : end]


def columns(index: Index) -> list[str]:
    """The numbers of a future that can be filtered and sorted: reward, TERMS if recorded, metrics."""
    return [name.removeprefix(SCORE) for name in index.values]


def selection(parameters: Iterable[tuple[str, str]]) -> Selection:
    """The selection that the parameters of an address describe; an empty value is no condition.

    Raises ConfigError that names the parameter if it is unknown, repeated or out of bounds.
    """
    values: dict[str, str] = {}
    ranges: dict[str, list[float]] = {}
    for name, value in parameters:
        shown = f"{one_line(name, 80)}={one_line(value, 80)}"
        require(name in _NAMES or name.startswith(tuple(_BOUNDS)), f"{shown}: no such parameter")
        require(name not in values, f"{shown}: given twice")
        require(max(len(name), len(value)) <= LONGEST, f"{shown}: longer than {LONGEST} characters")
        values[name] = value
        prefix, _, column = name.partition(".")
        if column and value:
            ranges.setdefault(column, [-math.inf, math.inf])[_BOUNDS[f"{prefix}."]] = _number(shown, value)
    require(len(ranges) <= MOST_RANGES, f"low.*, high.*: more than {MOST_RANGES} columns")
    words = values.get("words", "").strip()
    count = len(words_of(words))
    require(count <= MOST_WORDS, f"words: more than {MOST_WORDS}")
    require(count > 0 or not words, f"words={one_line(words, 80)}: contains no word; give letters or digits")
    bounds = {name: (low, high) for name, (low, high) in ranges.items()}
    reward, terms = bounds.pop("reward", None), {name: bounds.pop(name) for name in TERMS if name in bounds}
    steps = [_integer(values, name, default) for name, default in (("first_step", 0), ("last_step", 2**53))]
    query = Query(
        steps=(steps[0], steps[1]) if values.get("first_step") or values.get("last_step") else None,
        task=values.get("task", ""),
        ending=values.get("ending") or None,
        reward=reward,
        scores=bounds,
        words=words,
        terms=terms,
    )
    descending = _integer(values, "descending", 0, most=1) == 1
    limit = _integer(values, "limit", FUTURES, most=MOST_FUTURES)
    return Selection(query, values.get("sort", ""), descending, _integer(values, "offset", 0), limit)


def places(text: str) -> list[tuple[int, int]]:
    """The groups of a list such as 3.0,3.1: step and position. Raises ConfigError."""
    form = r"\d{1,15}\.\d{1,15}"
    message = f"groups={one_line(text, 80)}: give at most {MOST_FUTURES} groups as STEP.POSITION, with commas between"
    require(len(text) <= 32 * MOST_FUTURES and re.fullmatch(f"{form}(,{form})*", text, re.ASCII) is not None, message)
    named = [tuple(map(int, place.split("."))) for place in text.split(",")]
    require(len(named) <= MOST_FUTURES, message)
    return [(step, position) for step, position in named]


def _value_name(column: str) -> str:
    """The name in an index of a column as the page names it."""
    return column if column in (*_PLACES, "reward", *TERMS) else f"{SCORE}{column}"


def _integer(values: Mapping[str, str], name: str, default: int, most: int = 2**53) -> int:
    text = values.get(name) or str(default)
    message = f"{name}={one_line(text, 80)}: give an integer from 0 to {most}"
    require(re.fullmatch(r"\d{1,16}", text, re.ASCII) is not None and int(text) <= most, message)
    return int(text)


def _number(shown: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    require(math.isfinite(value), f"{shown}: give a number")
    return value
