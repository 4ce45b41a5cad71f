"""Results of a study's evaluations: the mean over problems of each arm and column, and its gain over another arm."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_collab.observability import evaluations, records
from megatron_collab.reproduce.plan import StudyOptions, evaluation_of, seed_names
from megatron_collab.reproduce.study import Column, Study
from megatron_collab.rollout import recorded
from megatron_collab.statistics import Estimate, Tasks, difference, mean, with_passes


@dataclass(frozen=True)
class ArmResult:
    """An arm's result in a column: `estimate` over problems and `seeds`, the value of each, in the unit of the column.

    `scores`: by problem, the scores of its conversations. `missing`: number of conversations without one. `lacks`:
    settings without which the column is on our own scale, not on the published one.
    """

    column: Column
    estimate: Estimate
    seeds: tuple[float, ...]
    scores: Tasks
    missing: int
    lacks: tuple[str, ...] = ()

    def gain(self, over: ArmResult) -> Estimate:
        """The difference to another arm, paired by problem."""
        return self.column.scaled(difference(over.scores, self.scores), not self.lacks, offset=False)


Results = Mapping[tuple[str, str], Sequence[ArmResult | None] | None]  # by task and arm; None: not evaluated yet


def results_of(study: Study, options: StudyOptions, task: str, arm: str) -> list[ArmResult | None] | None:
    """One result per column of the task, None if no conversation has its score. None if `arm` is not evaluated."""
    folder = options.out / task / evaluation_of(arm)
    if not records.finished(folder):
        return None
    names = (evaluations.name_of(seed, evaluations.MODEL) for seed in seed_names(options.seeds))
    rows = [recorded.rows_of_evaluation(folder, name) for name in names]
    settings = (*study.settings, *study.tasks[task].settings, *options.settings)
    return [_column(column, rows, settings) for column in study.tasks[task].columns]


def reference_of(study: Study, arm: str) -> str | None:
    """The arm that gains are over: the one it starts from, else the first of the study, which is not compared."""
    first = next(iter(study.arms))
    return None if arm == first else study.arms[arm].start or first


def json_rows(study: Study, results: Results) -> Iterator[dict[str, Any]]:
    """The results as JSON, one row per task, arm and column."""
    for (task, arm), columns in results.items():
        reference = reference_of(study, arm)
        for number, (column, result) in enumerate(zip(study.tasks[task].columns, columns or (), strict=False)):
            row: dict[str, Any] = {"task": task, "arm": arm, "column": column.name}
            if result:
                row |= {"scale": "own" if result.lacks else "published", **_plain(result.estimate)}
                row |= {"seeds": result.seeds, "problems": len(result.scores), "missing": result.missing}
                passes = with_passes("", [*result.scores.values()])
                row |= {label[1:]: _plain(estimate) for label, estimate in passes.items() if label}
                other = (results.get((task, reference)) or [None] * (number + 1))[number] if reference else None
                if other:
                    row["gain"] = {"over": reference, **_plain(result.gain(other))}
            yield row


def _plain(estimate: Estimate) -> dict[str, float | None]:
    return {name: None if value != value else value for name, value in asdict(estimate).items()}


def _column(column: Column, rows: Sequence[Sequence[records.Row]], settings: Sequence[str]) -> ArmResult | None:
    scores, seeds, missing, lacks = defaultdict[str, list[float]](list), list[float](), 0, column.lacks(settings)
    for seed in rows:
        applies = {row["task"]: row["scores"][column.metric] for row in seed if column.metric in row["scores"]}
        scored = {task: score for task, score in applies.items() if records.number(score) is not None}
        missing += len(applies) - len(scored)
        seeds.append(column.scaled(mean([[score] for score in scored.values()]), not lacks).value)
        for task, score in scored.items():
            scores[task].append(score)
    if not scores:
        return None
    estimate = column.scaled(mean(scores.values()), not lacks)
    return ArmResult(column, estimate, tuple(seeds), scores, missing, tuple(lacks))
