"""What groups say in numbers: the metrics of a step and of an evaluation (docs/reference/metrics.md)."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from megatron_collab.runtime.process import RunStopped
from megatron_collab.types import Group, Missing, Rollout, Task

Applying = Callable[[Task], Iterable[str]]  # the metrics that apply to a task


def summary(groups: Sequence[Group], applying: Applying) -> dict[str, float]:
    """Means over the rollouts of a step: reward, every metric, endings, and per rollout futures and turn tokens.

    Every rollout counts once, whatever the number of its futures; see `scores`. `reward_se` is the standard error of
    one turn's reward that comes from its futures' spread, averaged; `spread` the standard deviation of the rewards
    within a group, averaged: what GRPO learns from.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    values: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        for name, scored in scores(group, applying).items():
            values[f"score/{name}"] += scored
    endings: dict[str, float] = defaultdict(float)
    for rollout in rollouts:
        for name, count in Counter(str(future.conversation.ending) for future in rollout.futures).items():
            endings[name] += count / len(rollout.futures)
    errors = [r.reward.standard_error for r in rollouts if not isinstance(r.reward.value, Missing)]
    sampled = [sum(len(turn.token_ids) for turn in rollout.start.turns) for rollout in rollouts if rollout.start.turns]
    return {
        "reward": mean(_rewards(rollouts)),
        "reward_se": mean(errors),
        "spread": mean([float(np.std(_rewards(group.rollouts) or [0.0])) for group in groups]),
        "missing": float(sum(rollout.reward.missing for rollout in rollouts)),
        "futures": sum(len(rollout.futures) for rollout in rollouts) / len(rollouts),
        "turn_tokens": mean(sampled),
        **{name: mean(found) for name, found in sorted(values.items()) if found},
        **{f"ending/{name}": share / len(rollouts) for name, share in sorted(endings.items())},
    }


def evaluated(groups: Sequence[Group], applying: Applying) -> dict[str, float]:
    """Means over the tasks of an evaluation, with their standard errors (`reward_se`, `score_se/METRIC`).

    The conversations of a task are not independent, so they are averaged first, and an error is that of the mean over
    the tasks: std(ddof=1) / sqrt(n) of the n tasks that have a score; none where n < 2.
    """
    found = summary(groups, applying)
    by_task: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        by_task["reward"] += _mean_of_any(_rewards(group.rollouts))
        for name, scored in scores(group, applying).items():
            by_task[f"score/{name}"] += _mean_of_any(scored)
    for name, values in sorted(by_task.items()):
        found[name] = mean(values)
        prefix, slash, metric = name.partition("/")
        found[f"{prefix}_se{slash}{metric}"] = standard_error(values)
    return found


def scores(group: Group, applying: Applying) -> dict[str, list[float]]:
    """By metric, the mean score over the futures of each rollout; without rollouts whose scores are all missing.

    A malformed rollout was not scored. It counts as 0 in every metric that applies to the task, as other rollouts show
    or, where none was scored, `applying` says: without it a score would rise with the share of turns that nobody reads.
    """
    found: dict[str, list[float]] = defaultdict(list)
    scored = {name for rollout in group.rollouts for future in rollout.futures for name in future.scores}
    for rollout in group.rollouts:
        for name in scored or applying(group.task):
            given = [future.scores.get(name) for future in rollout.futures]
            numbers = [float(score) for score in given if score is not None and not isinstance(score, Missing)]
            found[name] += [0.0] if rollout.malformed and not numbers else _mean_of_any(numbers)
    return found


def refuse_missing(groups: Sequence[Group], max_missing: float) -> None:
    """RunStopped where more than `max_missing` of the rollouts have no reward: an outage would decide the update."""
    rewards = [rollout.reward.value for group in groups for rollout in group.rollouts]
    reasons = Counter(value.why for value in rewards if isinstance(value, Missing))
    if reasons.total() > max_missing * len(rewards):
        why, count = reasons.most_common(1)[0]
        raise RunStopped(
            f"{reasons.total()} of {len(rewards)} rollouts have no reward, more than "
            f"reward.max_missing={max_missing} allows; most often ({count}): {why}"
        )


def mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


def standard_error(values: Sequence[float]) -> float:
    """Of the mean of independent values; NaN of fewer than two."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else float("nan")


def _mean_of_any(values: Sequence[float]) -> list[float]:
    return [mean(values)] if values else []


def _rewards(rollouts: Iterable[Rollout]) -> list[float]:
    return [float(value) for r in rollouts if not isinstance(value := r.reward.value, Missing)]
