"""Multiturn-aware reward of a turn from the scores of its futures, and the published formulas for comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_collab.runtime.process import ends_caller
from megatron_collab.settings import Extension, make
from megatron_collab.types import Failed, Future, Missing, Reward, Rollout, Score

TOKENS = "token_amount"  # metric with a special term in the paper's formula


@dataclass(frozen=True)
class Formula:
    """A mode of the reward: see `turn_reward`.

    `complete`: the mean is over the futures that have every score, not over those that have the metric's score.
    `clip`: bound of each metric's mean, replaces reward.clamp. `token_cost`: largest cost of token_amount in a future.
    """

    complete: bool = False
    clip: float | None = None
    token_cost: float = math.inf


FORMULAS = {
    "mr": Formula(),
    "single_turn": Formula(),
    "paper": Formula(complete=True, token_cost=1.0),
    "collabllm": Formula(complete=True),
    "verl": Formula(clip=1.0),
}


class RewardFunction(Extension):
    """Base of the reward functions that reward.mode may name as package.module:Class; a plain function works too."""

    def __call__(self, futures: Sequence[Future], weights: Mapping[str, float]) -> Reward:
        """The reward of a trained turn from its scored futures, at least one. `weights` are reward.weights."""
        raise NotImplementedError


def reward_function(
    mode: str, options: Mapping[str, Any], weights: Mapping[str, float], clamp: Mapping[str, float]
) -> Callable[[Sequence[Future]], Reward]:
    """The function of reward.mode, from the scored futures of a trained turn to its reward. Raises ConfigError.

    `options`: reward.mode_options. If a custom function fails, the value of the reward is Failed, with the reason.
    """
    if mode not in FORMULAS:
        custom = make(mode, "reward.mode", RewardFunction, options, "reward.mode_options.")
        return lambda futures: _custom_reward(mode, custom, futures, weights)
    return lambda futures: turn_reward([future.scores for future in futures], weights, mode, clamp)


def _custom_reward(
    mode: str, function: RewardFunction, futures: Sequence[Future], weights: Mapping[str, float]
) -> Reward:
    try:
        reward = function(futures, weights)
        if not isinstance(reward, Reward):
            raise TypeError(f"returned {type(reward).__name__}; return a Reward")
        if not isinstance(reward.value, Missing) and not math.isfinite(reward.value):
            raise ValueError(f"a reward of {reward.value}; give a finite number, or Missing")
        return reward
    except BaseException as error:  # a custom function may raise anything
        if ends_caller(error):
            raise
        reason = " ".join(str(error).split())
        return Reward(Failed(f"reward.mode={mode}: {type(error).__name__}: {reason}"), missing=1)


def turn_reward(
    scores_F: Sequence[Mapping[str, Score]],
    weights: Mapping[str, float],
    mode: str = "mr",
    clamp: Mapping[str, float] = {},
) -> Reward:
    """The reward of a turn from the scores s_mf that the metrics m gave its F futures, with weights w_m.

    mr           sum_m clip(w_m mean_f s_mf, -clamp_m, clamp_m), the mean over the futures in which m has a score
    single_turn  the same over the one scored conversation
    paper        mean_f sum_m p_mf, p_mf = -min(lambda s_mf, 1) for token_amount with lambda = -w_m, else w_m s_mf
                 (CollabLLM, arXiv 2502.00640, section 3)
    collabllm    mean_f sum_m w_m s_mf (the authors' code)
    verl         sum_m clip(w_m mean_f s_mf, -1, 1) (verl's recipe)

    If the mean is over sums, only futures with every weighted score count. If a future has no entry for a metric, the
    metric does not apply to the task and is skipped. If no future counts, the reward is Missing.

    The standard error is std(s_f, ddof=1) / sqrt(n) of the sums s_f = sum_m p_mf, before any clip of a mean, over the
    n futures that have every weighted score; 0 if n < 2.
    """
    applicable = [name for name in scores_F[0] if all(name in scores for scores in scores_F)]
    weighted = {name: weights[name] for name in applicable if weights[name] != 0}
    missing = sum(isinstance(scores[name], Missing) for scores in scores_F for name in applicable)
    if not weighted:
        return Reward(Missing("no metric with a weight in reward.weights applies to this task"), missing=missing)
    formula = FORMULAS[mode]
    parts_F = [_parts(scores, weighted, formula.token_cost) for scores in scores_F]
    complete_F = [parts for parts in parts_F if len(parts) == len(weighted)]
    limits = clamp if formula.clip is None else dict.fromkeys(weighted, formula.clip)
    parts: dict[str, float] = {}
    for name in weighted:
        values = [parts[name] for parts in (complete_F if formula.complete else parts_F) if name in parts]
        if not values:  # the reason is that of the first missing score, starting with this metric
            candidates = ((other, scores[other]) for other in (name, *weighted) for scores in scores_F)
            why = next(Missing(f"{other}: {score.why}") for other, score in candidates if isinstance(score, Missing))
            return Reward(why, missing=missing)
        limit = limits.get(name, math.inf)
        parts[name] = min(max(sum(values) / len(values), -limit), limit)
    return Reward(sum(parts.values()), _standard_error([sum(parts.values()) for parts in complete_F]), parts, missing)


def malformed_last(rollouts: Sequence[Rollout]) -> tuple[Rollout, ...]:
    """The rollouts of a group, with the rewards of malformed ones lowered to at most the worst reward of the others.

    With reward.malformed only, the token cost of a long reply may exceed the penalty of a truncated one, so truncation
    would pay.
    """
    rewards = [(rollout.malformed, rollout.reward.value) for rollout in rollouts]
    well_formed = [value for malformed, value in rewards if not malformed and not isinstance(value, Missing)]

    def lowered(reward: Reward) -> Reward:
        assert not isinstance(reward.value, Missing)
        return replace(reward, value=min(reward.value, *well_formed)) if well_formed else reward

    return tuple(replace(r, reward=lowered(r.reward)) if r.malformed else r for r in rollouts)


def _parts(scores: Mapping[str, Score], weights: Mapping[str, float], token_cost: float) -> dict[str, float]:
    """Contribution of each metric that has a score, in one future."""
    parts = {name: w * s for name, w in weights.items() if not isinstance(s := scores[name], Missing)}
    if TOKENS in parts:
        parts[TOKENS] = max(parts[TOKENS], -token_cost)
    return parts


def _standard_error(sums: Sequence[float]) -> float:
    n = len(sums)
    if n < 2:
        return 0.0
    mean = sum(sums) / n
    return math.sqrt(sum((value - mean) ** 2 for value in sums) / (n - 1) / n)
