"""Reads the conversations of an evaluation, and the scores of its tasks, also on two sides."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_collab.observability import evaluations, transcripts
from megatron_collab.observability.records import number, unreadable_lines
from megatron_collab.observability.writers import Rows
from megatron_collab.settings import ConfigError
from megatron_collab.statistics import Estimate, difference, with_passes

logger = logging.getLogger(__name__)

TRAINING = "training/"


def rows_of_file(file: Path, is_valid: Callable[[Mapping[str, Any]], bool]) -> Rows:
    """The valid rows of a file. It may be torn: a running run may not have finished its last line."""
    rows: list[Mapping[str, Any] | None] = []
    try:
        for row in transcripts.rows_of_file(file):
            rows.append(row)
    except ConfigError as error:
        logger.warning(str(error))
    valid = [row for row in rows if row is not None and is_valid(row)]
    if len(valid) < len(rows):
        logger.warning(f"{file}: skipped {unreadable_lines(len(rows) - len(valid))}")
    return valid


def rows_of_part(folder: Path, part: str) -> Iterator[Mapping[str, Any]]:
    """The conversations of the run in `folder` of an evaluation, or of a step of training if `part` is training/STEP.

    They are read as they are requested. Raises ConfigError if a file is damaged.
    """
    step = step_of(part)
    if step is None:
        rows = transcripts.rows_of_file(evaluations.file_of(folder, part))
    else:
        rows = transcripts.run_rows(folder, step)
    return (row for row in rows if row is not None and is_conversation(row))


def step_of(part: str) -> int | None:
    """The step of training/STEP, which is no evaluation's name: those end in a moment."""
    match = re.fullmatch(rf"{TRAINING}(\d{{1,15}})", part, re.ASCII)
    return int(match[1]) if match else None


def is_conversation(row: Mapping[str, Any]) -> bool:
    messages, scores = row.get("messages"), row.get("scores")
    has_messages = isinstance(messages, list) and all(isinstance(message, dict) for message in messages)
    return has_messages and isinstance(scores, dict) and isinstance(row.get("task"), str)


def scores_by_task(tasks: Sequence[Rows], name: str) -> Iterator[tuple[str, list[float]]]:
    """By task, given by its rows: its id and the values of the metric `name`; tasks without a value are left out."""
    for task in tasks:
        if values := [score for row in task if number(score := row["scores"].get(name)) is not None]:
            yield task[0]["task"], values


@dataclass(frozen=True)
class MetricChange:
    """A metric, or pass@k of one, on two sides: the mean of each (None without a score), and the paired difference.

    `missing`: missing scores of each side; `difference`: of the second less the first, None for pass@k and pass^k and
    if a side has no score.
    """

    label: str
    means: tuple[Estimate | None, Estimate | None]
    missing: tuple[int, int]
    difference: Estimate | None


def changes(first: Sequence[Rows], second: Sequence[Rows]) -> list[MetricChange]:
    """Every metric on two sides, each given as the rows of its tasks. Shares of several samples also have pass@k."""
    names = sorted({name for task in (*first, *second) for row in task for name in row["scores"]})
    return [change for name in names for change in _changes_of(name, first, second)]


def _changes_of(name: str, first: Sequence[Rows], second: Sequence[Rows]) -> Iterator[MetricChange]:
    sides = [[*scores_by_task(tasks, name)] for tasks in (first, second)]
    before, after = (with_passes(name, [values for _, values in side]) for side in sides)
    for label in dict.fromkeys((*before, *after)):
        missing = [
            sum(isinstance(row["scores"].get(name), Mapping) for task in tasks for row in task) if label == name else 0
            for tasks in (first, second)
        ]
        paired = difference(*map(dict, sides)) if label == name and all(sides) else None
        yield MetricChange(label, (before.get(label), after.get(label)), (missing[0], missing[1]), paired)
