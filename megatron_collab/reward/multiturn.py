"""Multiturn-aware reward of a turn from the scores of its futures, and the published formulas for comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_collab.config import Extension, RewardConfig, make
from megatron_collab.runtime.process import RunStopped
from megatron_collab.types import Failed, Future, Missing, Reward, Rollout, Score

TOKENS = "token_amount"  # the metric that the paper's formula treats specially


@dataclass(frozen=True)
class Formula:
    """A mode of the reward: see `turn_reward`.

    `whole`: the mean is over the futures that have every score, not over those that have the metric's own. `clip`: of
    each metric's mean, in place of reward.clamp. `token_cost`: largest cost of token_amount in a future.
    """

    whole: bool = False
    clip: float | None = None
    token_cost: float = math.inf


FORMULAS = {
    "mr": Formula(),
    "single_turn": Formula(),
    "paper": Formula(whole=True, token_cost=1.0),
    "collabllm": Formula(whole=True),
    "verl": Formula(clip=1.0),
}


class RewardFunction(Extension):
    """Base of the reward functions that reward.mode may name as package.module:Class; a function will do as well."""

    def __call__(self, futures: Sequence[Future], weights: Mapping[str, float]) -> Reward:
        """The reward of a trained turn from its scored futures, one or more. `weights` are reward.weights."""
        raise NotImplementedError


def reward_function(config: RewardConfig) -> Callable[[Sequence[Future]], Reward]:
    """From the scored futures of a trained turn to its reward, as reward.mode says. Raises ConfigError.

    Where a function from outside fails, that reward has Failed, with its reason.
    """
    if config.mode not in FORMULAS:
        outside = make(config.mode, "reward.mode", RewardFunction, config.mode_options, "reward.mode_options.")
        return lambda futures: _of_outside(outside, futures, config)
    return lambda futures: turn_reward([future.scores for future in futures], config.weights, config.mode, config.clamp)


def _of_outside(outside: RewardFunction, futures: Sequence[Future], config: RewardConfig) -> Reward:
    try:
        reward = outside(futures, config.weights)
        if not isinstance(reward, Reward):
            raise TypeError(f"gave {type(reward).__name__}; return a Reward")
        if not isinstance(reward.value, Missing) and not math.isfinite(reward.value):
            raise ValueError(f"a reward of {reward.value}; give a finite number, or Missing")
        return reward
    except RunStopped:
        raise
    except Exception as error:  # of a function from anywhere
        reason = " ".join(str(error).split())
        return Reward(Failed(f"reward.mode={config.mode}: {type(error).__name__}: {reason}"), missing=1)


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

    Where the mean is over sums, only the futures that have every weighted score count. A metric that a future does
    not name does not apply to the task and is left out. Where no future counts, the reward is Missing.

    The standard error is std(s_f, ddof=1) / sqrt(n) of the sums s_f = sum_m p_mf, before any clip of a mean, over the
    n futures that have every weighted score; 0 where n < 2.
    """
    applying = [name for name in scores_F[0] if all(name in scores for scores in scores_F)]
    weighted = {name: weights[name] for name in applying if weights[name] != 0}
    missing = sum(isinstance(scores[name], Missing) for scores in scores_F for name in applying)
    if not weighted:
        return Reward(Missing("no metric with a weight in reward.weights applies to this task"), missing=missing)
    formula = FORMULAS[mode]
    parts_F = [_parts(scores, weighted, formula.token_cost) for scores in scores_F]
    whole_F = [parts for parts in parts_F if len(parts) == len(weighted)]
    limits = clamp if formula.clip is None else dict.fromkeys(weighted, formula.clip)
    parts: dict[str, float] = {}
    for name in weighted:
        values = [parts[name] for parts in (whole_F if formula.whole else parts_F) if name in parts]
        if not values:  # the reason is that of the first missing score, of this metric before others
            found = ((other, scores[other]) for other in (name, *weighted) for scores in scores_F)
            why = next(Missing(f"{other}: {score.why}") for other, score in found if isinstance(score, Missing))
            return Reward(why, missing=missing)
        limit = limits.get(name, math.inf)
        parts[name] = min(max(sum(values) / len(values), -limit), limit)
    return Reward(sum(parts.values()), _standard_error([sum(parts.values()) for parts in whole_F]), parts, missing)


def malformed_last(rollouts: Sequence[Rollout]) -> tuple[Rollout, ...]:
    """The rollouts of a group, of which malformed ones have at most the worst reward of the others.

    With reward.malformed alone, a long reply may cost more tokens than the penalty of one that is cut, and truncation
    pays.
    """
    rewards = [(rollout.malformed, rollout.reward.value) for rollout in rollouts]
    others = [value for malformed, value in rewards if not malformed and not isinstance(value, Missing)]

    def lowered(reward: Reward) -> Reward:
        assert not isinstance(reward.value, Missing)
        return replace(reward, value=min(reward.value, *others)) if others else reward

    return tuple(replace(one, reward=lowered(one.reward)) if one.malformed else one for one in rollouts)


def _parts(scores: Mapping[str, Score], weights: Mapping[str, float], token_cost: float) -> dict[str, float]:
    """What each metric that has a score contributes in one future."""
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
