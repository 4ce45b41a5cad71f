"""The part of the loss that a micro-batch contributes, from its hidden states, and its reported statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_collab.checkpoint.hf import unwrap
from megatron_collab.config import AlgoConfig
from megatron_collab.trainer import losses
from megatron_collab.trainer.logprobs import head_log_probs
from megatron_collab.trainer.microbatches import MicroBatch

# What a micro-batch reports: its part of the loss, sums over its trained tokens, and maxima.
Report = tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]
Objective = Callable[[MicroBatch, Tensor], tuple[Tensor, Report]]


@dataclass(frozen=True)
class Head:
    """The output layer of a network at a temperature; called on the last pipeline stage only."""

    network: torch.nn.Module
    vocab_size: int
    temperature: float

    def __call__(self, micro_batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs of the labels and entropy, float32 [N], at the asked positions of `hidden` [1, T, h]."""
        asked = hidden[0].index_select(0, micro_batch.positions)
        weight = unwrap(self.network).head
        return head_log_probs(asked, weight, micro_batch.labels, self.temperature, self.vocab_size)


def supervised_objective(head: Head) -> Objective:
    """Negative log-likelihood of the trained tokens."""

    def objective(micro_batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Report]:
        log_probs, _ = head(micro_batch, hidden)
        total = (-log_probs * micro_batch.columns["weights"]).sum()
        return total, _report(total, {}, {})

    return objective


def policy_objective(head: Head, algo: AlgoConfig) -> Objective:
    """The policy loss with its correction, KL and entropy, weighted by token.

    Columns of the micro-batch: weights, advantages, log_probs (the engine's); old_log_probs where they are not those
    of this very forward pass; reference_log_probs where there is a reference.
    """
    policy_loss = losses.policy_loss(algo)

    def objective(micro_batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Report]:
        columns = micro_batch.columns
        log_probs, entropy = head(micro_batch, hidden)
        old = columns.get("old_log_probs", log_probs.detach())
        engine = columns["log_probs"]
        terms = policy_loss(log_probs, old, columns["advantages"], micro_batch.sequence, micro_batch.samples)
        loss = terms.loss
        sums = {"entropy": entropy, "ratio_mean": terms.ratio, "clip_fraction": terms.clipped}
        if algo.correction != "none":
            weights = losses.importance_weights(old, engine, algo)
            loss = loss * weights
            sums |= {"correction/weight": weights, "correction/masked": (weights == 0).to(weights.dtype)}
        if "reference_log_probs" in columns:
            kl = losses.kl(log_probs, columns["reference_log_probs"], algo.kl)
            sums["kl"] = kl
            if algo.kl_in == "loss":
                loss = loss + algo.kl_coef * kl
        if algo.entropy_coef:
            loss = loss - algo.entropy_coef * entropy
        sums["mismatch/k3"] = losses.kl(engine, old, "k3")
        maxima = {"ratio_max_deviation": (terms.ratio - 1.0).abs(), "mismatch/max_abs": (engine - old).abs()}
        total = (loss * columns["weights"]).sum()
        return total, _report(total, sums, maxima)

    return objective


def _report(total: Tensor, sums: dict[str, Tensor], maxima: dict[str, Tensor]) -> Report:
    return (
        total.detach().clone(),  # the schedule divides the loss in place
        {name: value.detach().sum() for name, value in sums.items()},
        {name: torch.cat([value.detach(), value.new_zeros(1)]).max() for name, value in maxima.items()},
    )


def reported(algo: AlgoConfig, reference: bool) -> tuple[list[str], list[str]]:
    """Names of the sums and of the maxima that policy_objective reports, for ranks that have no report."""
    sums = ["entropy", "ratio_mean", "clip_fraction", "mismatch/k3"]
    sums += ["correction/weight", "correction/masked"] if algo.correction != "none" else []
    return sums + (["kl"] if reference else []), ["ratio_max_deviation", "mismatch/max_abs"]
