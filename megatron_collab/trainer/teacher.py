"""The teacher of on-policy distillation: its log-probs of sampled tokens, or its whole distribution.

The teacher reads the tokens that the policy sampled, after the policy's own prompts or, with algo.teacher.context,
after prompts that say more (Sample.teacher_view).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_collab.checkpoint.hf import unwrap
from megatron_collab.trainer.divergence import head_reverse_kl
from megatron_collab.trainer.microbatches import Columns, MicroBatch, make_local_micro_batches
from megatron_collab.trainer.network import outputs
from megatron_collab.trainer.spec import NetworkSpec
from megatron_collab.types import Batch, Sample


def views(batch: Batch) -> Batch:
    """The batch as the teacher reads it."""
    return Batch(tuple(sample.teacher_view or sample for sample in batch.samples))


def from_views(rows: Sequence[np.ndarray], samples: Sequence[Sample]) -> list[np.ndarray]:
    """Rows over the policy's tokens, float32 [S] per sample, from rows over those that the teacher reads."""
    placed = [np.zeros_like(sample.loss_mask) for sample in samples]
    for sample, row, target in zip(samples, rows, placed, strict=True):
        view = sample.teacher_view or sample
        target[sample.loss_mask > 0] = row[view.loss_mask > 0]
    return placed


class WholeDistribution:
    """A teacher in the trainer that gives its whole distribution.

    Before an optimizer step it computes its hidden states of the step's tokens. In the loss, its head turns them into
    logits, and the reverse KL is taken to their distribution.

    `teaching`: a context in which the returned chunks have the teacher's weights. `head_copy`, on the last pipeline
    stage: the teacher's head with the policy's rows, if the two vocabularies are padded differently.
    """

    def __init__(
        self,
        network: NetworkSpec,
        policy: Sequence[torch.nn.Module],
        teaching: Callable[[], AbstractContextManager[Sequence[torch.nn.Module]]],
        temperature: float,
        tokens: int,
    ) -> None:
        """Collective over the tensor-parallel ranks. `tokens`: budget of a micro-batch on a rank."""
        self._network, self._policy, self._teaching, self._temperature = network, policy[-1], teaching, temperature
        self._tokens = tokens
        with teaching() as chunks:
            self._chunk = chunks[-1]
            sizes = unwrap(policy[0]).shape.vocab, unwrap(chunks[0]).shape.vocab
            self.vocab_size = min(sizes)
            last = unwrap(self._chunk).post_process
            self.head_copy = _cut_again(unwrap(self._chunk).head, sizes) if last and sizes[0] != sizes[1] else None

    def with_states(
        self, micro_batches: Sequence[MicroBatch], samples: Sequence[Sample], interruptible: bool
    ) -> list[MicroBatch]:
        """`micro_batches` with the teacher's states on the last pipeline stage, from its current weights; collective.

        `samples`: the samples of the step, in the order of MicroBatch.members; either all or none have a view, and with
        views none has `cuts`. If `interruptible`, may raise Preempted, as `infer`.
        """
        read = [replace(micro_batch, routing=None) for micro_batch in micro_batches]
        if viewed := any(sample.teacher_view for sample in samples):
            local = [samples[member] for micro_batch in micro_batches for member in micro_batch.members]
            columns = _columns([sample.teacher_view or sample for sample in local])
            device = micro_batches[0].token_ids.device
            read = make_local_micro_batches(self._network, self._tokens, columns, device)
        with self._teaching() as chunks:
            states = outputs(chunks, read, _at_predictions, interruptible)
        if not states:
            return [*micro_batches]
        if viewed:
            order = np.argsort(np.concatenate([view.token_index for view in read]))
            rows = torch.cat(states)
            rows = rows[torch.from_numpy(order).to(rows.device)]
            states = [*rows.split([len(micro_batch.positions) for micro_batch in micro_batches])]
        return [replace(step, teacher_states=rows) for step, rows in zip(micro_batches, states, strict=True)]

    def divergence(self, micro_batch: MicroBatch, hidden: Tensor) -> Tensor:
        """KL(policy || teacher), float32 [N], on the last stage; `hidden` [1, T, h] are the policy's states."""
        assert micro_batch.teacher_states is not None
        states, head = hidden[0].index_select(0, micro_batch.positions), unwrap(self._policy).head
        teacher_head = (self.head_copy if self.head_copy is not None else unwrap(self._chunk).head).detach()
        return head_reverse_kl(
            states, head, micro_batch.teacher_states, teacher_head, self._temperature, self.vocab_size
        )


def _at_predictions(micro_batch: MicroBatch, hidden: Tensor) -> Tensor:
    """States [N, h'] at the requested predictions, from those at all positions [1, T, h']."""
    return hidden[0].index_select(0, micro_batch.positions)


def _columns(samples: Sequence[Sample]) -> Columns:
    """The token sequences of all samples, as columns."""
    return {
        name: [piece for sample in samples for piece in np.split(getattr(sample, name), sample.cuts)]
        for name in ("token_ids", "loss_mask")
    }


@torch.no_grad()
def _cut_again(head: Tensor, sizes: tuple[int, int]) -> Tensor:
    """A copy of the teacher's rows [V/tp, h'] that belong to this rank's rows of the policy's head; collective.

    `sizes`: the vocabularies of policy and teacher, which padding makes different for the same tokenizer. Rows that the
    teacher lacks are zero.
    """
    group, tp = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_tensor_model_parallel_world_size()
    rank, rows = parallel_state.get_tensor_model_parallel_rank(), -(-sizes[0] // tp)
    whole = head.new_empty(tp * len(head), head.shape[1])
    dist.all_gather([*whole.chunk(tp)], head.contiguous(), group)
    local = whole[: sizes[1]][rank * rows : (rank + 1) * rows]
    return torch.cat([local, local.new_zeros(rows - len(local), head.shape[1])])
