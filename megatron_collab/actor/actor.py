"""The trainer of the policy: a batch in, one or more optimizer steps, metrics out.

Every rank calls with the same batch and takes its data parallel share. Losses are means over the trained
tokens of the whole (mini-)batch, whatever the layout and the micro-batches: a rank's sums are divided by the
global number of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_collab.actor import packing
from megatron_collab.actor.logprob import entropy, token_log_probs
from megatron_collab.actor.loss import kl_k3, policy_loss, sft_loss
from megatron_collab.actor.model import unwrap
from megatron_collab.actor.optimizer import build_optimizer, learning_rate
from megatron_collab.config import Config
from megatron_collab.types import Batch, Sample

# What a micro-batch reports of its trained tokens: sums, of which means are made, and maxima.
Report = tuple[dict[str, Tensor], dict[str, Tensor]]


@dataclass(frozen=True)
class Share:
    """This rank's micro-batches of some samples: tensors by name, each [rows, width]."""

    plan: packing.Plan
    micro_batches: list[dict[str, Tensor]]
    tokens: float


class Actor:
    """Trains `model` (this rank's part of the policy) in config.train.stage.

    `reference` is the frozen first policy, needed where algo.kl_coef > 0 in rl. `step` counts the updates.
    """

    def __init__(self, config: Config, model: torch.nn.Module, reference: torch.nn.Module | None = None) -> None:
        self.config = config
        self.policy = model
        self.reference = reference
        self.supervised = config.train.stage == "sft"
        self.temperature = 1.0 if self.supervised else config.rollout.turn.temperature
        self.vocab_size = unwrap(model).shape.vocab
        self.device = next(model.parameters()).device
        self.step = 0
        sums = ["loss"] if self.supervised else ["loss", "entropy", "ratio_mean", "clip_fraction", "mismatch/k3"]
        self._sums = [*sums, "kl"] if reference and not self.supervised else sums
        self._maxima = [] if self.supervised else ["ratio_max_deviation", "mismatch/max_abs"]

        megatron = get_model_config(model)
        options = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        self.model = DistributedDataParallel(megatron, options, model)
        self.optimizer = build_optimizer(config, self.model)
        megatron.finalize_model_grads_func = finalize_model_grads
        megatron.grad_scale_func = self.optimizer.scale_loss

    def update(self, batch: Batch) -> dict[str, float]:
        """Learn from `batch` in algo.mini_batches optimizer steps; the metrics are the same on every rank.

        Old log-probs are the policy's own from before the update; the engine's are compared with them in
        mismatch/max_abs and mismatch/k3 (KL from the engine's distribution to the policy's). ValueError where
        nothing is trained, FloatingPointError where the gradient is not finite.
        """
        lr = learning_rate(self.config.optim, self.config.train.steps, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        shares = [self._share(samples) for samples in _split(batch.samples, self.config.algo.mini_batches)]
        if not self.supervised:
            for share in shares:
                if len(shares) > 1:
                    self._add_log_probs("old_log_probs", self.model, share)
                if self.reference is not None:
                    self._add_log_probs("reference_log_probs", self.reference, share)
        reports: list[Report] = []
        norms = []
        for share in shares:
            report, norm = self._optimizer_step(share)
            reports += report
            norms.append(norm)
        self.step += 1
        tokens = sum(share.tokens for share in shares)
        return {**self._reduced(reports, tokens), "grad_norm": float(np.mean(norms)), "lr": lr, "tokens": tokens}

    def log_probs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """The policy's log-probability of every token, float32 [S] for each sample, on every rank; collective.

        The first token of a sample has no prediction: 0.
        """
        share = self._share(samples)
        rows = torch.zeros(len(samples), share.plan.width + 1, device=self.device)
        found = self._collect_log_probs(self.model, share)
        if parallel_state.get_tensor_model_parallel_rank() == 0:
            for micro_batch, log_probs in zip(self._indices(share.plan), found, strict=False):
                rows[list(micro_batch), 1:] = log_probs[: len(micro_batch)]
        dist.all_reduce(rows)
        return [row[: len(sample.token_ids)] for row, sample in zip(rows.cpu().numpy(), samples, strict=True)]

    def _share(self, samples: Sequence[Sample]) -> Share:
        parallel = self.config.parallel
        plan = packing.plan(
            [packing.positions(sample) for sample in samples],
            parallel_state.get_data_parallel_world_size(),
            self.config.train.tokens_per_micro_batch,
            multiple=parallel.tp if parallel.sequence_parallel else 1,
        )
        collated = [packing.collate(samples, indices, (plan.rows, plan.width)) for indices in self._indices(plan)]
        tensors = [
            {name: torch.from_numpy(array).to(self.device) for name, array in arrays.items()} for arrays in collated
        ]
        return Share(plan, tensors, Batch(tuple(samples)).loss_tokens)

    def _indices(self, plan: packing.Plan) -> tuple[packing.MicroBatch, ...]:
        return plan.ranks[parallel_state.get_data_parallel_rank()]

    def _optimizer_step(self, share: Share) -> tuple[list[Report], float]:
        """One step on a mini-batch: its reports (on the last pipeline stage) and the norm of its gradient."""
        if share.tokens == 0:
            raise ValueError("a mini-batch has no trained token; lower algo.mini_batches or look at the loss masks")
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        # The schedule divides by the micro-batches and the gradients are averaged over the data parallel
        # ranks; undone here, what is left is the sum over the tokens, divided by their global number.
        undone = len(share.micro_batches) * parallel_state.get_data_parallel_world_size()
        loss = partial(self._supervised_loss if self.supervised else self._policy_loss, undone / share.tokens)
        reports = self._run(self.model, share, loss)
        _, norm, _ = self.optimizer.step()
        if not math.isfinite(norm):
            raise FloatingPointError(f"step {self.step}: the gradient norm is {norm}; lower optim.lr")
        return reports, float(norm)

    def _policy_loss(self, scale: float, micro_batch: Mapping[str, Tensor], logits: Tensor) -> tuple[Tensor, Report]:
        algo, mask = self.config.algo, micro_batch["loss_mask"]
        trained = mask > 0
        spread = entropy(logits, self.temperature, self.vocab_size)
        log_probs = token_log_probs(logits, micro_batch["labels"], self.temperature, self.vocab_size)
        # Outside the trained tokens all log-probs are made equal, so that no term there can overflow.
        log_probs = log_probs.where(trained, 0.0)
        old = micro_batch.get("old_log_probs", log_probs.detach()).where(trained, 0.0)
        terms = policy_loss(log_probs, old, micro_batch["advantages"], algo.clip_low, algo.clip_high)
        loss = terms.loss
        sums = {"entropy": spread, "ratio_mean": terms.ratio, "clip_fraction": terms.clipped}
        if "reference_log_probs" in micro_batch:
            kl = kl_k3(log_probs, micro_batch["reference_log_probs"].where(trained, 0.0))
            loss = loss + algo.kl_coef * kl
            sums["kl"] = kl
        engine = micro_batch["log_probs"].where(trained, 0.0)
        sums["mismatch/k3"] = kl_k3(engine, old)
        maxima = {"ratio_max_deviation": (terms.ratio - 1.0).abs() * mask, "mismatch/max_abs": (engine - old).abs()}
        return self._reported(scale, mask, loss, sums, maxima)

    def _supervised_loss(
        self, scale: float, micro_batch: Mapping[str, Tensor], logits: Tensor
    ) -> tuple[Tensor, Report]:
        log_probs = token_log_probs(logits, micro_batch["labels"], self.temperature, self.vocab_size)
        return self._reported(scale, micro_batch["loss_mask"], sft_loss(log_probs), {}, {})

    def _reported(
        self, scale: float, mask: Tensor, loss: Tensor, sums: dict[str, Tensor], maxima: dict[str, Tensor]
    ) -> tuple[Tensor, Report]:
        """The scaled loss of a micro-batch and what it reports; all arguments but `scale` are [b, s]."""
        total = (loss * mask).sum()
        summed = {name: (value.detach() * mask).sum() for name, value in sums.items()}
        largest = {name: value.detach().max() for name, value in maxima.items()}
        # The schedule divides the loss in place, hence a tensor of its own.
        return total * scale, ({"loss": total.detach(), **summed}, largest)

    def _add_log_probs(self, name: str, model: torch.nn.Module, share: Share) -> None:
        # The list is empty on all pipeline stages but the last, which alone computes a loss.
        found = self._collect_log_probs(model, share)
        for micro_batch, log_probs in zip(share.micro_batches, found, strict=False):
            micro_batch[name] = log_probs

    @torch.no_grad()
    def _collect_log_probs(self, model: torch.nn.Module, share: Share) -> list[Tensor]:
        """Log-probs [rows, width] of the labels of each micro-batch; nothing but on the last pipeline stage."""

        def collect(micro_batch: Mapping[str, Tensor], logits: Tensor, non_loss_data: bool) -> Tensor:
            return token_log_probs(logits, micro_batch["labels"], self.temperature, self.vocab_size)

        return self._run(model, share, collect, forward_only=True, collect_non_loss_data=True)

    def _run(self, model: torch.nn.Module, share: Share, loss: Callable[..., Any], **options: bool) -> list[Any]:
        """Megatron's schedule for this pipeline; what `loss` reports of each micro-batch."""

        def forward(
            micro_batches: Iterator[dict[str, Tensor]], model: torch.nn.Module
        ) -> tuple[Tensor, Callable[..., Any]]:
            micro_batch = next(micro_batches)
            return model(micro_batch["token_ids"], micro_batch["position_ids"], None), partial(loss, micro_batch)

        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(share.micro_batches),
            model=model,
            num_microbatches=len(share.micro_batches),
            seq_length=share.plan.width,
            micro_batch_size=share.plan.rows,
            **{"forward_only": False, **options},
        )

    def _reduced(self, reports: Sequence[Report], tokens: float) -> dict[str, float]:
        """Means over the trained tokens of the batch, and maxima, over all ranks."""
        sums = torch.zeros(len(self._sums), device=self.device)
        maxima = torch.zeros(len(self._maxima), device=self.device)
        if parallel_state.get_tensor_model_parallel_rank() == 0:  # its peers report the same tokens
            for summed, largest in reports:
                sums += torch.stack([summed[name] for name in self._sums])
                if self._maxima:
                    maxima = maxima.maximum(torch.stack([largest[name] for name in self._maxima]))
        dist.all_reduce(sums)
        if self._maxima:
            dist.all_reduce(maxima, dist.ReduceOp.MAX)
        means = (sums / tokens).tolist()
        return dict(zip([*self._sums, *self._maxima], [*means, *maxima.tolist()], strict=True))


def _split(samples: Sequence[Sample], parts: int) -> list[Sequence[Sample]]:
    """`samples` in order, cut into at most `parts` pieces of nearly the same size."""
    bounds = np.linspace(0, len(samples), min(parts, len(samples)) + 1).round().astype(int).tolist()
    return [samples[start:end] for start, end in pairwise(bounds)]
