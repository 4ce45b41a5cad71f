"""What a step or an evaluation came to: means over its rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from megatron_collab.types import Group, Missing


def summary(groups: Sequence[Group]) -> dict[str, float]:
    """Means over the rollouts of a step: reward and its standard error, every metric, endings, tokens.

    `reward_se` is the standard error of one turn's reward that comes from its futures' spread, averaged; `spread`
    the standard deviation of the rewards within a group, averaged: what GRPO learns from. `futures` and `turn_tokens`
    are those of one rollout.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    futures = [future for rollout in rollouts for future in rollout.futures]
    rewarded = [rollout.reward for rollout in rollouts if not isinstance(rollout.reward.value, Missing)]
    values: dict[str, list[float]] = {}
    for future in futures:
        for name, score in future.scores.items():
            if not isinstance(score, Missing):
                values.setdefault(f"score/{name}", []).append(score)
    endings = Counter(str(future.conversation.ending) for future in futures)
    spreads = [
        np.std([r.reward.value for r in group.rollouts if not isinstance(r.reward.value, Missing)] or [0.0])
        for group in groups
    ]
    sampled = [sum(len(turn.token_ids) for turn in rollout.start.turns) for rollout in rollouts if rollout.start.turns]
    return {
        "reward": mean([float(reward.value) for reward in rewarded if not isinstance(reward.value, Missing)]),
        "reward_se": mean([reward.standard_error for reward in rewarded]),
        "spread": mean([float(spread) for spread in spreads]),
        "missing": float(sum(rollout.reward.missing for rollout in rollouts)),
        "futures": len(futures) / len(rollouts),
        "turn_tokens": mean([float(tokens) for tokens in sampled]),
        **{name: mean(scores) for name, scores in sorted(values.items())},
        **{f"ending/{name}": count / len(futures) for name, count in sorted(endings.items())},
    }


def mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")
