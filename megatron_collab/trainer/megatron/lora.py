"""Adapters of Megatron's and TransformerEngine's linear layers, in every layout (models/lora.py selects the layers).

Communication between tensor-parallel ranks has the width of the adapters, not of the layer. With x a layer's input:

    column parallel (qkv, gate-up)   A x on every rank's local tokens, then gathered over the sequence or, without
                                     sequence parallelism, copied; B has this rank's rows
    row parallel (proj, down)        A has this rank's columns; A x is summed over the ranks, with sequence
                                     parallelism scattered to the local tokens; then B

If a factor sees only a part of the tokens, Megatron sums its gradient over the ranks, like a norm's.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor

from megatron_collab.checkpoint.adapters import merged_weight, rows_of
from megatron_collab.checkpoint.hf import named_shards, unwrap
from megatron_collab.models import lora as plan
from megatron_collab.models.hf_to_megatron import ModelShape, TensorCut, WeightEntry, table
from megatron_collab.models.lora import Factor
from megatron_collab.trainer.spec import NetworkSpec


class Adapters(torch.nn.Module):
    """The adapters of one linear layer on this rank: A [k r, in] and B [out, k r] of its k matrices, r the LoRA rank.

    `active`: False disables them. `dropping`: apply dropout to the input, with one mask for all k.
    """

    def __init__(self, network: NetworkSpec, shape: ModelShape, entry: WeightEntry, weight: torch.nn.Parameter) -> None:
        """Uses dtype and device of `weight`, the adapted one. B is zero: the output is unchanged at first.

        A is uniform within 1 / sqrt(columns), PEFT's Kaiming initialization with a = sqrt(5); its values depend on
        run.seed and its name, not on the layout.
        """
        super().__init__()
        lora, parallel = network.model.lora, network.parallel
        tp, rank = parallel.tp, parallel_state.get_tensor_model_parallel_rank()
        self.rows_cut, self.sequence_parallel = entry.cut is TensorCut.ROWS, parallel.sequence_parallel
        self.scale, self.dropout = plan.scale(lora), lora.dropout
        self.active, self.dropping = True, False
        self._blocks = plan.blocks(entry, shape, lora, tp)
        self.a, self.b = torch.nn.ParameterDict(), torch.nn.ParameterDict()
        for projection, a, b in plan.adapters(entry, lora):
            generator = torch.Generator().manual_seed(zlib.crc32(f"{network.seed} {a.key}".encode()))
            bound = 1 / math.sqrt(a.shape[1])
            full = (torch.rand(a.shape, generator=generator, device="cpu") * 2 - 1) * bound
            local = full if a.axis is None else full.chunk(tp, a.axis)[rank]
            self.a[projection] = _parameter(local, a, weight)
            self.b[projection] = _parameter(torch.zeros(b.local(tp), device="cpu"), b, weight)
        for factor in (self.a if self.rows_cut else self.b).values():
            factor.sequence_parallel = self.sequence_parallel  # each rank has a part of the tokens

    def forward(self, x: Tensor) -> Tensor:
        """The term to add to the layer's output for its input [t, 1, in], both local to this rank."""
        cut = self.sequence_parallel or not self.rows_cut  # inputs differ between ranks, so masks must too
        if self.dropping and self.dropout:
            with tensor_parallel.get_cuda_rng_tracker().fork() if cut else nullcontext():
                x = F.dropout(x, self.dropout)
        u = F.linear(x, torch.cat(list(self.a.values())))
        if self.rows_cut:
            across = tensor_parallel.copy_to_tensor_model_parallel_region
            across_sequence = tensor_parallel.gather_from_sequence_parallel_region
        else:
            across = tensor_parallel.reduce_from_tensor_model_parallel_region
            across_sequence = tensor_parallel.reduce_scatter_to_sequence_parallel_region
        u = (across_sequence if self.sequence_parallel else across)(u)
        return F.linear(u, rows_of(self._blocks, list(self.b.values()))) * self.scale

    def merged(self, weight: Tensor) -> Tensor:
        """This rank's shard of a weight [out, in] with the adapters merged into it."""
        return merged_weight(weight, self._blocks, list(self.a.values()), list(self.b.values()), self.scale)

    def attach(self, linear: torch.nn.Module) -> None:
        """Make `linear` add them to its output, and register them at its weight."""
        if hasattr(linear, "return_layernorm_output"):
            linear.return_layernorm_output = True  # of TransformerEngine's fused norm: the adapters read it
        linear.adapters = self
        linear.weight.adapters = self  # for publishing and export
        linear.register_forward_hook(self._add)

    def _add(self, linear: torch.nn.Module, inputs: tuple[Tensor, ...], output: tuple[Any, Any]) -> tuple[Any, Any]:
        """Forward hook of a linear layer with output (result, bias); with a fused norm, result is (result, norm's)."""
        result, bias = output
        x = inputs[0]
        if isinstance(result, tuple):
            result, x = result
        return (result + self(x) if self.active else result), bias


def add(chunks: Sequence[torch.nn.Module], network: NetworkSpec, shape: ModelShape) -> None:
    """Freeze the model (this rank's `chunks`), and add the adapters of model.lora to its linear layers."""
    entries, lora = {entry.megatron: entry for entry in table(shape)}, network.model.lora
    for chunk in chunks:
        policy = unwrap(chunk)
        policy.lora = lora
        policy.requires_grad_(False)
        owners = {weight: module for module in policy.modules() for weight in module.parameters(recurse=False)}
        for name, weight in list(named_shards([chunk])):
            if plan.adapters(entries[name], lora):
                Adapters(network, shape, entries[name], weight).attach(owners[weight])
        if policy.pre_process:
            # Else no input of the first layer requires a gradient, and recomputed layers would get none.
            policy.embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())


@contextmanager
def switched(chunks: Sequence[torch.nn.Module], *, active: bool = True, dropping: bool = False) -> Iterator[None]:
    """Inside the block, sets both switches of all adapters; elsewhere they are active, without dropout.

    Without adapters the model is the initial one; dropout of their inputs is only for training steps.
    """
    modules = [module for chunk in chunks for module in chunk.modules() if isinstance(module, Adapters)]
    for adapters in modules:
        adapters.active, adapters.dropping = active, dropping
    try:
        yield
    finally:
        for adapters in modules:
            adapters.active, adapters.dropping = True, False


def _parameter(values: Tensor, factor: Factor, like: torch.nn.Parameter) -> torch.nn.Parameter:
    """A parameter with `values`, this rank's part of `factor`, in dtype and on the device of `like`."""
    parameter = torch.nn.Parameter(values.to(dtype=like.dtype, device=like.device, copy=True))
    parameter.factor = factor
    if factor.axis is not None:
        tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, factor.axis, 1)
    return parameter
