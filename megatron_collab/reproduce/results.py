"""Results of a study: the means of each arm and column, its gain over another arm, and what its training took."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_collab.observability import evaluations, records
from megatron_collab.reproduce.plan import StudyOptions, chains, evaluation_of, seed_names
from megatron_collab.reproduce.study import REWARD, Column, Study
from megatron_collab.rollout import recorded
from megatron_collab.settings.documents import parse_json
from megatron_collab.statistics import Estimate, Tasks, difference_of_seeds, mean_of_seeds, with_passes


@dataclass(frozen=True)
class ArmResult:
    """An arm's result in a column, in its unit: `estimate` over trainings and problems; `seeds`, the value of each
    repetition of the problems.

    `scores`: by training (title of its chain) and problem, the scores of its conversations. `missing`: number of
    conversations without one. `lacks`: settings without which the column is on our own scale, not on the published one.
    """

    column: Column
    estimate: Estimate
    seeds: tuple[float, ...]
    scores: Mapping[str, Tasks]
    missing: int
    lacks: tuple[str, ...] = ()

    def gain(self, over: ArmResult) -> Estimate:
        """The difference to another arm, paired by training and problem."""
        shared = [training for training in self.scores if training in over.scores]
        before, after = ([arm.scores[training] for training in shared] for arm in (over, self))
        return self.column.scaled(difference_of_seeds(before, after), not self.lacks, offset=False)

    @property
    def problems(self) -> int:
        """The largest number of problems for which a training has scores."""
        return max(map(len, self.scores.values()))


@dataclass(frozen=True)
class Effort:
    """Means over the trainings of an arm, without those of the arm that it starts from; None if they are not recorded.

    `sampled_tokens`: of the policy, in trained turns and their futures; None for an arm that samples nothing.
    """

    optimizer_steps: float | None = None
    sampled_tokens: float | None = None


Results = Mapping[tuple[str, str], Sequence[ArmResult | None] | None]  # by task and arm; None: not evaluated yet
Efforts = Mapping[tuple[str, str], Effort]  # by task and arm
Predictions = Mapping[str, Mapping[str, float]]  # by title and key of a column


def results_of(study: Study, options: StudyOptions, task: str, arm: str) -> list[ArmResult | None] | None:
    """One result per column of the task, over the evaluated trainings of `arm`; None if there are none.

    The result of a column is None if no conversation has its score.
    """
    folders = {chain.title: options.out / chain.title / evaluation_of(arm) for chain in chains(study, options, task)}
    folders = {training: folder for training, folder in folders.items() if records.finished(folder)}
    if not folders:
        return None
    settings = (*study.settings, *study.tasks[task].settings, *options.settings)
    sets = {name: _rows(folders, options.seeds, name) for name in study.tasks[task].eval_sources or [""]}
    first = next(iter(sets))
    return [_column(column, sets[column.set or first], settings) for column in study.tasks[task].columns]


def effort_of(study: Study, options: StudyOptions, task: str, arm: str) -> Effort:
    """The mean effort of the finished trainings of `arm`."""
    folders = [options.out / chain.title / arm for chain in chains(study, options, task)]
    efforts = [training_effort(folder) for folder in folders if records.finished(folder)]
    steps = [effort.optimizer_steps for effort in efforts if effort.optimizer_steps]
    tokens = [effort.sampled_tokens for effort in efforts if effort.sampled_tokens]
    return Effort(fmean(steps) if steps else None, fmean(tokens) if tokens else None)


def training_effort(folder: Path) -> Effort:
    """The effort of the training in a run's folder."""
    steps = [row for _, row in records.lines(folder / "metrics.jsonl") if row]
    totals = [
        sum(records.number(row.get(name)) or 0.0 for row in steps) for name in ("optimizer_steps", "sampled_tokens")
    ]
    return Effort(*(total or None for total in totals))


def predictions_of(study: Study, options: StudyOptions, task: str) -> tuple[Predictions, list[str]]:
    """The scores that the task's world predicts, as means over trainings, and which of its files cannot be read."""
    name, rows, faults = study.tasks[task].reference, list[Predictions](), list[str]()
    for file in [options.out / chain.title / name for chain in chains(study, options, task)] if name else ():
        try:
            content = parse_json(file.read_text())
            rows.append({title: {key: float(score) for key, score in row.items()} for title, row in content.items()})
        except (OSError, ValueError, TypeError, AttributeError) as error:
            faults.append(f"{file} has no predictions: {' '.join(str(error).split())}")
    by_title = defaultdict[str, dict[str, list[float]]](lambda: defaultdict(list))
    for title, scores in (item for row in rows for item in row.items()):
        for key, score in scores.items():
            by_title[title][key].append(score)
    return {title: {key: fmean(values) for key, values in row.items()} for title, row in by_title.items()}, faults


def reference_of(study: Study, arm: str) -> str | None:
    """The arm that gains are over: the one it starts from, else the first of the study, which is not compared."""
    first = next(iter(study.arms))
    return None if arm == first else study.arms[arm].start or first


def online_pairs(options: StudyOptions, task: str, efforts: Efforts) -> list[tuple[str, str]]:
    """The pairs of arms that are trained on conversations that they sample; the later arm of a pair is first."""
    online = [arm for arm in options.arms if efforts[task, arm].sampled_tokens]
    return [(arm, earlier) for earlier, arm in combinations(online, 2)]


def json_rows(study: Study, options: StudyOptions, results: Results, efforts: Efforts) -> Iterator[dict[str, Any]]:
    """The results as JSON, one row per task, arm and column; `differences`: from the online arms above it."""
    for (task, arm), columns in results.items():
        reference = reference_of(study, arm)
        compared = [earlier for later, earlier in online_pairs(options, task, efforts) if later == arm]
        for number, (column, result) in enumerate(zip(study.tasks[task].columns, columns or (), strict=False)):
            row: dict[str, Any] = {"task": task, "arm": arm, "column": column.name, **asdict(efforts[task, arm])}
            if result:
                row |= {"scale": "own" if result.lacks else "published", **_plain(result.estimate)}
                row |= {"seeds": result.seeds, "problems": result.problems, "missing": result.missing}
                row |= {label: _plain(estimate) for label, estimate in passes_of(result).items()}
                if reference and (other := _result(results, task, reference, number)):
                    row["gain"] = {"over": reference, **_plain(result.gain(other))}
                row["differences"] = [
                    {"over": name, **_plain(result.gain(other))}
                    for name in compared
                    if (other := _result(results, task, name, number))
                ]
            yield row


def _result(results: Results, task: str, arm: str, column: int) -> ArmResult | None:
    return (results.get((task, arm)) or [None] * (column + 1))[column]


def passes_of(result: ArmResult) -> dict[str, Estimate]:
    """pass@k and pass^k over all trainings; without an interval if there are several, which differ."""
    passes = with_passes("", [scores for tasks in result.scores.values() for scores in tasks.values()])
    several = len(result.scores) > 1
    return {label[1:]: Estimate(passed.value) if several else passed for label, passed in passes.items() if label}


def _plain(estimate: Estimate) -> dict[str, float | None]:
    return {name: None if value != value else value for name, value in asdict(estimate).items()}


def _rows(folders: Mapping[str, Path], seeds: int, eval_set: str) -> dict[str, list[Sequence[records.Row]]]:
    """The evaluated conversations of a set, by training, of each repetition."""
    names = [evaluations.name_of(seed, evaluations.MODEL) for seed in seed_names(seeds, eval_set)]
    return {
        training: [recorded.rows_of_evaluation(folder, name) for name in names] for training, folder in folders.items()
    }


def _column(
    column: Column, rows: Mapping[str, Sequence[Sequence[records.Row]]], settings: Sequence[str]
) -> ArmResult | None:
    played = {
        training: [_scores(repetition, column.metric) for repetition in repetitions]
        for training, repetitions in rows.items()
    }
    missing = sum(score is None for sets in played.values() for scores in sets for score in scores.values())
    scores: dict[str, Tasks] = {training: by_task for training, sets in played.items() if (by_task := _by_task(sets))}
    if not scores:
        return None
    lacks = column.lacks(settings)
    means = [[_mean(repetition) for repetition in played[training]] for training in scores]
    seeds = [column.scaled(Estimate(fmean(repetition)), not lacks).value for repetition in zip(*means, strict=True)]
    estimate = column.scaled(mean_of_seeds([*scores.values()]), not lacks)
    return ArmResult(column, estimate, tuple(seeds), scores, missing, tuple(lacks))


def _scores(rows: Sequence[records.Row], metric: str) -> dict[str, float | None]:
    """The score of each problem that the metric applies to; None if it is missing."""
    values = {row["task"]: row["reward"] for row in rows} if metric == REWARD else {}
    values |= {row["task"]: row["scores"][metric] for row in rows if metric in row["scores"]}
    return {task: records.number(value) for task, value in values.items()}


def _by_task(repetitions: Sequence[Mapping[str, float | None]]) -> dict[str, list[float]]:
    scores = defaultdict[str, list[float]](list)
    for repetition in repetitions:
        for task, score in repetition.items():
            if score is not None:
                scores[task].append(score)
    return dict(scores)


def _mean(scores: Mapping[str, float | None]) -> float:
    numbers = [score for score in scores.values() if score is not None]
    return fmean(numbers) if numbers else nan
