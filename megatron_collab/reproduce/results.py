"""Results of a study's evaluations: the mean over problems and seeds of each arm and column, with its 95 % interval."""

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
class Estimate:
    """`value`, and `half` the width of its interval, in the unit of the column; `seeds`: the value of each seed.

    Conversations about a problem are averaged first, so the interval is that of the mean over `problems`; `half` is
    nan if there is a single problem. `missing`: number of conversations without a score.
    """

    value: float
    half: float
    seeds: tuple[float, ...]
    problems: int
    missing: int


def estimates(out: Path, study: Study, task: str, arm: str, seeds: int) -> list[Estimate | None] | None:
    """One estimate per column of the task, None if no conversation has its score. None if `arm` is not evaluated."""
    folder = out / task / evaluation_of(arm)
    if not records.finished(folder):
        return None
    names = (evaluations.name_of(seed, evaluations.MODEL) for seed in seed_names(seeds))
    rows = [recorded.rows_of_evaluation(folder, name) for name in names]
    return [_column(column, rows) for column in study.tasks[task].columns]


def _column(column: Column, rows: Sequence[Sequence[records.Row]]) -> Estimate | None:
    by_problem, by_seed, missing = defaultdict[str, list[float]](list), list[float](), 0
    for seed in rows:
        applies = {row["task"]: row["scores"][column.metric] for row in seed if column.metric in row["scores"]}
        scored = {task: score for task, score in applies.items() if records.number(score) is not None}
        missing += len(applies) - len(scored)
        by_seed.append(column.value(mean(list(scored.values()))) if scored else math.nan)
        for task, score in scored.items():
            by_problem[task].append(score)
    if not by_problem:
        return None
    means = [mean(scores) for scores in by_problem.values()]
    half = abs(column.factor) * _NORMAL_95 * standard_error(means)
    return Estimate(column.value(mean(means)), half, tuple(by_seed), len(means), missing)
