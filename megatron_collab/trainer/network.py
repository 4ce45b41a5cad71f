"""A network in training: its chunks under data parallelism, its optimizer, and Megatron's schedules over them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_collab.config import Config
from megatron_collab.runtime import heartbeat
from megatron_collab.runtime.rank0 import look
from megatron_collab.trainer.microbatches import MicroBatch, Share
from megatron_collab.trainer.offload import Offload
from megatron_collab.trainer.optimizer import build_optimizer

# From a micro-batch and the last stage's hidden states [1, T, h] to (loss, report).
Loss = Callable[[MicroBatch, Tensor], tuple[Tensor, Any]]


class Trainable:
    """One network in training: `chunks` (several with virtual pipeline stages) inside Megatron's data parallelism."""

    def __init__(self, config: Config, chunks: Sequence[torch.nn.Module], lr: float) -> None:
        megatron = get_model_config(chunks[0])
        options = DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True, fp8_param_gather=config.model.fp8_params
        )
        self.chunks = [DistributedDataParallel(megatron, options, chunk) for chunk in chunks]
        self._settings = config.optim
        self.optimizer = build_optimizer(config, self.chunks, lr)
        if config.model.fp8_params:
            self.optimizer.reload_model_params()  # the masters hold what the parameters were before they were loaded
        self._offload = Offload(self.chunks, self.optimizer) if config.parallel.offload else None
        megatron.finalize_model_grads_func = finalize_model_grads
        megatron.grad_scale_func = self.optimizer.scale_loss

    def step(self, share: Share, loss: Loss, lr: float, *, first: bool = False) -> tuple[list[Any], float]:
        """One optimizer step: what `loss` reports of each micro-batch (on the last pipeline stage), the gradient norm.

        The gradient is that of the sum of `loss` over all micro-batches of all ranks. FloatingPointError where it
        is not finite; before the `first` step of an update Preempted, which leaves everything as it was.
        """
        self._configure(lr)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        # The schedule divides by the micro-batches, and gradients are averaged over the data parallel ranks.
        undone = len(share.micro_batches) * parallel_state.get_data_parallel_world_size()

        def scaled(micro_batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Any]:
            total, report = loss(micro_batch, hidden)
            return total * undone, report

        reports = schedule(self.chunks, share, scaled, interruptible=first, forward_only=False)
        if first:
            look()
        _, norm, _ = self.optimizer.step()
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient norm is {norm}; lower the learning rate (optim.lr)")
        return reports, float(norm)

    def _configure(self, lr: float) -> None:
        """Set what Megatron leaves to its scheduler, which is not used, and what a checkpoint would bring back.

        Norms and biases are in groups whose `wd_mult` is 0.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self._settings.weight_decay * group["wd_mult"]
            group["betas"] = (self._settings.beta1, self._settings.beta2)

    def offload(self) -> None:
        """Free the device of optimizer state and gradients until `onload`, where parallel.offload asks for it."""
        if self._offload:
            self._offload.leave()

    def onload(self) -> None:
        """Bring back what `offload` took away."""
        if self._offload:
            self._offload.come_back()


@torch.no_grad()
def infer(
    chunks: Sequence[torch.nn.Module], share: Share, compute: Callable[[MicroBatch, Tensor], Tensor]
) -> list[Tensor]:
    """What `compute` makes of each micro-batch and its hidden states; empty but on the last pipeline stage.

    Preempted on every rank where the machine is wanted back.
    """

    def collect(micro_batch: MicroBatch, hidden: Tensor, non_loss_data: bool) -> Tensor:
        return compute(micro_batch, hidden)

    return schedule(chunks, share, collect, interruptible=True, forward_only=True, collect_non_loss_data=True)


def schedule(
    chunks: Sequence[torch.nn.Module],
    share: Share,
    loss: Callable[..., Any],
    *,
    interruptible: bool = False,
    **options: bool,
) -> list[Any]:
    """Megatron's schedule of this pipeline over the micro-batches; what `loss` reports of each.

    Preempted on every rank where it is `interruptible` and the machine is wanted back. All ranks have to ask together:
    they do before every micro-batch, of which they have equally many; with pipeline stages, which are at different
    ones at a time, before the first alone.
    """
    staged = parallel_state.get_pipeline_model_parallel_world_size() > 1
    if interruptible and staged:
        look()

    def forward(batches: Iterator[MicroBatch], chunk: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        heartbeat.beat()
        if interruptible and not staged:
            look()
        micro_batch = next(batches)
        output = chunk(micro_batch.token_ids, micro_batch.position_ids, None, packed_seq_params=micro_batch.packed)
        return output, partial(loss, micro_batch)

    batches = [iter(share.micro_batches) for _ in chunks]
    several = len(chunks) > 1
    return get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=batches if several else batches[0],
        model=list(chunks) if several else chunks[0],
        num_microbatches=len(share.micro_batches),
        seq_length=share.micro_batches[0].token_ids.shape[1],  # each stage tells the next; sequences vary
        micro_batch_size=1,
        **options,
    )
