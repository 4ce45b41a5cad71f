"""What the evaluations of a study say: by arm and column the mean over problems and seeds, with its 95 % interval."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_collab.observability import evaluations, records
from megatron_collab.reproduce.plan import evaluation_of, seed_names
from megatron_collab.reproduce.study import Column, Study
from megatron_collab.rollout import recorded
from megatron_collab.rollout.summary import mean, standard_error

_NORMAL_95 = 1.959964  # standard errors to each side of a mean


@dataclass(frozen=True)
class Measured:
    """`value` and `half`, half the width of its interval, as the column counts; `seeds`: the values by seed.

    The conversations about a problem are averaged first, so the interval is that of the mean over `problems`; nan for
    a single one. `missing`: conversations without a score.
    """

    value: float
    half: float
    seeds: tuple[float, ...]
    problems: int
    missing: int


def measured(out: Path, study: Study, task: str, arm: str, seeds: int) -> list[Measured | None] | None:
    """A number for each column of the task, None where no conversation has that score; None before it is evaluated."""
    folder = out / task / evaluation_of(arm)
    if not records.finished(folder):
        return None
    names = (evaluations.name_of(seed, evaluations.MODEL) for seed in seed_names(seeds))
    rows = [recorded.rows_of_evaluation(folder, name) for name in names]
    return [_column(column, rows) for column in study.tasks[task].columns]


def _column(column: Column, rows: Sequence[Sequence[records.Row]]) -> Measured | None:
    by_problem, by_seed, missing = defaultdict[str, list[float]](list), list[float](), 0
    for seed in rows:
        applies = {row["task"]: row["scores"][column.metric] for row in seed if column.metric in row["scores"]}
        given = {task: score for task, score in applies.items() if records.number(score) is not None}
        missing += len(applies) - len(given)
        by_seed.append(column.value(mean(list(given.values()))) if given else math.nan)
        for task, score in given.items():
            by_problem[task].append(score)
    if not by_problem:
        return None
    means = [mean(scores) for scores in by_problem.values()]
    half = abs(column.factor) * _NORMAL_95 * standard_error(means)
    return Measured(column.value(mean(means)), half, tuple(by_seed), len(means), missing)
