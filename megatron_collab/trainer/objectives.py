"""The part of the loss that a micro-batch contributes, from its hidden states, and its reported statistics."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron_collab.algo.policy_loss import PolicyLossFunction
from megatron_collab.checkpoint.hf import unwrap
from megatron_collab.config import AlgoConfig
from megatron_collab.trainer import losses
from megatron_collab.trainer.logprobs import head_log_probs
from megatron_collab.trainer.microbatches import MicroBatch

# What a micro-batch reports: its part of the loss, sums over its trained tokens, and maxima.
Report = tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]


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

    def log_probs(self, micro_batch: MicroBatch, hidden: Tensor) -> Tensor:
        return self(micro_batch, hidden)[0]


@dataclass(frozen=True)
class SupervisedObjective:
    """Negative log-likelihood of the trained tokens."""

    head: Head

    def __call__(self, micro_batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Report]:
        log_probs, _ = self.head(micro_batch, hidden)
        total = (losses.sft_loss(log_probs) * micro_batch.columns["weights"]).sum()
        return total, (total.detach().clone(), {}, {})


@dataclass(frozen=True)
class PolicyObjective:
    """The policy loss with its correction, KL and entropy, weighted by token.

    Columns of the micro-batch: weights, advantages, log_probs (the engine's); old_log_probs where they are not those
    of this very forward pass; reference_log_probs where there is a reference.
    """

    head: Head
    algo: AlgoConfig

    @cached_property
    def _loss(self) -> PolicyLossFunction:
        return losses.policy_loss(self.algo)

    def __call__(self, micro_batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Report]:
        algo, columns = self.algo, micro_batch.columns
        log_probs, entropy = self.head(micro_batch, hidden)
        old = columns.get("old_log_probs", log_probs.detach())
        engine = columns["log_probs"]
        terms = self._loss(log_probs, old, columns["advantages"], micro_batch.sequence, micro_batch.samples)
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


def _report(total: Tensor, sums: dict[str, Tensor], maxima: dict[str, Tensor]) -> Report:
    # The schedule divides the loss in place, hence a tensor of its own.
    return (
        total.detach().clone(),
        {name: value.detach().sum() for name, value in sums.items()},
        {name: torch.cat([value.detach(), value.new_zeros(1)]).max() for name, value in maxima.items()},
    )


def names(algo: AlgoConfig, supervised: bool, reference: bool) -> tuple[list[str], list[str]]:
    """Names of the sums and of the maxima in a report; the same on ranks that have no report."""
    if supervised:
        return [], []
    sums = ["entropy", "ratio_mean", "clip_fraction", "mismatch/k3"]
    sums += ["correction/weight", "correction/masked"] if algo.correction != "none" else []
    return sums + (["kl"] if reference else []), ["ratio_max_deviation", "mismatch/max_abs"]
