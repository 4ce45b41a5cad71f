"""Losses of pairs: how much more the policy prefers the chosen reply to the rejected one than the reference does.

For a reply y to x, r(y) = log pi(y | x) - log ref(y | x), summed over its trained tokens; logarithms are natural. A
pair is two consecutive samples of a micro-batch, the chosen one first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from torch import Tensor

from megatron_collab import statistics
from megatron_collab.settings import DpoConfig
from megatron_collab.trainer.losses import Head, Objective, Report, report
from megatron_collab.trainer.microbatches import MicroBatch

# Metrics reported as means over pairs. A reward is beta r, DPO's implicit reward.
PAIR_METRICS = ["accuracy", "margin", "reward_chosen", "reward_rejected", "log_prob_chosen", "log_prob_rejected"]


class PairTerms(NamedTuple):
    """Terms of P pairs, [P] each: the loss, and the rewards beta r of both replies as used in the loss."""

    loss: Tensor
    chosen: Tensor
    rejected: Tensor


def pair_terms(log_ratios: Tensor, tokens: Tensor, dpo: DpoConfig, rewards: Tensor | None = None) -> PairTerms:
    """The loss algo.dpo.loss of P pairs; `log_ratios`: r of their replies [2 P]; `tokens`: numbers of trained tokens.

    `rewards`: of the replies [2 P], for refuel.

    With the margin m = beta (r(chosen) - r(rejected)) and e = algo.dpo.label_smoothing:

    sigmoid       -(1 - e) log sigmoid(m) - e log sigmoid(-m): DPO (Rafailov et al. 2023, arXiv:2305.18290, equation
                  7); e > 0 is conservative DPO, where labels are wrong with this probability (Mitchell 2023,
                  ericmitchell.ai/cdpo.pdf)
    sigmoid_norm  the same, r divided by the number of tokens: length-normalized DPO (Lambert et al. 2024, Tulu 3,
                  arXiv:2411.15124, section 5), which needs a larger beta (5 in the paper)
    ipo           (r(chosen) - r(rejected) - 1 / (2 beta))^2, beta the paper's tau, r divided by the number of tokens:
                  IPO (Azar et al. 2023, arXiv:2310.12036, equation 17). The mean over tokens is not in the paper; TRL
                  uses it too, on advice of its authors.
    refuel        (m - (R(chosen) - R(rejected)))^2, beta = 1 / eta: the relative reward of two replies to a prompt is
                  regressed on their relative log-ratio to the policy that sampled them (REFUEL, Gao et al. 2024,
                  arXiv:2410.04612). R is the reward of the reply's futures: with one future the paper's.
    """
    if dpo.loss in ("sigmoid_norm", "ipo"):
        log_ratios = log_ratios / tokens
    chosen, rejected = log_ratios.view(len(log_ratios) // 2, 2).unbind(1)
    margin = dpo.beta * (chosen - rejected)
    if dpo.loss == "ipo":
        loss = (chosen - rejected - 1.0 / (2.0 * dpo.beta)).square()
    elif dpo.loss == "refuel":
        assert rewards is not None
        loss = (margin - (rewards[::2] - rewards[1::2])).square()
    else:
        loss = -F.logsigmoid(margin) * (1.0 - dpo.label_smoothing)
        if dpo.label_smoothing:
            loss = loss - F.logsigmoid(-margin) * dpo.label_smoothing
    return PairTerms(loss, dpo.beta * chosen, dpo.beta * rejected)


def preference_objective(head: Head, dpo: DpoConfig) -> Objective:
    """The loss of the pairs of a micro-batch, each weighted by the sum of its tokens' weights.

    Columns of the micro-batch: weights, reference_log_probs; for refuel also advantages, which hold the rewards. Sums
    are float64. If context parallel ranks share the tokens of a sequence, each computes the full loss, takes the
    gradient of its local tokens and reports its share.
    """

    def objective(micro_batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Report]:
        columns, sequences = micro_batch.columns, micro_batch.samples
        log_probs, _ = head(micro_batch, hidden)
        per_token = torch.stack(
            [
                log_probs - columns["reference_log_probs"],
                log_probs.detach(),
                columns["weights"],
                torch.ones_like(log_probs),
                columns.get("advantages", torch.zeros_like(log_probs)),
            ]
        ).double()
        sums = per_token.new_zeros(5, sequences).index_add(1, micro_batch.sequence, per_token)
        log_ratios, log_probs, weights, tokens, rewards = _over_context(sums)
        terms = pair_terms(log_ratios, tokens, dpo, rewards.detach() / tokens.detach())
        chosen, rejected = log_probs.detach().view(sequences // 2, 2).unbind(1)
        margin = terms.chosen - terms.rejected
        metrics = [(margin > 0).double(), margin, terms.chosen, terms.rejected, chosen, rejected]
        total = (terms.loss * weights.detach().view(sequences // 2, 2).sum(1)).sum()
        share = 1.0 / parallel_state.get_context_parallel_world_size()
        shares = {name: values * share for name, values in zip(pair_metric_names(), metrics, strict=True)}
        return total.float(), report(total * share, shares, {})

    return objective


def pair_metric_names() -> list[str]:
    """Names of the sums that preference_objective reports."""
    return [f"dpo/{name}" for name in PAIR_METRICS]


def _over_context(sums: Tensor) -> Tensor:
    """Sum [·, sequences] over the context parallel ranks; the gradient is that of the local tokens only."""
    if parallel_state.get_context_parallel_world_size() == 1:
        return sums
    total = sums.detach().clone()
    dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
    return sums + (total - sums.detach())


def validation_metrics(
    masks: Sequence[np.ndarray], log_probs: Sequence[np.ndarray], reference: Sequence[np.ndarray], dpo: DpoConfig
) -> dict[str, float]:
    """Loss, accuracy and margin of pairs as metrics of a set, with intervals over the pairs.

    The rows are [S], two per pair, 0 for tokens that are not trained.
    """
    rows = zip(log_probs, reference, strict=True)
    ratios = torch.tensor([float((row - ref).sum(dtype=np.float64)) for row, ref in rows], dtype=torch.float64)
    tokens = torch.tensor([float(mask.sum()) for mask in masks], dtype=torch.float64)
    terms = pair_terms(ratios, tokens, dpo)
    margin = terms.chosen - terms.rejected
    metrics = {"loss": terms.loss, "accuracy": (margin > 0).double(), "margin": margin}
    scores: dict[str, float] = {}
    for name, values in metrics.items():
        scores |= statistics.mean(values[:, None].tolist()).metrics("score", name)
    return {"tasks": len(margin), "tokens": float(tokens.sum()), **scores}
