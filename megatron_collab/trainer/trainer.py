"""The trainer of the policy: scores a batch, and learns from it in one or more optimizer steps.

Every rank calls it with the same batch and takes its data parallel share. The loss is a weighted sum over all trained
tokens of the (mini-)batch, so it depends neither on the layout nor on the micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from functools import partial
from itertools import product

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_collab import statistics
from megatron_collab.algo.advantages import advantage_class, token_weights
from megatron_collab.checkpoint.hf import unwrap
from megatron_collab.checkpoint.sharded_state import Checkpointable
from megatron_collab.data.datasets import SupervisedData
from megatron_collab.models.hf_to_megatron import ModelShape
from megatron_collab.runtime import device
from megatron_collab.runtime.process import beat
from megatron_collab.runtime.rank0 import meet
from megatron_collab.trainer.critic import Critic
from megatron_collab.trainer.kept_reference import KeptReference
from megatron_collab.trainer.losses import (
    Head,
    Report,
    apply_head,
    metric_names,
    policy_objective,
    supervised_objective,
)
from megatron_collab.trainer.megatron import lora, model, routing
from megatron_collab.trainer.megatron.pipeline import Communicator, PlannedCommunicator
from megatron_collab.trainer.microbatches import Columns, MicroBatch, Pack, Split, make_micro_batches, mini_batches
from megatron_collab.trainer.network import Frozen, Trainable, infer, learning_rate
from megatron_collab.trainer.preference import pair_metric_names, preference_objective, validation_metrics
from megatron_collab.trainer.spec import TrainerSpec
from megatron_collab.trainer.teacher import WholeDistribution, from_views, views
from megatron_collab.types import Batch, Sample, ScoredBatch


class PolicyTrainer:
    """Trains the policy of model.path; `chunks` are this rank's parts of it, `step` counts the updates.

    The reference of KL and DPO is the initial policy, or with algo.dpo.refresh a later one. `reference` is a frozen
    copy of it; there is none with adapters (model.lora), whose base model is the initial policy, nor if the reference's
    log-probs are stored (`keep_reference`). `critic` exists if algo.advantage needs one. `teacher`: the frozen network
    of a teacher with weights of its own. `distribution`: the teacher's in the loss, with algo.teacher.kl=full.
    """

    def __init__(
        self,
        spec: TrainerSpec,
        load: model.Load = model.load,
        split: Split = mini_batches,
        pack: Pack = make_micro_batches,
        communicator: Communicator = PlannedCommunicator,
    ) -> None:
        """Load the networks that `spec` needs; collective.

        `split` cuts a batch into mini-batches, of which `pack` makes this rank's micro-batches. `communicator`: of the
        pipeline's stages in an update.
        """
        self.spec, self._split, self._pack = spec, split, pack
        self.objective = spec.objective
        self.chunks = load(spec.network)
        if spec.train.stage == "rl" and spec.replay:
            routing.add(self.chunks)  # not in reference and critic, whose experts are different
        self.reference = model.frozen_copy(self.chunks) if spec.reference == "copy" else None
        self.teacher = model.frozen(load(spec.teacher)) if spec.teacher else None
        self._kept: KeptReference | None = None
        training = spec.optim, spec.network.parallel.offload
        critic = self.objective == "policy" and advantage_class(spec.algo.advantage).critic
        clip = spec.algo.critic_clip
        self.critic = Critic(load(spec.network), *training, clip, communicator) if critic else None
        self.policy = Trainable(self.chunks, *training, communicator)
        self.temperature = spec.turn.temperature if spec.train.stage == "rl" else 1.0
        self.device = next(self.chunks[0].parameters()).device
        self.step = 0
        # A reference may be there only to teach.
        self._refers = spec.reference is not None and (self.objective != "policy" or spec.algo.kl_coef > 0)
        head, distribution = self._head(self.chunks), None
        if spec.algo.teacher.full:
            distribution = WholeDistribution(
                spec.network, self.policy.chunks, self._teaching, self.temperature, spec.train.tokens_per_micro_batch
            )
        self.distribution = distribution
        divergence = distribution.divergence if distribution else None
        self._loss, self._sums, self._maxima = {
            "policy": lambda: (
                policy_objective(head, spec.algo, divergence),
                *metric_names(spec.algo, self._refers),
            ),
            "sft": lambda: (supervised_objective(head), [], []),
            "dpo": lambda: (preference_objective(head, spec.algo.dpo), pair_metric_names(), []),
        }[self.objective]()

    @property
    def shape(self) -> ModelShape:
        return unwrap(self.chunks[0]).shape

    @property
    def trainables(self) -> dict[str, Trainable]:
        """The networks that learn, by name."""
        return {"policy": self.policy} | ({"critic": self.critic} if self.critic else {})

    @property
    def checkpointed(self) -> dict[str, Checkpointable]:
        """The networks with state in a checkpoint, by name.

        The reference's weights are saved only with algo.dpo.refresh, since they cannot be rebuilt then; with delayed
        scaling its amax history is saved, on which the next scales depend.
        """
        moves = self.objective == "dpo" and self.spec.algo.dpo.refresh > 0
        return {**self.trainables, **({"reference": Frozen(self.reference, moves)} if self.reference else {})}

    @contextmanager
    def offloaded(self) -> Iterator[None]:
        """For sampling from the policy: offloads optimizer and gradients to host memory, if parallel.offload.

        Collective: colocated servers use the memory of every rank of their node, so all ranks must have released it.
        """
        with ExitStack() as stack:
            for trainable in self.trainables.values():
                stack.enter_context(trainable.offloaded())
            if self.spec.colocated:
                device.free_cache()
                meet()
            yield

    def score(self, batch: Batch) -> ScoredBatch:
        """Log-probs and values of every trained token before the update, equal on every rank; collective.

        Refreshes the reference if it is due by algo.dpo.refresh.

        Old log-probs are the policy's; they are computed separately only if the update's first forward pass does not
        provide them in time. Raises Preempted on every rank once rank 0 has received a preemption notice.
        """
        beat(f"the scoring of step {self.step}")
        algo, refers = self.spec.algo, self._refers
        old = values = None
        if self.objective == "policy" and (algo.mini_batches * algo.epochs > 1 or (refers and algo.kl_in == "reward")):
            old = self.log_probs(self.policy.chunks, batch)
        refresh = algo.dpo.refresh if self.objective == "dpo" else 0
        if self.reference is not None and refresh and self.step and self.step % refresh == 0:
            model.copy_weights(self.chunks, self.reference)
        reference = self.reference_log_probs(batch) if refers else None
        if self.critic:
            columns = _cut(_columns(batch, replay=False), batch.samples)
            values = _joined(self.critic.values(columns, self._micro_batches(columns)), batch.samples)
        teacher = self._teacher_log_probs(batch) if algo.teacher.weight and not algo.teacher.full else None
        return ScoredBatch(batch.samples, batch.metrics, old, reference, values, teacher_log_probs=teacher)

    def keep_reference(self, data: SupervisedData) -> None:
        """With algo.dpo.precompute in stage dpo, compute or load the reference's log-probs of all `data`; collective.

        Call it while the policy is the initial one: before a checkpoint is loaded or an update is made.
        """
        if self.spec.reference == "stored":
            self._kept = KeptReference(self.spec.run_dir, self.spec.network.model, data, self._base_log_probs)

    def reference_log_probs(self, batch: Batch) -> list[np.ndarray]:
        """Like `log_probs`, but of the reference; collective."""
        if self._kept:
            return self._kept.log_probs(batch)
        if self.reference is not None:
            return self.log_probs(self.reference, batch, replay=False)
        assert self.spec.network.model.lora.rank is not None
        return self._base_log_probs(batch)

    def _base_log_probs(self, batch: Batch) -> list[np.ndarray]:
        """Log-probs of the policy with its adapters, if any, disabled."""
        with lora.switched(self.chunks, active=False):
            return self.log_probs(self.policy.chunks, batch, replay=False)

    @contextmanager
    def _teaching(self) -> Iterator[Sequence[torch.nn.Module]]:
        """The chunks of the teacher. They may be the policy's, with its adapters off until the block ends."""
        first = self.spec.algo.teacher.place == "reference"
        if chunks := self.teacher or (self.reference if first else None):
            yield chunks
        else:
            with lora.switched(self.chunks, active=not first):
                yield self.policy.chunks

    def _teacher_log_probs(self, batch: Batch) -> list[np.ndarray]:
        """Like `log_probs`, but of the teacher; collective."""
        served = [sample.teacher_log_probs for sample in batch.samples]
        if self.spec.algo.teacher.place == "server":
            return [row for row in served if row is not None]
        with self._teaching() as chunks:
            return from_views(self.log_probs(chunks, views(batch), replay=False), batch.samples)

    def update(self, batch: Batch) -> dict[str, float]:
        """Learn from `batch` in algo.epochs times algo.mini_batches optimizer steps; metrics are equal on all ranks.

        Except in sft, `batch` is a ScoredBatch, for the policy loss with advantages. mismatch/max_abs and mismatch/k3
        (KL from the engine's distribution to the policy's) compare the engine's log-probs with the old ones.

        Raises ValueError if no token is trained, FloatingPointError if the gradient is not finite, and Preempted on
        every rank if rank 0 received a preemption notice before the first optimizer step; state is unchanged then.
        """
        beat(f"the update of step {self.step}")
        lr = learning_rate(self.spec.optim, self.spec.train.steps, self.step)
        critic_lr = self.spec.algo.critic_lr * lr / self.spec.optim.lr
        algo, columns = self.spec.algo, _columns(batch)
        critic_alone = self.critic is not None and self.step < algo.critic_warmup
        reports: list[Report] = []
        metrics: list[dict[str, float]] = []
        for _, rows in product(range(algo.epochs), self._split(len(batch.samples), algo.mini_batches, self._unit)):
            micro_batches = self._weighted(batch, columns, rows)
            if self.distribution:
                samples = batch.samples[rows.start : rows.stop]
                micro_batches = self.distribution.with_states(micro_batches, samples, interruptible=not metrics)
            step: dict[str, float] = {}
            if not critic_alone:
                step_reports, step["grad_norm"] = self.policy.step(micro_batches, self._loss, lr, first=not metrics)
                reports += step_reports
            if self.critic:
                step |= self.critic.update(micro_batches, critic_lr, first=critic_alone and not metrics)
            metrics.append(step)
        self.step += 1
        means = {name: float(np.mean([step[name] for step in metrics])) for name in metrics[0]}
        counted = len(batch.samples) / 2 if self.objective == "dpo" else batch.loss_tokens
        reduced = {} if critic_alone else self._reduced(reports, counted * algo.epochs, len(metrics))
        pairs = {"dpo/pairs": counted} if self.objective == "dpo" else {}
        steps = 0 if critic_alone else len(metrics)
        return {**reduced, **means, "lr": lr, "optimizer_steps": steps, "tokens": batch.loss_tokens, **pairs}

    def validate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Loss per trained token over all `batches`, without a gradient, as metrics of a set; collective.

        For pairs see preference.validation_metrics.
        Its interval is over conversations, each with its nats and tokens. May raise Preempted, like `score`.
        """
        beat(f"the validation of step {self.step}")
        if self.objective == "dpo":
            return self._validate_pairs(batches)
        nats: list[float] = []
        tokens: list[float] = []
        for batch in batches:
            rows = self.log_probs(self.policy.chunks, batch)
            nats += [-float(row.sum(dtype=np.float64)) for row in rows]
            tokens += [float(sample.loss_mask.sum()) for sample in batch.samples]
        loss = statistics.ratio(nats, tokens).metrics("score", "loss")
        return {"tasks": len(nats), "tokens": sum(tokens), **loss}

    def _validate_pairs(self, batches: Iterable[Batch]) -> dict[str, float]:
        masks, rows, reference = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
        for batch in batches:
            masks += [sample.loss_mask for sample in batch.samples]
            rows += self.log_probs(self.policy.chunks, batch)
            reference += self.reference_log_probs(batch)
        return validation_metrics(masks, rows, reference, self.spec.algo.dpo)

    def log_probs(
        self, chunks: Sequence[torch.nn.Module], batch: Batch, *, replay: bool = True, interruptible: bool = True
    ) -> list[np.ndarray]:
        """Log-probs of the trained tokens, 0 elsewhere, float32 [S] per sample on every rank; collective.

        `replay`: route tokens to the experts recorded in the samples, if any. `interruptible`: whether it may raise
        Preempted, like `score`.
        """
        head = self._head(chunks)
        columns = _cut(_columns(batch, replay=replay), batch.samples)
        micro_batches = self._micro_batches(columns)
        rows = infer(
            chunks, columns, micro_batches, lambda micro_batch, hidden: head(micro_batch, hidden)[0], interruptible
        )
        return _joined(rows, batch.samples)

    def _micro_batches(self, columns: Columns, pairs: bool = False) -> list[MicroBatch]:
        tokens = self.spec.train.tokens_per_micro_batch
        return self._pack(self.spec.network, tokens, columns, self.device, pairs=pairs)

    def _weighted(self, batch: Batch, columns: Columns, rows: range) -> list[MicroBatch]:
        """This rank's micro-batches of the mini-batch `rows`, with the weight of each token in its loss."""
        part = {name: values[rows.start : rows.stop] for name, values in columns.items()}
        samples = batch.samples[rows.start : rows.stop]
        if self.objective == "policy":
            weights = token_weights(
                part["loss_mask"],
                self.spec.algo.average,
                longest=self.spec.turn.longest,
                later=[sample.later for sample in samples],
                later_weight=self.spec.algo.later_weight,
            )
        else:  # dpo: the mean over pairs, with equal weights of both replies
            weights = token_weights(part["loss_mask"], {"sft": "token", "dpo": "sequence"}[self.objective])
        columns = _cut({**part, "weights": weights}, samples)
        return self._micro_batches(columns, pairs=self.objective == "dpo")

    @property
    def _unit(self) -> int:
        """Number of samples that must stay together: 2 for pairs."""
        return 2 if self.objective == "dpo" else 1

    def _head(self, chunks: Sequence[torch.nn.Module]) -> Head:
        # A teacher's vocabulary may be padded further than the policy's.
        return partial(apply_head, chunks[-1], self.temperature, min(unwrap(chunks[-1]).shape.vocab, self.shape.vocab))

    def _reduced(self, reports: Sequence[Report], count: float, steps: int) -> dict[str, float]:
        """Loss averaged over the optimizer steps, means over `count` trained tokens or pairs, and maxima, over all
        ranks."""
        summed, largest = self._sums, self._maxima
        sums = torch.zeros(1 + len(summed), device=self.device)
        maxima = torch.zeros(len(largest), device=self.device)
        if parallel_state.get_tensor_model_parallel_rank() == 0:  # its peers report the same tokens
            for loss, part_sums, part_maxima in reports:
                sums += torch.stack([loss, *(part_sums[name] for name in summed)])
                if largest:
                    maxima = maxima.maximum(torch.stack([part_maxima[name] for name in largest]))
        dist.all_reduce(sums)
        if largest:
            dist.all_reduce(maxima, dist.ReduceOp.MAX)
        loss, *means = sums.tolist()
        values = [loss / steps, *(value / count for value in means), *maxima.tolist()]
        return dict(zip(["loss", *summed, *largest], values, strict=True))


def _columns(batch: Batch, *, replay: bool = True) -> Columns:
    """Per-token columns of all samples; `replay`: include the engine's expert choices, if recorded."""
    names = ["token_ids", "loss_mask"] + (["log_probs"] if isinstance(batch, ScoredBatch) else [])
    columns: dict[str, Sequence[np.ndarray]] = {
        name: [getattr(sample, name) for sample in batch.samples] for name in names
    }
    scored = {field.name: getattr(batch, field.name) for field in fields(batch)[len(fields(Batch)) :]}
    columns |= {name: rows for name, rows in scored.items() if rows is not None}
    routing = [sample.routing for sample in batch.samples if sample.routing is not None]
    assert len(routing) in (0, len(batch.samples)), "all samples of a run have experts to replay, or none has"
    return columns | {"routing": routing} if replay and routing else columns


def _cut(columns: Columns, samples: Sequence[Sample]) -> Columns:
    """Split the columns of samples into token sequences; a sample has one more of them than `cuts`."""
    return {
        name: [piece for row, sample in zip(rows, samples, strict=True) for piece in np.split(row, sample.cuts)]
        for name, rows in columns.items()
    }


def _joined(rows: Sequence[np.ndarray], samples: Sequence[Sample]) -> list[np.ndarray]:
    """Concatenate the rows of token sequences per sample: the inverse of `_cut`."""
    remaining = iter(rows)
    return [np.concatenate([next(remaining) for _ in range(1 + len(sample.cuts))]) for sample in samples]
