"""From the credits of a batch to the advantage of each trained token, and its weight in the mean of the loss.

An estimator is a class derived from Advantage, which algo.advantage names: ADVANTAGES has the short names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

import numpy as np

from megatron_collab.runtime.process import RunStopped
from megatron_collab.settings import AlgoConfig, Extension, build, lookup
from megatron_collab.settings.schema import ADVANTAGES
from megatron_collab.types import Credit, Sample, ScoredBatch

Rows = Sequence[np.ndarray]  # float64 [T] for the T trained tokens of each sample
EPSILON = 1e-6
K3_TANGENT = 3.0  # log(reference / policy) above which the estimate k3 continues as its tangent


class Estimates(NamedTuple):
    """The advantages of the trained tokens; `returns`: what the critic learns to predict at them, if there is one."""

    advantages: Rows
    returns: Rows | None = None


class Advantage(Extension, ABC):
    """Base of the estimators that algo.advantage may name as package.module:Class.

    `compares`: credits are compared with their peers, so a task needs two rewards, and gives no gradient if they are
    equal. `critic`: the estimator needs a critic, whose returns it computes. `decouples`: rewards are first `decoupled`
    by metric. An instance computes one batch, on every rank: it keeps nothing, and draws nothing at random.
    """

    compares: ClassVar[bool] = False
    critic: ClassVar[bool] = False
    decouples: ClassVar[bool] = False

    def __init__(self, options: Any, algo: AlgoConfig) -> None:
        super().__init__(options)
        self.algo = algo

    @abstractmethod
    def estimate(self, samples: Sequence[Sample], costs: Rows, values: Rows | None) -> Estimates:
        """The advantages of the trained tokens of `samples`, from their credits.

        `costs`: the KL penalty of each token with algo.kl_in=reward, else 0; `values`: the critic's, if there is one.
        """


def advantage_class(name: str) -> type[Advantage]:
    """The estimator that algo.advantage=`name` is. Raises ConfigError."""
    kind: type[Advantage] = lookup(name, "algo.advantage", ADVANTAGES, Advantage)
    return kind


def make_advantage(algo: AlgoConfig) -> Advantage:
    """The estimator algo.advantage with its options. Raises ConfigError."""
    kind = advantage_class(algo.advantage)
    return kind(build(kind.Options, algo.advantage_options, "algo.advantage_options."), algo)


def with_advantages(batch: ScoredBatch, algo: AlgoConfig) -> ScoredBatch:
    """The batch with per-token advantages of the estimator algo.advantage and the targets of its critic, if any.

    With algo.kl_in=reward the KL penalty to the reference (estimator algo.kl, times algo.kl_coef) is subtracted from
    the reward. Only trained tokens are read. Raises ValueError if a credit is not finite, and RunStopped if a custom
    estimator gives no finite number for each trained token. Pairs of algo.dpo.loss=refuel get their rewards in place of
    advantages; if algo.objective needs neither, the batch is returned unchanged.
    """
    samples = batch.samples
    if algo.objective == "dpo" and algo.dpo.loss == "refuel":
        rewards = [np.full(np.count_nonzero(s.loss_mask), s.credits[0].value) for s in samples]
        return replace(batch, advantages=_placed(samples, rewards))
    if algo.objective != "policy":
        return batch
    credits = [credit.value for sample in samples for credit in sample.credits]
    if not np.isfinite(credits).all():
        raise ValueError(f"rewards must be finite numbers, not {credits}; leave out samples without a reward")
    costs = [np.zeros(np.count_nonzero(sample.loss_mask)) for sample in samples]
    if algo.kl_in == "reward" and batch.reference_log_probs is not None:
        assert batch.old_log_probs is not None
        log_ratios = [old - ref for old, ref in zip(batch.old_log_probs, batch.reference_log_probs, strict=True)]
        costs = [algo.kl_coef * kl_estimate(row, algo.kl) for row in _trained(samples, log_ratios)]
    values = None if batch.values is None else _trained(samples, batch.values)
    estimator = make_advantage(algo)
    estimates = estimator.estimate(samples, costs, values)
    if not isinstance(estimates, Estimates):
        raise RunStopped(f"algo.advantage={algo.advantage}: estimate must give Estimates")
    advantages, returns = estimates
    for rows in [advantages, returns] if estimator.critic else [advantages]:
        shapes = [cost.shape for cost in costs]
        if not isinstance(rows, Sequence) or len(rows) != len(costs) or not all(map(_is_row, rows, shapes)):
            raise RunStopped(f"algo.advantage={algo.advantage}: must give a number for each trained token of a sample")
        if not all(np.isfinite(row).all() for row in rows):
            raise RunStopped(f"algo.advantage={algo.advantage}: gave numbers that are not finite")
    placed = _placed(samples, advantages)
    return replace(batch, advantages=placed, returns=None if returns is None else _placed(samples, returns))


class Compared(Advantage):
    """Base of estimators that give a credit one number, from its peers; its tokens share it."""

    compares = True

    @abstractmethod
    def compare(self, values: np.ndarray, peers: Sequence[str], scale: Sequence[str]) -> np.ndarray:
        """The advantages of C credits, float64 [C], from their values [C] and the labels of Credit.

        A value is less the costs from its first token on.
        """

    def estimate(self, samples: Sequence[Sample], costs: Rows, values: Rows | None) -> Estimates:
        rows = [np.zeros_like(cost) for cost in costs]
        entries = [
            (credit, *tokens_of(sample, credit), cost, row)
            for sample, cost, row in zip(samples, costs, rows, strict=True)
            for credit in sample.credits
        ]
        credits = np.array([c.value - (cost[at[0] :].sum() if at.size else 0.0) for c, at, _, cost, _ in entries])
        scale = [credit.scale for credit, *_ in entries]
        advantages = self.compare(credits, [credit.peers for credit, *_ in entries], scale)
        if not _is_row(advantages, credits.shape):
            raise RunStopped(f"algo.advantage={self.algo.advantage}: compare must give a number for each credit")
        for (_, at, weights, _, row), value in zip(entries, advantages, strict=True):
            row[at] += weights * value
        return Estimates(rows)


class Grpo(Compared):
    """See `grpo`."""

    def compare(self, values: np.ndarray, peers: Sequence[str], scale: Sequence[str]) -> np.ndarray:
        return grpo(values, peers, scale)


class DrGrpo(Compared):
    """See `dr_grpo`."""

    def compare(self, values: np.ndarray, peers: Sequence[str], scale: Sequence[str]) -> np.ndarray:
        return dr_grpo(values, peers)


class Rloo(Compared):
    """See `rloo`."""

    def compare(self, values: np.ndarray, peers: Sequence[str], scale: Sequence[str]) -> np.ndarray:
        return rloo(values, peers)


class Gdpo(Compared):
    """See `decoupled` and `gdpo`."""

    decouples = True

    def compare(self, values: np.ndarray, peers: Sequence[str], scale: Sequence[str]) -> np.ndarray:
        return gdpo(values)


class ReinforcePlusPlus(Advantage):
    """See `returns_to_go` and `whitened`."""

    def estimate(self, samples: Sequence[Sample], costs: Rows, values: Rows | None) -> Estimates:
        return Estimates(whitened([returns_to_go(*pair) for pair in zip(samples, costs, strict=True)]))


class Gae(Advantage):
    """See `gae` and `whitened`; the critic's target is A + V before the normalization."""

    critic = True

    def estimate(self, samples: Sequence[Sample], costs: Rows, values: Rows | None) -> Estimates:
        assert values is not None
        rewards = [rewards_of(sample) - cost for sample, cost in zip(samples, costs, strict=True)]
        raw = [gae(r, v, self.algo.gamma, self.algo.gae_lambda) for r, v in zip(rewards, values, strict=True)]
        return Estimates(whitened(raw), [a + v for a, v in zip(raw, values, strict=True)])


def grpo(values: np.ndarray, peers: Sequence[str], scale: Sequence[str]) -> np.ndarray:
    """(v - mean(peers)) / (std(same scale) + 1e-6) for C credits, float64 [C]; exactly 0 if the peers are equal.

    Outcome supervision of GRPO, with the population standard deviation (Shao et al. 2024, DeepSeekMath,
    arXiv:2402.03300, section 4.1.2). In the paper, peers and scale are both the group.
    """
    return dr_grpo(values, peers) / (_per_label(scale, np.std, values) + EPSILON)


def dr_grpo(values: np.ndarray, peers: Sequence[str]) -> np.ndarray:
    """v - mean(peers) for C credits, float64 [C]; exactly 0 if the peers are equal.

    Liu et al. 2025, Understanding R1-Zero-Like Training, arXiv:2503.20783, section 3.2.
    """
    # The mean of equal floats may differ from them in the last bit.
    return np.where(_per_label(peers, np.ptp, values) == 0, 0.0, values - _per_label(peers, np.mean, values))


def rloo(values: np.ndarray, peers: Sequence[str]) -> np.ndarray:
    """v - mean(the other peers) for C credits, float64 [C]; 0 if there are no other peers.

    REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740, section 3). Of n peers the mean of the others is
    (n mean - v) / (n - 1), so this is n / (n - 1) (v - mean).
    """
    n = _per_label(peers, len, values)
    return dr_grpo(values, peers) * n / np.maximum(n - 1, 1)


def gdpo(values: np.ndarray) -> np.ndarray:
    """(v - mean) / (std + 1e-6) over the C credits of a batch, float64 [C]; exactly 0 if all are equal.

    GDPO's batch normalization, applied to `decoupled` values (Liu et al. 2026, arXiv:2601.05242).
    """
    equal = bool(np.ptp(values) == 0)
    return np.zeros_like(values) if equal else (values - values.mean()) / (values.std() + EPSILON)


def decoupled(parts_C: Sequence[Mapping[str, float]], weights: Mapping[str, float]) -> np.ndarray:
    """sum_m |w_m| (p_m - mean(p_m)) / (std(p_m) + 1e-6) for the parts p_m = w_m s_m of C rewards of one group, float64
    [C]: each metric is normalized before the sum; a metric whose parts are equal gives exactly 0.

    Group reward-decoupled normalization of GDPO (Liu et al. 2026, arXiv:2601.05242), with the population standard
    deviation. If the sum is normalized instead, as by `grpo`, the metric with the largest spread hides the others.
    """
    group = [""] * len(parts_C)
    columns = ((weight, np.array([parts[name] for parts in parts_C])) for name, weight in weights.items())
    return np.sum([abs(weight) * grpo(parts, group, group) for weight, parts in columns], axis=0)


def returns_to_go(sample: Sample, costs: np.ndarray) -> np.ndarray:
    """A_t = r - sum_{k >= t} cost_k, float64 [T], for the T trained tokens of a sample and their costs.

    REINFORCE++ before its normalization, cost_k = beta KL_k (Hu et al. 2025, arXiv:2501.03262). r is the value of
    the token's credit. The paper has one reward per sequence; if a sample has several credits, each is already a
    return, so they are not summed. Costs are summed to the end of the sample.
    """
    values = np.zeros_like(costs)
    for credit in sample.credits:
        at, weights = tokens_of(sample, credit)
        values[at] += weights * credit.value
    return values - costs[::-1].cumsum()[::-1]


def gae(rewards: np.ndarray, values: np.ndarray, gamma: float, gae_lambda: float) -> np.ndarray:
    """Generalized advantage estimates, float64 [T], from rewards and values [T] of a sequence's trained tokens.

    A_t = d_t + gamma lambda A_{t+1}, d_t = r_t + gamma V_{t+1} - V_t, with V and A 0 after the last token (Schulman
    et al. 2015, arXiv:1506.02438, equation 16). A trained token is a step, even if other messages precede it.
    """
    deltas = rewards + gamma * np.append(values[1:], 0.0) - values
    backwards = accumulate(deltas[::-1].tolist(), lambda following, delta: delta + gamma * gae_lambda * following)
    return np.array([*backwards], np.float64)[::-1]


def whitened(rows: Sequence[np.ndarray]) -> list[np.ndarray]:
    """(A - mean) / (std + 1e-6) over all rows, float64, of the trained tokens of a batch; exactly 0 if all are equal.

    The global normalization of REINFORCE++ (arXiv:2501.03262) and, once the critic's returns are computed, of GAE in
    PPO on language models (as in the code of Ziegler et al. 2019, arXiv:1909.08593).
    """
    advantages = np.concatenate(rows)
    equal = bool(np.ptp(advantages) == 0)
    scaled = np.zeros_like(advantages) if equal else (advantages - advantages.mean()) / (advantages.std() + EPSILON)
    return np.split(scaled, np.cumsum([len(row) for row in rows])[:-1])


def kl_estimate(log_ratio: np.ndarray, estimate: str) -> np.ndarray:
    """k1, k2 or k3 of KL(pi || ref) from log pi - log ref (Schulman 2020, joschu.net/blog/kl-approx.html).

    If the reference is far more likely, k3 continues as its tangent, as in trainer.losses.kl.
    """
    if estimate == "k1":
        return log_ratio
    if estimate == "k2":
        return log_ratio**2 / 2
    near = np.minimum(-log_ratio, K3_TANGENT)
    return np.expm1(near) - near + np.expm1(K3_TANGENT) * (-log_ratio - near)


def token_weights(
    masks: Sequence[np.ndarray],
    average: str,
    *,
    longest: int = 1,
    later: Sequence[bool] = (),
    later_weight: float = 1.0,
) -> list[np.ndarray]:
    """Weights, float32 [S] for each of the masks [S] of a mini-batch, so that its loss is sum(weight * token's loss).

    `masks` are 1 for trained tokens and cover the whole mini-batch, so the loss does not depend on how the sequences
    are packed, distributed over ranks or split. Untrained tokens have weight 0.

    token     1 / T, T the trained tokens of all sequences (DAPO, arXiv:2503.14476, equation 8)
    sequence  1 / (B T_i), T_i the trained tokens of sequence i, B the sequences that have any (GRPO,
              arXiv:2402.03300, equation 3)
    constant  1 / (B L), L the tokens of the `longest` reply that may be sampled (Dr. GRPO, arXiv:2503.20783,
              section 3.1)

    If some sequences hold `later` turns, their mean and the mean of the other sequences are computed separately and
    added in the ratio `later_weight` to 1. A trained turn has several later turns, which would otherwise drown the
    multiturn-aware reward.

    Raises ValueError if no token is trained.
    """
    tokens = np.array([mask.sum(dtype=np.float64) for mask in masks])
    if not tokens.any():
        raise ValueError("a mini-batch has no trained token; lower algo.mini_batches or look at the loss masks")
    is_later = np.asarray(later, bool) if len(later) else np.zeros(len(masks), bool)
    parts = [((tokens > 0) & ~is_later, 1.0), ((tokens > 0) & is_later, later_weight)]
    parts = [(part, weight) for part, weight in parts if part.any()]
    total = sum(weight for _, weight in parts)
    shares = np.zeros(len(masks))
    for part, weight in parts:
        count = np.count_nonzero(part)
        divisors = {"token": tokens[part].sum(), "sequence": count * tokens[part], "constant": count * longest}
        shares[part] = weight / total / divisors[average]
    return [(mask * share).astype(np.float32) for mask, share in zip(masks, shares, strict=True)]


def rewards_of(sample: Sample) -> np.ndarray:
    """Per trained token, float64 [T]: the sum of the values of the credits that end with it, 0 if none does.

    The reward of a turn without trained tokens (all its tokens were forced) comes after the last trained token before
    it. If there is none before it, nothing that is trained led to this reward.
    """
    rewards = np.zeros(np.count_nonzero(sample.loss_mask))
    for credit in sample.credits:
        end = max((stop for _, stop in credit.spans), default=0)
        if before := np.count_nonzero(sample.loss_mask[:end]):
            rewards[before - 1] += credit.value
    return rewards


def tokens_of(sample: Sample, credit: Credit) -> tuple[np.ndarray, np.ndarray]:
    """Indices, int64 and ascending, of the credit's tokens among the trained tokens of its sample; their weights."""
    credited: np.ndarray = np.zeros(len(sample.loss_mask), bool)
    weights: np.ndarray = np.ones(len(sample.loss_mask))
    for (start, stop), weight in zip(credit.spans, credit.weights or (1.0,) * len(credit.spans), strict=True):
        credited[start:stop], weights[start:stop] = True, weight
    trained = sample.loss_mask > 0
    return np.flatnonzero(credited[trained]), weights[credited & trained]


def _per_label(labels: Sequence[str], statistic: Callable[[np.ndarray], float], values: np.ndarray) -> np.ndarray:
    """For each value, the `statistic` of all values with the same label."""
    names, index = np.unique(np.array(labels), return_inverse=True)
    return np.array([statistic(values[index == name]) for name in range(len(names))])[index]


def _is_row(numbers: object, shape: tuple[int, ...]) -> bool:
    """Whether a custom estimator's result is real numbers of this shape."""
    try:
        row = np.asarray(numbers)
    except ValueError:  # rows of different lengths
        return False
    return row.shape == shape and row.dtype.kind in "fiu"


def _trained(samples: Sequence[Sample], rows: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The entries of rows [S] at trained tokens, float64."""
    return [row[sample.loss_mask > 0].astype(np.float64) for sample, row in zip(samples, rows, strict=True)]


def _placed(samples: Sequence[Sample], rows: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Rows over all tokens, float32 [S], from rows over trained tokens; 0 at the other tokens."""
    placed = [np.zeros_like(sample.loss_mask) for sample in samples]
    for sample, target, row in zip(samples, placed, rows, strict=True):
        target[sample.loss_mask > 0] = row
    return placed
