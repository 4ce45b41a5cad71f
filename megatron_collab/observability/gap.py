"""The gap between two sets of data.eval: the score with users or tasks of one set, minus the score with the other's.

A gap alone proves little, since held-out users may be harder, also for an optimal policy. If it grows while the policy
learns, the policy may be overfit: it learns what pays only with the users or tasks of training.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from megatron_collab.observability import evaluations
from megatron_collab.observability.conversations import is_conversation, rows_of_file, scores_by_task
from megatron_collab.observability.transcripts import by_group
from megatron_collab.statistics import Estimate, Tasks, unpaired_difference

Scores = Mapping[str, Tasks]  # by metric


def gap_metrics(folder: Path, records: Mapping[str, evaluations.Record], name: str, against: str) -> dict[str, float]:
    """`gap/METRIC` and `gap_growth/METRIC`, with their intervals; empty if `against` was not evaluated at this step.

    The gap: scores of the evaluation `name` minus those of the set `against` at the same step. Its growth: since the
    first step at which both sets were evaluated.
    """
    names = {(record.get("set", ""), record["step"]): key for key, record in records.items()}
    set_name, step = records[name].get("set", ""), records[name]["step"]
    if (against, step) not in names:
        return {}
    first = min(at for evaluated, at in names if evaluated == set_name and (against, at) in names)
    compared, held_out = (
        [_scores(evaluations.file_of(folder, names[side, at])) for at in (first, step)] for side in (against, set_name)
    )
    metrics = _named("gap", gaps(compared[-1], held_out[-1]))
    return metrics if first == step else metrics | _named("gap_growth", gaps(changes(*compared), changes(*held_out)))


def gaps(compared: Scores, held_out: Scores) -> dict[str, Estimate]:
    """By metric that both have, the mean over the tasks of `held_out` less that over the tasks of `compared`."""
    shared = sorted(compared.keys() & held_out.keys())
    return {metric: unpaired_difference(compared[metric].values(), held_out[metric].values()) for metric in shared}


def changes(first: Scores, last: Scores) -> Scores:
    """By metric and task that both evaluations of a set have, the change of the task's mean.

    Changes of two sets can be compared although the users or tasks of one set are harder.
    """
    return {
        metric: {
            task: [float(np.mean(last[metric][task]) - np.mean(values))]
            for task, values in tasks.items()
            if task in last[metric]
        }
        for metric, tasks in first.items()
        if metric in last
    }


def _named(kind: str, estimates: Mapping[str, Estimate]) -> dict[str, float]:
    return {key: value for name, estimate in estimates.items() for key, value in estimate.metrics(kind, name).items()}


def _scores(file: Path) -> Scores:
    tasks = [*by_group(rows_of_file(file, is_conversation))]
    names = {name for task in tasks for row in task for name in row["scores"]}
    return {name: dict(scores_by_task(tasks, name)) for name in names}
