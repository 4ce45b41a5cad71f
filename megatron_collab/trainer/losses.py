"""Losses per trained token, and the loss of a micro-batch with its statistics.

Tensors without a stated shape are float [N], N the trained tokens of a micro-batch; log-probabilities are natural.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megatron_collab.algo.advantages import K3_TANGENT
from megatron_collab.algo.policy_loss import PolicyLoss, PolicyLossFunction, PolicyTerms
from megatron_collab.checkpoint.hf import unwrap
from megatron_collab.settings import AlgoConfig, make
from megatron_collab.trainer.logprobs import head_log_probs
from megatron_collab.trainer.microbatches import MicroBatch

# Report of a micro-batch: (its part of the loss, sums over its trained tokens, maxima).
Report = tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]
Head = Callable[[MicroBatch, Tensor], tuple[Tensor, Tensor]]  # apply_head for a network at a temperature
Divergence = Callable[[MicroBatch, Tensor], Tensor]  # reverse KL [N] of the policy's hidden states to a teacher
Objective = Callable[[MicroBatch, Tensor], tuple[Tensor, Report]]


def policy_loss(algo: AlgoConfig) -> PolicyLossFunction:
    """The policy loss named by algo.loss, with its clip. Raises ConfigError.

    Its arguments are those of PolicyLoss; every sequence is within one micro-batch.
    """
    clip = {"clip_low": algo.clip_low, "clip_high": algo.clip_high}
    if algo.loss == "ppo":
        return partial(_ppo, dual=algo.clip_dual or math.inf, **clip)
    if algo.loss in _LOSSES:
        return partial(_LOSSES[algo.loss], **clip)
    return make(algo.loss, "algo.loss", PolicyLoss, algo.loss_options, "algo.loss_options.")


def _ppo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *_: object, dual: float, **clip: float
) -> PolicyTerms:
    """PPO's clipped surrogate: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(log_probs - old).

    Schulman et al. 2017, arXiv:1707.06347, equation 7; two clip widths as in DAPO, arXiv:2503.14476, equation 8. If
    A < 0, r is unbounded: the loss is limited to -dual A (dual clip, Ye et al. 2020, arXiv:1912.09729, equation 5).
    """
    terms = _surrogate(_ratio(log_probs - old_log_probs), advantages, **clip)
    bound = torch.where(advantages < 0, -dual * advantages, math.inf)
    clipped = terms.clipped.where(terms.loss <= bound, 1.0)
    return PolicyTerms(terms.loss.minimum(bound), terms.ratio, clipped)


def _gspo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, sequence: Tensor, sequences: int, **clip: float
) -> PolicyTerms:
    """PPO's surrogate with one ratio s_i per sequence: -min(s_it A_t, clip(s_it, 1 - clip_low, 1 + clip_high) A_t).

    s_i = exp(mean over the trained tokens of log_probs - old), s_it = sg[s_i] exp(log_prob - sg[log_prob]): GSPO-token
    (Zheng et al. 2025, arXiv:2507.18071, section 4.3). If all tokens of a sequence have equal advantages and weights,
    value, clip and gradient equal those of the sequence form (equation 5), which is defined only then; turns with
    their own advantages keep them here. The paper's widths are 3e-4 and 4e-4.
    """
    log_ratio = (log_probs - old_log_probs).detach()
    ratio = _ratio(_over_sequences(log_ratio, sequence, sequences, mean=True))
    return _surrogate(ratio * (log_probs - log_probs.detach()).exp(), advantages, **clip)


def _cispo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *_: object, clip_low: float, clip_high: float
) -> PolicyTerms:
    """REINFORCE with a clipped weight: -sg[clip(r, 1 - clip_low, 1 + clip_high)] A log_prob, r = exp(log_probs - old).

    MiniMax-M1, arXiv:2506.13585, equations 4 and 5; clip_low=1 removes the lower bound, as in the paper. Every
    token keeps a gradient, with a bounded weight if `clipped` is 1.
    """
    ratio = _ratio((log_probs - old_log_probs).detach())
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return PolicyTerms(-weight * advantages * log_probs, ratio, (weight != ratio).to(ratio.dtype))


def _surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> PolicyTerms:
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    return PolicyTerms(unclipped.maximum(clipped), ratio.detach(), (clipped > unclipped).to(ratio.dtype))


_LOSSES: dict[str, Callable[..., PolicyTerms]] = {"gspo": _gspo, "cispo": _cispo}


def _ratio(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), with log_ratio clamped to [-20, 20] so that no token makes the loss infinite."""
    return log_ratio.clamp(-20.0, 20.0).exp()


def _over_sequences(values: Tensor, sequence: Tensor, sequences: int, *, mean: bool) -> Tensor:
    """For each token the sum or mean of `values` over the trained tokens of its sequence."""
    sums = torch.zeros(sequences, dtype=values.dtype, device=values.device).index_add(0, sequence, values)
    return (sums / sequence.bincount(minlength=sequences).clamp(min=1) if mean else sums)[sequence]


def importance_weights(
    old_log_probs: Tensor, engine_log_probs: Tensor, sequence: Tensor, sequences: int, algo: AlgoConfig
) -> Tensor:
    """Importance weight of each token in the policy loss, since the engine sampled, not the trainer; detached.

    With w = exp(old - engine) and the bounds of algo.correction_low and _high:

    truncated  min(w, high): TIS (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
               Training", fengyao.notion.site/off-policy-rl)
    masked     w within [low, high], else 0: IcePop (Ring-1T, arXiv:2510.18855)

    algo.correction_level sets the level of w: per token, or for all tokens of a sequence the product of their ratios
    (sequence) or its geometric mean (geometric), as in GSPO. The product is the exact weight; its variance grows with
    the length (Liu, Li et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the
    Training-Inference Mismatch", richardli.xyz/rl-collapse).

    The weight multiplies the token's term of any policy loss (in gspo with the ratio of its sequence), but not the KL
    to the reference. A masked token still counts in the denominator of the mean.
    """
    log_weights = (old_log_probs - engine_log_probs).detach()
    if algo.correction_level != "token":
        log_weights = _over_sequences(log_weights, sequence, sequences, mean=algo.correction_level == "geometric")
    weights = _ratio(log_weights)
    if algo.correction == "truncated":
        return weights.clamp(max=algo.correction_high)
    return weights.where((weights >= algo.correction_low) & (weights <= algo.correction_high), 0.0)


def kl(log_probs: Tensor, reference_log_probs: Tensor, estimate: str) -> Tensor:
    """An estimate of KL(policy || reference) from the policy's samples, for the loss; q = reference / policy.

    k1                -log q: unbiased
    k2                (log q)^2 / 2: biased, of little variance
    k3, low_var_kl    (q - 1) - log q: unbiased and never negative

    Schulman 2020, joschu.net/blog/kl-approx.html. On the policy's own samples the mean gradient of k2 is that of the
    KL of the next token; of k3 that of KL(reference || policy), equal near the reference; of k1 it is 0: k1 has no
    effect in the loss, it belongs in the reward (Tang and Munos 2025, arXiv:2506.09477). Above log q = 3, where a
    single token would dominate the batch, k3 continues as its tangent, which still pulls toward the reference.
    """
    if estimate == "k1":
        return log_probs - reference_log_probs
    if estimate == "k2":
        return (log_probs - reference_log_probs).square() / 2.0
    log_q = reference_log_probs - log_probs
    near = log_q.clamp(max=K3_TANGENT)
    return near.expm1() - near + math.expm1(K3_TANGENT) * (log_q - near)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Squared error of the critic, clipped to a step of `clip` from the old values; and 1.0 if it is clipped, else 0.0.

    max((V - R)^2, (old + clip(V - old, -clip, clip) - R)^2) / 2: PPO (arXiv:1707.06347, equation 9) with the clipped
    value of OpenAI's baselines (Huang et al. 2022, The 37 implementation details of PPO, detail 9).
    """
    unclipped = (values - returns).square() / 2.0
    clipped = (old_values + (values - old_values).clamp(-clip, clip) - returns).square() / 2.0
    return unclipped.maximum(clipped), (clipped > unclipped).to(values.dtype)


def apply_head(
    network: torch.nn.Module, temperature: float, vocab_size: int, micro_batch: MicroBatch, hidden: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probs of the labels and entropy, float32 [N], at the requested positions of `hidden` [1, T, h]."""
    states = hidden[0].index_select(0, micro_batch.positions)
    return head_log_probs(states, unwrap(network).head, micro_batch.labels, temperature, vocab_size)


def supervised_objective(head: Head) -> Objective:
    """Negative log-likelihood of the trained tokens."""

    def objective(micro_batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Report]:
        log_probs, _ = head(micro_batch, hidden)
        total = (-log_probs * micro_batch.columns["weights"]).sum()
        return total, report(total, {}, {})

    return objective


def policy_objective(head: Head, algo: AlgoConfig, divergence: Divergence | None = None) -> Objective:
    """The policy loss with its correction, teacher, KL and entropy, weighted by token.

    Columns of the micro-batch: weights, advantages, log_probs (the engine's); old_log_probs unless they are those of
    this forward pass; reference_log_probs if there is a reference; teacher_log_probs if a teacher gives those of the
    sampled tokens. `divergence`: from a teacher that gives its whole distribution.

    With a teacher of weight w, the policy loss counts 1 - w and the reverse KL to the teacher w. From the sampled
    tokens it is the estimate k2, whose gradient is that of a policy gradient with the advantage log teacher - log
    policy (see `kl`).
    """
    policy = policy_loss(algo)

    def objective(micro_batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Report]:
        columns = micro_batch.columns
        log_probs, entropy = head(micro_batch, hidden)
        old = columns.get("old_log_probs", log_probs.detach())
        engine = columns["log_probs"]
        terms = policy(log_probs, old, columns["advantages"], micro_batch.sequence, micro_batch.samples)
        loss = terms.loss
        sums = {"entropy": entropy, "ratio_mean": terms.ratio, "clip_fraction": terms.clipped}
        if algo.correction != "none":
            weights = importance_weights(old, engine, micro_batch.sequence, micro_batch.samples, algo)
            loss = loss * weights
            sums |= {"correction/weight": weights, "correction/masked": (weights == 0).to(weights.dtype)}
        if algo.teacher.weight:
            if divergence:
                term = sums["teacher/kl"] = divergence(micro_batch, hidden)
            else:
                sums["teacher/kl"] = kl(log_probs, columns["teacher_log_probs"], "k1")
                term = kl(log_probs, columns["teacher_log_probs"], "k2")
            loss = (1.0 - algo.teacher.weight) * loss + algo.teacher.weight * term
        if "reference_log_probs" in columns:
            sums["kl"] = kl(log_probs, columns["reference_log_probs"], algo.kl)
            if algo.kl_in == "loss":
                loss = loss + algo.kl_coef * sums["kl"]
        if algo.entropy_coef:
            loss = loss - algo.entropy_coef * entropy
        sums["mismatch/k3"] = kl(engine, old, "k3")
        maxima = {"ratio_max_deviation": (terms.ratio - 1.0).abs(), "mismatch/max_abs": (engine - old).abs()}
        total = (loss * columns["weights"]).sum()
        return total, report(total, sums, maxima)

    return objective


def report(total: Tensor, sums: dict[str, Tensor], maxima: dict[str, Tensor]) -> Report:
    """Report of a micro-batch, from its part of the loss and values per trained token or pair."""
    return (
        total.detach().clone(),  # the schedule divides the loss in place
        {name: value.detach().sum() for name, value in sums.items()},
        {name: torch.cat([value.detach(), value.new_zeros(1)]).max() for name, value in maxima.items()},
    )


def metric_names(algo: AlgoConfig, reference: bool) -> tuple[list[str], list[str]]:
    """(names of the sums, names of the maxima) that policy_objective reports; also for ranks without a report."""
    sums = ["entropy", "ratio_mean", "clip_fraction", "mismatch/k3"]
    sums += ["correction/weight", "correction/masked"] if algo.correction != "none" else []
    sums += ["teacher/kl"] if algo.teacher.weight else []
    return sums + (["kl"] if reference else []), ["ratio_max_deviation", "mismatch/max_abs"]
