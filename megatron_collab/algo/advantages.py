"""From the credits of a batch to the advantage of each trained token, and its weight in the mean of the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from megatron_collab.config import AlgoConfig
from megatron_collab.types import Credit, Sample, Scored

GROUPED = ("grpo", "dr_grpo", "gdpo", "rloo")  # compare a credit with its peers; the others need none
EPSILON = 1e-6
K3_TANGENT = 3.0  # log(reference / policy) above which the estimate k3 goes on as its tangent


def with_advantages(batch: Scored, algo: AlgoConfig) -> Scored:
    """The batch with the advantages of its tokens by the estimator algo.advantage, and with gae the critic's targets.

    With algo.kl_in=reward the estimate algo.kl of the KL to the reference, times algo.kl_coef, is subtracted from the
    reward. Only trained tokens are read. ValueError on a credit that is no finite number. What is learned from without
    advantages (algo.objective) stays as it is.
    """
    if algo.objective != "policy":
        return batch
    samples = batch.samples
    worth = [credit.value for sample in samples for credit in sample.credits]
    if not np.isfinite(worth).all():
        raise ValueError(f"rewards must be finite numbers, not {worth}; leave out samples without a reward")
    costs = [np.zeros(np.count_nonzero(sample.loss_mask)) for sample in samples]
    if algo.kl_in == "reward" and batch.reference_log_probs is not None:
        assert batch.old_log_probs is not None
        log_ratios = [old - ref for old, ref in zip(batch.old_log_probs, batch.reference_log_probs, strict=True)]
        costs = [algo.kl_coef * kl_estimate(row, algo.kl) for row in _trained(samples, log_ratios)]
    if algo.advantage in GROUPED:
        return replace(batch, advantages=_placed(samples, _compared(samples, costs, algo.advantage)))
    if algo.advantage == "reinforce++":
        raw = [returns_to_go(*pair) for pair in zip(samples, costs, strict=True)]
        return replace(batch, advantages=_placed(samples, whitened(raw)))
    assert batch.values is not None
    expected = _trained(samples, batch.values)
    rewards = [_credited(sample, slice(-1, None)) - cost for sample, cost in zip(samples, costs, strict=True)]
    raw = [gae(r, v, algo.gamma, algo.gae_lambda) for r, v in zip(rewards, expected, strict=True)]
    returns = [a + v for a, v in zip(raw, expected, strict=True)]
    return replace(batch, advantages=_placed(samples, whitened(raw)), returns=_placed(samples, returns))


def grpo(values: np.ndarray, peers: Sequence[str], scale: Sequence[str]) -> np.ndarray:
    """(v - mean(peers)) / (std(same scale) + 1e-6) for C credits, float64 [C]; exactly 0 where the peers are equal.

    Outcome supervision of GRPO, with the population standard deviation (Shao et al. 2024, DeepSeekMath,
    arXiv:2402.03300, section 4.1.2). There peers and scale are both the group.
    """
    return dr_grpo(values, peers) / (_over(scale, np.std, values) + EPSILON)


def dr_grpo(values: np.ndarray, peers: Sequence[str]) -> np.ndarray:
    """v - mean(peers) for C credits, float64 [C]; exactly 0 where the peers are equal.

    Liu et al. 2025, Understanding R1-Zero-Like Training, arXiv:2503.20783, section 3.2.
    """
    # The mean of equal floats may differ from them in the last bit.
    return np.where(_over(peers, np.ptp, values) == 0, 0.0, values - _over(peers, np.mean, values))


def rloo(values: np.ndarray, peers: Sequence[str]) -> np.ndarray:
    """v - mean(the other peers) for C credits, float64 [C]; 0 where there is no other.

    REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740, section 3). Of n peers the mean of the others is
    (n mean - v) / (n - 1), so this is n / (n - 1) (v - mean).
    """
    n = _over(peers, len, values)
    return dr_grpo(values, peers) * n / np.maximum(n - 1, 1)


def gdpo(values: np.ndarray) -> np.ndarray:
    """(v - mean) / (std + 1e-6) over the C credits of a batch, float64 [C]; exactly 0 where all are equal.

    Of `decoupled` values; GDPO's normalisation of the batch (Liu et al. 2026, arXiv:2601.05242).
    """
    equal = bool(np.ptp(values) == 0)
    return np.zeros_like(values) if equal else (values - values.mean()) / (values.std() + EPSILON)


def decoupled(parts_C: Sequence[Mapping[str, float]], weights: Mapping[str, float]) -> np.ndarray:
    """sum_m |w_m| (p_m - mean(p_m)) / (std(p_m) + 1e-6) for the parts p_m = w_m s_m of C rewards of one group, float64
    [C]: each metric normalised before the sum; one whose parts are equal gives exactly 0.

    Group reward-decoupled normalisation of GDPO (Liu et al. 2026, arXiv:2601.05242), with the population's standard
    deviation. In a sum that is normalised as a whole, as by `grpo`, the metric that spreads most hides the others.
    """
    group = [""] * len(parts_C)
    columns = ((weight, np.array([parts[name] for parts in parts_C])) for name, weight in weights.items())
    return np.sum([abs(weight) * grpo(parts, group, group) for weight, parts in columns], axis=0)


def returns_to_go(sample: Sample, costs: np.ndarray) -> np.ndarray:
    """A_t = r - sum_{k >= t} cost_k, float64 [T], for the T trained tokens of a sample and their costs.

    REINFORCE++ before its normalisation, cost_k = beta KL_k (Hu et al. 2025, arXiv:2501.03262). r is the value of
    the token's credit: the paper has one reward a sequence; of several credits each is a return already, so they are
    not added up. The costs run on to the end of the sample.
    """
    return _credited(sample, slice(None)) - costs[::-1].cumsum()[::-1]


def gae(rewards: np.ndarray, values: np.ndarray, gamma: float, gae_lambda: float) -> np.ndarray:
    """Generalised advantage estimates, float64 [T], from rewards and values [T] of a sequence's trained tokens.

    A_t = d_t + gamma lambda A_{t+1}, d_t = r_t + gamma V_{t+1} - V_t, with V and A 0 after the last token (Schulman
    et al. 2015, arXiv:1506.02438, equation 16). A trained token is a step, even if other messages precede it.
    """
    deltas = rewards + gamma * np.append(values[1:], 0.0) - values
    backwards = accumulate(deltas[::-1].tolist(), lambda following, delta: delta + gamma * gae_lambda * following)
    return np.array([*backwards], np.float64)[::-1]


def whitened(rows: Sequence[np.ndarray]) -> list[np.ndarray]:
    """(A - mean) / (std + 1e-6) over all rows, float64, of the trained tokens of a batch; exactly 0 if all are equal.

    The global normalisation of REINFORCE++ (arXiv:2501.03262) and, once the critic's returns are made, of GAE in PPO
    on language models (as in the code of Ziegler et al. 2019, arXiv:1909.08593).
    """
    advantages = np.concatenate(rows)
    equal = bool(np.ptp(advantages) == 0)
    scaled = np.zeros_like(advantages) if equal else (advantages - advantages.mean()) / (advantages.std() + EPSILON)
    return np.split(scaled, np.cumsum([len(row) for row in rows])[:-1])


def kl_estimate(log_ratio: np.ndarray, estimate: str) -> np.ndarray:
    """k1, k2 or k3 of KL(pi || ref) from log pi - log ref (Schulman 2020, joschu.net/blog/kl-approx.html).

    k3 goes on as its tangent where the reference is far more likely, as in trainer.losses.kl.
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

    `masks` are 1 where a token is trained, and those of the whole mini-batch, so the loss does not depend on how the
    sequences are packed, spread or cut. Weights are 0 where nothing is trained.

    token     1 / T, T the trained tokens of all sequences (DAPO, arXiv:2503.14476, equation 8)
    sequence  1 / (B T_i), T_i the trained tokens of sequence i, B the sequences that have any (GRPO,
              arXiv:2402.03300, equation 3)
    constant  1 / (B L), L the tokens of the `longest` reply that may be sampled (Dr. GRPO, arXiv:2503.20783,
              section 3.1)

    Where some sequences are of `later` turns, the mean over them and that over the others are taken apart and added
    with weights that are as `later_weight` to 1: there are several later turns for each trained one, among which the
    multiturn-aware reward would be lost.

    ValueError where no token is trained.
    """
    tokens = np.array([mask.sum(dtype=np.float64) for mask in masks])
    if not tokens.any():
        raise ValueError("a mini-batch has no trained token; lower algo.mini_batches or look at the loss masks")
    of_later = np.asarray(later, bool) if len(later) else np.zeros(len(masks), bool)
    kinds = [((tokens > 0) & ~of_later, 1.0), ((tokens > 0) & of_later, later_weight)]
    kinds = [(kind, weight) for kind, weight in kinds if kind.any()]
    whole = sum(weight for _, weight in kinds)
    shares = np.zeros(len(masks))
    for kind, weight in kinds:
        count = np.count_nonzero(kind)
        divisors = {"token": tokens[kind].sum(), "sequence": count * tokens[kind], "constant": count * longest}
        shares[kind] = weight / whole / divisors[average]
    return [(mask * share).astype(np.float32) for mask, share in zip(masks, shares, strict=True)]


def _compared(samples: Sequence[Sample], costs: Sequence[np.ndarray], advantage: str) -> list[np.ndarray]:
    """Each credit, less the costs from its first token on, compared with its peers, at its tokens."""
    rows = [np.zeros_like(cost) for cost in costs]
    owned = [
        (credit, _tokens(sample, credit), cost, row)
        for sample, cost, row in zip(samples, costs, rows, strict=True)
        for credit in sample.credits
    ]
    values = np.array([credit.value - (cost[own[0] :].sum() if own.size else 0.0) for credit, own, cost, _ in owned])
    peers = [credit.peers for credit, *_ in owned]
    if advantage == "grpo":
        found = grpo(values, peers, [credit.scale for credit, *_ in owned])
    elif advantage == "gdpo":
        found = gdpo(values)
    else:
        found = (rloo if advantage == "rloo" else dr_grpo)(values, peers)
    for (_, own, _, row), value in zip(owned, found, strict=True):
        row[own] = value
    return rows


def _credited(sample: Sample, part: slice) -> np.ndarray:
    """The value of each credit at this part of its tokens, float64, 0 at other trained tokens."""
    values = np.zeros(np.count_nonzero(sample.loss_mask))
    for credit in sample.credits:
        values[_tokens(sample, credit)[part]] = credit.value
    return values


def _tokens(sample: Sample, credit: Credit) -> np.ndarray:
    """Where the credit's tokens stand among the trained tokens of its sample, int64, in order."""
    own: np.ndarray = np.zeros(len(sample.loss_mask), bool)
    for start, stop in credit.spans:
        own[start:stop] = True
    return np.flatnonzero(own[sample.loss_mask > 0])


def _over(labels: Sequence[str], statistic: Callable[[np.ndarray], float], values: np.ndarray) -> np.ndarray:
    """At each value: `statistic` of all values with its label."""
    names, index = np.unique(np.array(labels), return_inverse=True)
    return np.array([statistic(values[index == name]) for name in range(len(names))])[index]


def _trained(samples: Sequence[Sample], rows: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The trained tokens of rows [S], float64."""
    return [row[sample.loss_mask > 0].astype(np.float64) for sample, row in zip(samples, rows, strict=True)]


def _placed(samples: Sequence[Sample], rows: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Rows of the trained tokens, float32 [S] each, 0 elsewhere."""
    placed = [np.zeros_like(sample.loss_mask) for sample in samples]
    for sample, whole, row in zip(samples, placed, rows, strict=True):
        whole[sample.loss_mask > 0] = row
    return placed
