"""Adapters on Megatron's linear layers, its own and TransformerEngine's, in every layout (models/lora.py says which).

What crosses tensor-parallel ranks has the width of the adapters, not of the layer. With x the input of a layer:

    column parallel (qkv, gate-up)   A x on every rank's own tokens, then gathered over the sequence or, without
                                     sequence parallelism, copied; B has this rank's rows
    row parallel (proj, down)        A has this rank's columns; A x is summed over the ranks, with sequence
                                     parallelism each has the sum of its own tokens; then B

Where a factor sees a part of the tokens only, Megatron sums its gradient over the ranks, as that of a norm.
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

from megatron_collab.checkpoint.adapters import merged, rows_of
from megatron_collab.checkpoint.hf import named_shards, unwrap
from megatron_collab.config import Config
from megatron_collab.models import lora as plan
from megatron_collab.models.hf_to_megatron import ModelShape, TensorCut, WeightEntry, table
from megatron_collab.models.lora import Factor


class Adapters(torch.nn.Module):
    """Those of one linear layer on this rank, as one: A [k r, in] and B [out, k r] of its k matrices, r the rank.

    `active`: False leaves the layer as it was. `dropping`: the input passes through dropout, one mask for all of them.
    """

    def __init__(self, config: Config, shape: ModelShape, entry: WeightEntry, weight: torch.nn.Parameter) -> None:
        """In dtype and on the device of `weight`, which they are added to. B is zero: nothing has changed yet.

        A is uniform within 1 / sqrt(columns), which is PEFT's Kaiming initialisation with a = sqrt(5); its numbers
        follow from run.seed and its name, whatever the layout.
        """
        super().__init__()
        lora, parallel = config.model.lora, config.parallel
        tp, rank = parallel.tp, parallel_state.get_tensor_model_parallel_rank()
        self.rows_cut, self.sequence_parallel = entry.cut is TensorCut.ROWS, parallel.sequence_parallel
        self.scale, self.dropout = plan.scale(lora), lora.dropout
        self.active, self.dropping = True, False
        self._blocks = plan.blocks(entry, shape, lora, tp)
        self.a, self.b = torch.nn.ParameterDict(), torch.nn.ParameterDict()
        for projection, a, b in plan.adapters(entry, lora):
            generator = torch.Generator().manual_seed(zlib.crc32(f"{config.run.seed} {a.key}".encode()))
            bound = 1 / math.sqrt(a.shape[1])
            whole = (torch.rand(a.shape, generator=generator, device="cpu") * 2 - 1) * bound
            own = whole if a.axis is None else whole.chunk(tp, a.axis)[rank]
            self.a[projection] = _parameter(own, a, weight)
            self.b[projection] = _parameter(torch.zeros(b.local(tp), device="cpu"), b, weight)
        for factor in (self.a if self.rows_cut else self.b).values():
            factor.sequence_parallel = self.sequence_parallel  # each rank has a part of the tokens

    def forward(self, x: Tensor) -> Tensor:
        """What is added to the layer's output, for its input [t, 1, in]; both are what the layer has on this rank."""
        cut = self.sequence_parallel or not self.rows_cut  # ranks have different numbers, which are dropped apart
        if self.dropping and self.dropout:
            with tensor_parallel.get_cuda_rng_tracker().fork() if cut else nullcontext():
                x = F.dropout(x, self.dropout)
        u = F.linear(x, torch.cat(list(self.a.values())))
        if self.rows_cut:
            across = tensor_parallel.copy_to_tensor_model_parallel_region
            of_sequence = tensor_parallel.gather_from_sequence_parallel_region
        else:
            across = tensor_parallel.reduce_from_tensor_model_parallel_region
            of_sequence = tensor_parallel.reduce_scatter_to_sequence_parallel_region
        u = (of_sequence if self.sequence_parallel else across)(u)
        return F.linear(u, rows_of(self._blocks, list(self.b.values()))) * self.scale

    def merged(self, weight: Tensor) -> Tensor:
        """This rank's shard of a weight [out, in] with the adapters merged into it."""
        return merged(weight, self._blocks, list(self.a.values()), list(self.b.values()), self.scale)

    def attach(self, linear: torch.nn.Module) -> None:
        """Have `linear` add them to its output, and its weight know them."""
        if hasattr(linear, "return_layernorm_output"):
            linear.return_layernorm_output = True  # TransformerEngine's with a norm, whose result the adapters read
        linear.adapters = self
        linear.weight.adapters = self  # for what is published and exported
        linear.register_forward_hook(self._add)

    def _add(self, linear: torch.nn.Module, inputs: tuple[Tensor, ...], output: tuple[Any, Any]) -> tuple[Any, Any]:
        """A forward hook of a linear layer, which gives its result and a bias; a result with a norm's is a pair."""
        result, bias = output
        x = inputs[0]
        if isinstance(result, tuple):
            result, x = result
        return (result + self(x) if self.active else result), bias


def add(chunks: Sequence[torch.nn.Module], config: Config, shape: ModelShape) -> None:
    """Freeze the model of which this rank has `chunks`, and give its linear layers the adapters of model.lora."""
    entries, lora = {entry.megatron: entry for entry in table(shape)}, config.model.lora
    for chunk in chunks:
        policy = unwrap(chunk)
        policy.lora = lora
        policy.requires_grad_(False)
        owners = {weight: module for module in policy.modules() for weight in module.parameters(recurse=False)}
        for name, weight in list(named_shards([chunk])):
            if plan.adapters(entries[name], lora):
                Adapters(config, shape, entries[name], weight).attach(owners[weight])
        if policy.pre_process:
            # Else nothing that enters the first layer has a gradient, and one that is recomputed would have none.
            policy.embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())


def adapters_of(chunks: Sequence[torch.nn.Module]) -> Iterator[Adapters]:
    for chunk in chunks:
        yield from (module for module in chunk.modules() if isinstance(module, Adapters))


@contextmanager
def base_alone(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Within it the adapters add nothing: the model is the one that the training started from."""
    yield from _switched(chunks, "active", False)


@contextmanager
def dropping(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Within it the adapters' inputs pass through dropout, as they do where the model learns and nowhere else."""
    yield from _switched(chunks, "dropping", True)


def _switched(chunks: Sequence[torch.nn.Module], switch: str, to: bool) -> Iterator[None]:
    found = list(adapters_of(chunks))
    for adapters in found:
        setattr(adapters, switch, to)
    try:
        yield
    finally:
        for adapters in found:
            setattr(adapters, switch, not to)


def _parameter(values: Tensor, factor: Factor, like: torch.nn.Parameter) -> torch.nn.Parameter:
    """`values` [this rank's part of `factor`] as a parameter."""
    made = torch.nn.Parameter(values.to(dtype=like.dtype, device=like.device, copy=True))
    made.factor = factor
    if factor.axis is not None:
        tensor_parallel.set_tensor_model_parallel_attributes(made, True, factor.axis, 1)
    return made
