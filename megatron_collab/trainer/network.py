"""A network in training: data parallelism, AdamW, offloading, and Megatron's schedules over its micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer import get_standard_config_overrides as no_decay_for_norms_and_biases
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_collab.checkpoint.hf import unwrap
from megatron_collab.patches.megatron import count_padding
from megatron_collab.runtime import device
from megatron_collab.runtime.process import beat
from megatron_collab.runtime.rank0 import PreemptionWatch, check_preemption
from megatron_collab.settings import OptimConfig
from megatron_collab.trainer.host_memory import HostMemory
from megatron_collab.trainer.megatron import lora
from megatron_collab.trainer.megatron.pipeline import Communicator, PlannedCommunicator
from megatron_collab.trainer.microbatches import Columns, MicroBatch

# (micro-batch, the last stage's hidden states [1, T, h]) -> (loss, report)
Loss = Callable[[MicroBatch, Tensor], tuple[Tensor, Any]]


class Frozen(NamedTuple):
    """A network without optimizer, in the interface of checkpoints; `moves`: its weights are replaced during a run."""

    chunks: list[torch.nn.Module]
    moves: bool = False
    optimizer: None = None


class Trainable:
    """A network in training: `chunks` (several with virtual pipeline stages) and AdamW, sharded over the ranks."""

    moves = True

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        optim: OptimConfig,
        offload: bool,
        communicator: Communicator = PlannedCommunicator,
    ) -> None:
        """`communicator`: of the pipeline's stages in `step`."""
        self._optim, self._offload, self._communicator = optim, offload, communicator
        megatron = get_model_config(chunks[0])
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True, fp8_param_gather=megatron.fp8_param
        )
        self.chunks = [DistributedDataParallel(megatron, ddp, chunk) for chunk in chunks]
        options = OptimizerConfig(
            optimizer="adam",
            lr=0.0,  # set by each step, as are betas and weight decay
            clip_grad=optim.clip_grad,
            bf16=megatron.bf16,
            params_dtype=megatron.params_dtype,
            use_distributed_optimizer=True,
        )
        for chunk in self.chunks:
            count_padding(chunk)
        self.optimizer = get_megatron_optimizer(options, self.chunks, no_decay_for_norms_and_biases(options))
        # Pinned: pageable memory is copied in small pieces, and the host waits for each.
        self.host_memory = HostMemory(pinned=device.kind(next(chunks[0].parameters())) == device.GPU)
        megatron.finalize_model_grads_func = finalize_model_grads
        megatron.grad_scale_func = self.optimizer.scale_loss

    def step(
        self, micro_batches: Sequence[MicroBatch], loss: Loss, lr: float, *, first: bool = False
    ) -> tuple[list[Any], float]:
        """One optimizer step; returns a report per micro-batch (on the last pipeline stage) and the gradient norm.

        The gradient is that of the sum of `loss` over all micro-batches of all ranks. Raises FloatingPointError if it
        is not finite, and may raise Preempted before the `first` step of an update, with all state unchanged.
        """
        for group in self.optimizer.param_groups:  # no Megatron scheduler; a checkpoint restores older settings
            group["lr"] = lr
            group["weight_decay"] = self._optim.weight_decay * group["wd_mult"]  # 0 for norms and biases
            group["betas"] = (self._optim.beta1, self._optim.beta2)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        # The schedule divides by the number of micro-batches, and gradients are averaged over the data parallel ranks.
        divisor = len(micro_batches) * parallel_state.get_data_parallel_world_size()

        def scaled(micro_batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Any]:
            total, report = loss(micro_batch, hidden)
            return total * divisor, report

        with lora.switched(self.chunks, dropping=True):
            reports = _schedule(
                self.chunks, micro_batches, scaled, self._communicator, interruptible=first, forward_only=False
            )
        if first:
            check_preemption()
        _, norm, _ = self.optimizer.step()
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient norm is {norm}; lower the learning rate (optim.lr)")
        return reports, float(norm)

    @contextmanager
    def offloaded(self) -> Iterator[None]:
        """With parallel.offload, optimizer state, float32 masters and gradients are in host memory inside the block.

        Tensors keep their identity, so all views of them are valid again afterwards; gradients are restored as zeros.
        Megatron's offload is not used: it allocates separate memory for the parameters of a float32 model.
        """
        if not self._offload:
            yield
            return
        storages = list(self.optimizer_storages())
        sizes = [storage.nbytes() for storage in storages]
        copies = self.host_memory.place(sizes)
        for part, copy in _parts(storages, copies):
            copy.copy_(part, non_blocking=True)
        device.synchronize(*map(_bytes, storages))
        for storage in storages:
            storage.resize_(0)
        for chunk in self.chunks:
            chunk.offload_grad_buffers()
        try:
            yield
        finally:
            for storage, size in zip(storages, sizes, strict=True):
                storage.resize_(size)
            for part, copy in _parts(storages, copies):
                part.copy_(copy, non_blocking=True)
            for chunk in self.chunks:
                chunk.restore_grad_buffers()

    def gradients(self) -> Iterator[Tensor]:
        """The flat buffers of all gradients."""
        for chunk in self.chunks:
            yield from (buffer.grad_data for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers])

    def optimizer_storages(self) -> Iterator[torch.UntypedStorage]:
        """Storages of the inner optimizers' states and parameters, each once, without the model's parameters."""
        buffers = [buffer for chunk in self.chunks for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]
        seen = {buffer.param_data.untyped_storage()._cdata for buffer in buffers}
        for part in self.optimizer.chained_optimizers:
            inner = part.optimizer
            tensors = [tensor for group in inner.param_groups for tensor in group["params"]]
            tensors += [value for state in inner.state.values() for value in state.values() if torch.is_tensor(value)]
            for tensor in tensors:
                storage = tensor.untyped_storage()
                if storage.nbytes() and storage._cdata not in seen:
                    seen.add(storage._cdata)
                    yield storage


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """uint8 [nbytes] view of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _parts(
    storages: Iterable[torch.UntypedStorage], copies: Iterable[Sequence[Tensor]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of a part of a storage, uint8 on its device, and the host memory that it is copied to."""
    for storage, pieces in zip(storages, copies, strict=True):
        yield from zip(_bytes(storage).split([len(piece) for piece in pieces]), pieces, strict=True)


def learning_rate(optim: OptimConfig, steps: int, step: int) -> float:
    """Learning rate of `step` (from 0) in a run of `steps`.

    Linear warm-up that reaches `optim.lr` in its last step, then constant, or linear to zero at step `steps`.
    """
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    if optim.schedule == "linear":
        return optim.lr * (steps - step) / (steps - optim.warmup_steps)
    return optim.lr


@torch.no_grad()
def infer(
    chunks: Sequence[torch.nn.Module],
    columns: Columns,
    micro_batches: Sequence[MicroBatch],
    compute: Callable[[MicroBatch, Tensor], Tensor],
    interruptible: bool = True,
) -> list[np.ndarray]:
    """Values of `compute` for the trained tokens, 0 elsewhere, float32 [S] per sample on every rank; collective.

    `micro_batches`: this rank's part of `columns`. `compute` maps a micro-batch and its hidden states to float [N], on
    the last pipeline stage. If `interruptible`, raises Preempted on every rank if rank 0 received a preemption notice.
    """
    parts = outputs(chunks, micro_batches, compute, interruptible)
    home, lengths = next(chunks[0].parameters()).device, [len(token_ids) for token_ids in columns["token_ids"]]
    flat = torch.zeros(sum(lengths), device=home)
    if parts and parallel_state.get_tensor_model_parallel_rank() == 0:  # its peers computed the same
        for micro_batch, values in zip(micro_batches, parts, strict=True):
            flat[torch.from_numpy(micro_batch.token_index).to(home)] = values.float()
    dist.all_reduce(flat)
    return np.split(flat.cpu().numpy(), np.cumsum(lengths)[:-1])


@torch.no_grad()
def outputs(
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[MicroBatch],
    compute: Callable[[MicroBatch, Tensor], Tensor],
    interruptible: bool = True,
) -> list[Tensor]:
    """As `infer`, but per micro-batch of this rank, as computed; empty except on the last pipeline stage."""

    def collect(micro_batch: MicroBatch, hidden: Tensor, non_loss_data: bool) -> Tensor:
        return compute(micro_batch, hidden)

    options = {"forward_only": True, "collect_non_loss_data": True}
    return _schedule(chunks, micro_batches, collect, PlannedCommunicator, interruptible, **options)


def _schedule(
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[MicroBatch],
    loss: Callable[..., Any],
    communicator: Communicator,
    interruptible: bool,
    **options: bool,
) -> list[Any]:
    """Run Megatron's schedule of this pipeline over the micro-batches; returns the reports of `loss`.

    If `interruptible`, raises Preempted on every rank once rank 0 has received a preemption notice. The check is
    collective: it precedes every micro-batch (all ranks have equally many), but with several pipeline stages, which
    process different micro-batches at a time, only the first. It does not block: hosts may run ahead of their GPUs.
    """
    watched = interruptible and parallel_state.get_pipeline_model_parallel_world_size() == 1
    watch = PreemptionWatch()
    if interruptible:
        check_preemption()

    def forward(batches: Iterator[MicroBatch], chunk: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        beat()
        if watched:
            watch.check()
        micro_batch = next(batches)
        output = chunk(
            micro_batch.token_ids,
            micro_batch.position_ids,
            None,
            packed_seq_params=micro_batch.packed,
            routing=micro_batch.routing,
        )
        unwrap(chunk).set_input_tensor(None)  # else its input and the gradient stay allocated until its next pass
        return output, partial(loss, micro_batch)

    batches = [iter(micro_batches) for _ in chunks]
    lengths = [micro_batch.token_ids.shape[1] for micro_batch in micro_batches]
    reports = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=batches,
        model=list(chunks),
        num_microbatches=len(micro_batches),
        seq_length=lengths[0],  # unused: lengths differ, and the communicator knows them
        micro_batch_size=1,
        p2p_communicator=communicator(get_model_config(chunks[0]), lengths),
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        **options,
    )
    watch.settle()
    return reports
