"""The critic of PPO: the policy's architecture with a value head, trained separately."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from torch import Tensor

from megatron_collab.checkpoint.hf import unwrap
from megatron_collab.settings import OptimConfig
from megatron_collab.trainer import losses
from megatron_collab.trainer.megatron.pipeline import Communicator, PlannedCommunicator
from megatron_collab.trainer.microbatches import Columns, MicroBatch
from megatron_collab.trainer.network import Trainable, infer


class Critic(Trainable):
    """Predicts values: at the position that predicts a token, the expected return from that token on.

    Starts from model.path with a head of zeros, in the policy's layout, with its own optimizer. `clip`: change of a
    value above which its loss is clipped.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        optim: OptimConfig,
        offload: bool,
        clip: float,
        communicator: Communicator = PlannedCommunicator,
    ) -> None:
        super().__init__(_with_value_head(chunks), optim, offload, communicator)
        self._clip = clip

    def values(self, columns: Columns, micro_batches: Sequence[MicroBatch]) -> list[np.ndarray]:
        """The value of each trained token; see network.infer."""
        return infer(self.chunks, columns, micro_batches, self._predict)

    def update(self, micro_batches: Sequence[MicroBatch], lr: float, *, first: bool = False) -> dict[str, float]:
        """One optimizer step toward the column `returns`, clipped around the column `values`; collective.

        May raise Preempted before the `first` step of an update, like Trainable.step.
        """

        def value_loss(micro_batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
            columns, values = micro_batch.columns, self._predict(micro_batch, hidden)
            loss, clipped = losses.value_loss(values, columns["values"], columns["returns"], self._clip)
            total = (loss * columns["weights"]).sum()
            return total, torch.stack([total.detach(), (clipped * columns["weights"]).sum()])

        reports, norm = self.step(micro_batches, value_loss, lr, first=first)
        sums = torch.zeros(2, device=micro_batches[0].token_ids.device)
        if parallel_state.get_tensor_model_parallel_rank() == 0:  # its peers report the same tokens
            sums += sum(reports)
        dist.all_reduce(sums)
        total, clipped = sums.tolist()
        return {"critic/loss": total, "critic/clip_fraction": clipped, "critic/grad_norm": norm}

    def _predict(self, micro_batch: MicroBatch, hidden: Tensor) -> Tensor:
        """Values, float32 [N], equal on every tensor-parallel rank; the gradients of `hidden` are summed over them."""
        states = hidden[0].index_select(0, micro_batch.positions)
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        shared = states / ranks + states.detach() * (1.0 - 1.0 / ranks)
        return F.linear(shared.float(), unwrap(self.chunks[-1]).value_head.weight.float())[:, 0]


def _with_value_head(chunks: Sequence[torch.nn.Module]) -> Sequence[torch.nn.Module]:
    """Give the last stage a value head in place of its output layer, which is frozen unless it is tied."""
    last = unwrap(chunks[-1])
    if last.post_process:
        example = next(last.parameters())
        like = {"device": example.device, "dtype": example.dtype}
        last.value_head = torch.nn.Linear(last.config.hidden_size, 1, bias=False, **like)
        torch.nn.init.zeros_(last.value_head.weight)
        if not last.shape.tied:
            last.output_layer.requires_grad_(False)
    return chunks
