"""Metrics of a step and of an evaluation, computed from groups (docs/reference/metrics.md)."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from megatron_collab import statistics
from megatron_collab.runtime.process import RunStopped
from megatron_collab.types import Group, Missing, Rollout, Task

ApplicableMetrics = Callable[[Task], Iterable[str]]  # the metrics that apply to a task
_LEVEL = 0.25  # of the test in `decision_density`


def summary(groups: Sequence[Group], applicable_metrics: ApplicableMetrics) -> dict[str, float]:
    """Means over the rollouts of a step: reward, every metric, endings, and per rollout futures and turn tokens.

    Every rollout counts once, regardless of the number of its futures; see `scores`. `reward_se` is the mean standard
    error of a turn's reward over its futures. `spread` is the mean standard deviation of the rewards within a group,
    which is the training signal of GRPO.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    values: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        for name, scored in scores(group, applicable_metrics).items():
            values[f"score/{name}"] += scored
    endings: dict[str, float] = defaultdict(float)
    for rollout in rollouts:
        for name, count in Counter(str(future.conversation.ending) for future in rollout.futures).items():
            endings[name] += count / len(rollout.futures)
    errors = [rollout.reward.standard_error for rollout in rollouts if not isinstance(rollout.reward.value, Missing)]
    sampled = [sum(len(turn.token_ids) for turn in rollout.start.turns) for rollout in rollouts if rollout.start.turns]
    return {
        "reward": mean(_rewards(rollouts)),
        "reward_se": mean(errors),
        "spread": mean([float(np.std(_rewards(group.rollouts) or [0.0])) for group in groups]),
        "missing": float(sum(rollout.reward.missing for rollout in rollouts)),
        "futures": sum(len(rollout.futures) for rollout in rollouts) / len(rollouts),
        "turn_tokens": mean(sampled),
        "sampled_tokens": float(sum(map(_sampled_tokens, rollouts))),
        **{name: mean(numbers) for name, numbers in sorted(values.items()) if numbers},
        **{f"ending/{name}": share / len(rollouts) for name, share in sorted(endings.items())},
    }


def comparison_summary(groups: Sequence[Group]) -> dict[str, float]:
    """How well rewards tell the turns of a group apart, over the groups with at least two rewards.

    `equal_rewards`: share of these groups whose rewards are all equal. `reliability`: share of the variance of rewards
    within a group that is due to the turns and not to chance in their futures, 1 - mean(SE^2) / mean(var). var is the
    variance of a group's rewards (ddof 1), SE the standard error of a reward over its k futures, so that SE^2 is the
    variance which equal turns would have. With mean squares BMS = k var and WMS = k SE^2, averaged over groups, it is
    the intraclass correlation ICC(1, k) = (BMS - WMS) / BMS (Shrout and Fleiss 1979, Psychological Bulletin 86:420).
    Chance may bring it below 0; absent if all rewards are equal. `decision_density`: see that function.

    SE is 0 if a turn is malformed or ends the conversation. For the last two a group is left out if the SE of another
    turn is unknown, since it has fewer than two scored futures. They are absent if no turn has two.
    """
    rewarded = [
        [rollout for rollout in group.rollouts if not isinstance(rollout.reward.value, Missing)] for group in groups
    ]
    compared = [rollouts for rollouts in rewarded if len(rollouts) > 1]
    measured = [rollouts for rollouts in compared if all(_reward_samples(rollout) > 1 for rollout in rollouts)]
    metrics = {}
    if compared:
        metrics["equal_rewards"] = mean([float(np.ptp(_rewards(rollouts)) == 0) for rollouts in compared])
    if any(_reward_samples(rollout) < math.inf for rollouts in measured for rollout in rollouts):
        metrics["decision_density"] = decision_density(measured)
        variance = sum(float(np.var(_rewards(rollouts), ddof=1)) for rollouts in measured)
        if variance > 0:
            error = sum(mean([rollout.reward.standard_error**2 for rollout in rollouts]) for rollouts in measured)
            metrics["reliability"] = 1 - error / variance
    return metrics


def decision_density(groups: Sequence[Sequence[Rollout]]) -> float:
    """Estimated share of the groups in which it matters what the policy replies: the expected rewards differ.

    The fraction of turns whose actions affect the return (arXiv:2606.22164), here of the actions that were sampled. If
    nothing varies between futures of a reply, or two replies without futures differ, a group counts as it is. Every
    other group has the p of an analysis of variance, and the share is estimated as (share(p <= a) - a) / (1 - a),
    a = 1/4 (Storey 2002, JRSS B 64:479, lambda = a). Of equal replies the mean is 0 if rewards are normal, and -0.2 to
    0.04 if they are 0 or 1, so that p has few values; single steps vary around it.

    An underestimate, the more the smaller the differences are beside the chance in futures: of groups of 8 replies x 3
    futures it counts 0.88 (0.50) if the expected rewards have the variance of a future (0.3 of it), in all normal
    distributions. A smaller a would count fewer, 0.68 (0.24) with 0.05, a larger one make the estimate noisier: its
    standard error is at most 1 / (2 (1 - a) sqrt(groups)). If replies differ only in the spread of their futures, it is
    above 0: 0.06 if that of every second reply is ten times as large.
    """
    return mean([_replies_differ(rollouts) for rollouts in groups])


def _replies_differ(rollouts: Sequence[Rollout]) -> float:
    """1 or 0 if it is certain whether expected rewards differ; else the group's term in `decision_density`.

    One-way analysis of variance; equal replies have the mean of all futures, or the reward of those without futures.
    """
    from scipy.special import fdtrc  # slow to import, and not needed by evaluations

    rewards, samples = np.array(_rewards(rollouts)), np.array([*map(_reward_samples, rollouts)])
    rounding = 1e-9 * float(np.abs(rewards).max())
    exact, means, n = rewards[samples == np.inf], rewards[samples < np.inf], samples[samples < np.inf]
    errors = np.array([rollout.reward.standard_error for rollout in rollouts])[samples < np.inf]
    within = float((n * (n - 1) * errors**2).sum() / max((n - 1).sum(), 1))
    if within <= rounding**2:
        return float(np.ptp(rewards) > rounding)
    if exact.size and np.ptp(exact) > rounding:
        return 1.0
    center, df = (exact[0], len(means)) if exact.size else (np.average(means, weights=n), len(means) - 1)
    between = float((n * (means - center) ** 2).sum() / df)
    differs = float(fdtrc(df, (n - 1).sum(), between / within) <= _LEVEL)
    return (differs - _LEVEL) / (1 - _LEVEL)


def _reward_samples(rollout: Rollout) -> float:
    """How many scored futures the reward is a mean of; infinite if no future follows the turn, so that it is exact."""
    if rollout.malformed or rollout.start.ending is not None:
        return math.inf
    return sum(not any(isinstance(s, Missing) for s in future.scores.values()) for future in rollout.futures)


def evaluation_summary(groups: Sequence[Group], applicable_metrics: ApplicableMetrics) -> dict[str, float]:
    """Means over the tasks of an evaluation, with their intervals (`reward_low`, `score_high/METRIC`: see statistics).

    With several samples of a task, shares also have pass@k and pass^k. `incomplete` is the number of rollouts that lack
    a score, `missing/METRIC` the number of those that lack this one.
    """
    metrics = summary(groups, applicable_metrics)
    del metrics["reward_se"]  # of a turn's reward over its futures
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    metrics["incomplete"] = float(sum(bool(rollout.failures) for rollout in rollouts))
    for rollout in rollouts:
        all_scores = [item for future in rollout.futures for item in future.scores.items()]
        for name in {name for name, score in all_scores if isinstance(score, Missing)}:
            metrics[f"missing/{name}"] = metrics.get(f"missing/{name}", 0.0) + 1
    by_task, rewards = defaultdict[str, list[list[float]]](list), list[list[float]]()
    for group in groups:
        rewards.append(_rewards(group.rollouts))
        for name, scored in scores(group, applicable_metrics).items():
            by_task[name].append(scored)
    metrics |= statistics.mean(rewards).metrics("reward")
    for name, tasks in sorted(by_task.items()):
        if any(tasks):
            for label, estimate in statistics.with_passes(name, tasks).items():
                metrics |= estimate.metrics("score", label)
    return metrics


def _sampled_tokens(rollout: Rollout) -> int:
    """All tokens that the policy has sampled: those of the trained turns, once, and those of all futures after them."""
    first = len(rollout.start.turns)
    later = [turn for future in rollout.futures for turn in future.conversation.turns[first:]]
    return sum(len(turn.token_ids) for turn in (*rollout.start.turns, *later))


def scores(group: Group, applicable_metrics: ApplicableMetrics) -> dict[str, list[float]]:
    """By metric, the mean score over the futures of each rollout, without rollouts whose scores are all missing.

    A malformed rollout has no scores. It counts as 0 in every metric that applies to the task: the metrics of the other
    rollouts, or if none was scored, `applicable_metrics`. Otherwise a score would rise with the share of malformed
    turns.
    """
    means: dict[str, list[float]] = defaultdict(list)
    scored = {name for rollout in group.rollouts for future in rollout.futures for name in future.scores}
    for rollout in group.rollouts:
        for name in scored or applicable_metrics(group.task):
            future_scores = [future.scores.get(name) for future in rollout.futures]
            numbers = [float(score) for score in future_scores if score is not None and not isinstance(score, Missing)]
            means[name] += [0.0] if rollout.malformed and not numbers else _mean_of_any(numbers)
    return means


def refuse_missing(groups: Sequence[Group], max_missing: float) -> None:
    """Raises RunStopped if more than the share `max_missing` of the rollouts has no reward, since an outage would bias
    the update.
    """
    rewards = [rollout.reward.value for group in groups for rollout in group.rollouts]
    reasons = [value.why for value in rewards if isinstance(value, Missing)]
    _refuse(reasons, f"of {len(rewards)} rollouts have no reward", max_missing * len(rewards), max_missing)


def refuse_incomplete(name: str, groups: Sequence[Group], max_missing: float) -> None:
    """Raises RunStopped if more than the share `max_missing` of the rollouts of evaluation `name` lacks a score."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    reasons = [rollout.failures[0] for rollout in rollouts if rollout.failures]
    lacking = f"of {len(rollouts)} conversations of evaluation {name} lack a score"
    _refuse(reasons, lacking, max_missing * len(rollouts), max_missing)


def _refuse(reasons: Sequence[str], lacking: str, allowed: float, max_missing: float) -> None:
    if len(reasons) > allowed:
        reason, count = Counter(reasons).most_common(1)[0]
        raise RunStopped(
            f"{len(reasons)} {lacking}, more than reward.max_missing={max_missing} allows; "
            f"most often ({count}): {reason}"
        )


def mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


def _mean_of_any(values: Sequence[float]) -> list[float]:
    return [mean(values)] if values else []


def _rewards(rollouts: Iterable[Rollout]) -> list[float]:
    return [float(value) for rollout in rollouts if not isinstance(value := rollout.reward.value, Missing)]
