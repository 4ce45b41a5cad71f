"""From futures to the reward of the turn they follow from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from megatron_collab.types import Missing, Reward, Score


def turn_reward(scores_F: Sequence[Mapping[str, Score]], weights: Mapping[str, float]) -> Reward:
    """The multiturn-aware reward of a turn from the scores of its F futures.

        value = sum_m weight_m * mean of the scores of m over the futures in which m has one

    (CollabLLM, arXiv 2502.00640, section 3, with every metric averaged over the futures that have it.) A
    metric that a future does not name does not apply to the task and is left out. A weighted metric that is
    Missing in every future leaves the turn without a reward. With one future, the turn alone, the formula is
    that of the single-turn reward.

    The standard error is that of the mean over the futures, std(s_f, ddof=1) / sqrt(n), of the weighted sums
    s_f = sum_m weight_m * score_mf of the n futures that have every score; 0 where n < 2.
    """
    applying = [name for name in scores_F[0] if all(name in scores for scores in scores_F)]
    weighted = {name: weights[name] for name in applying if weights[name] != 0}
    missing = sum(isinstance(scores[name], Missing) for scores in scores_F for name in applying)
    if not weighted:
        return Reward(Missing("no metric with a weight in reward.weights applies to this task"), missing=missing)
    parts: dict[str, float] = {}
    for name, weight in weighted.items():
        values = [score for scores in scores_F if not isinstance(score := scores[name], Missing)]
        if not values:
            first = scores_F[0][name]
            return Reward(Missing(f"{name}: {first.why}" if isinstance(first, Missing) else name), missing=missing)
        parts[name] = weight * sum(values) / len(values)
    return Reward(sum(parts.values()), _standard_error(scores_F, weighted), parts, missing)


def _standard_error(scores_F: Sequence[Mapping[str, Score]], weights: Mapping[str, float]) -> float:
    sums = []
    for scores in scores_F:
        values = [weight * score for name, weight in weights.items() if not isinstance(score := scores[name], Missing)]
        if len(values) == len(weights):
            sums.append(sum(values))
    n = len(sums)
    if n < 2:
        return 0.0
    mean = sum(sums) / n
    return math.sqrt(sum((value - mean) ** 2 for value in sums) / (n - 1) / n)
