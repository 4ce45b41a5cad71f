"""Weights in and out: a Hugging Face folder into the shards of the ranks, and back.

What belongs where is said by models/hf_to_megatron.py alone.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.fp8_utils import dequantize_fp8_tensor, is_float8tensor
from safetensors.torch import save_file

from megatron_collab.checkpoint.hf_folder import HFTensors, plan_files, write_rest
from megatron_collab.models import hf_to_megatron
from megatron_collab.models.hf_to_megatron import Entry, ModelShape, Piece, Place
from megatron_collab.runtime import heartbeat

FILE_BYTES = 4 << 30
# local_experts.N.linear_fc1.weight, or with TransformerEngine's grouped GEMM linear_fc1.weightN
_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(?P<local>\d+)\.)?(?P<linear>linear_fc[12])\.weight(?P<grouped>\d*)"
)


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The GPTModel inside the wrappers for precision and data parallelism."""
    while hasattr(model, "module"):
        model = model.module
    return model


def named_shards(chunks: Iterable[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """This rank's parameters, under the names that `hf_map.table` gives them: layers and experts counted globally."""
    for chunk in chunks:
        policy = unwrap(chunk)
        for name, parameter in policy.named_parameters():
            layer = hf_to_megatron.LAYER.fullmatch(name)
            if layer:
                module = policy.decoder.layers[int(layer[1])]
                name = f"decoder.layers.{module.layer_number - 1}.{_name_in_layer(module, layer[2])}"
            yield name, parameter


def _name_in_layer(layer: torch.nn.Module, name: str) -> str:
    """TransformerEngine names some parameters otherwise, and experts are counted from the rank's first one."""
    expert = _EXPERT.fullmatch(name)
    if not expert:
        return hf_to_megatron.FUSED_NAMES.get(name, name)
    number = layer.mlp.local_expert_indices[int(expert["local"] or expert["grouped"])]
    return f"mlp.experts.{number}.{expert['linear']}.weight"


def values(shard: torch.nn.Parameter) -> torch.Tensor:
    """What a parameter stands for: itself without its gradient, out of FP8 where it is kept in that."""
    return dequantize_fp8_tensor(shard.detach()) if is_float8tensor(shard) else shard.detach()


def place() -> Place:
    """Where this rank stands in the layout."""
    return Place(
        tp=parallel_state.get_tensor_model_parallel_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        replica=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        expert_replica=parallel_state.get_expert_data_parallel_rank(),
    )


def load_hf(chunks: Iterable[torch.nn.Module], folder: Path, shape: ModelShape) -> None:
    """Fill this rank's parameters from `folder`; only the rank's own slices are read.

    ValueError if the folder lacks a tensor, has one too many or one of another shape. The padding of the
    vocabulary becomes zero.
    """
    tp, tp_rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    tensors = HFTensors(folder, shape)
    entries = {entry.megatron: entry for entry in hf_to_megatron.table(shape)}
    with torch.no_grad():
        for name, parameter in named_shards(chunks):
            heartbeat.beat()
            entry = entries[name]
            _check_shard(entry, parameter, tp)
            # Made in full before it is copied: FP8 parameters are scaled as a whole.
            shard = torch.zeros(parameter.shape, dtype=parameter.dtype)
            for piece in hf_to_megatron.pieces(entry, shape, tp, tp_rank):
                shard[piece.shard_index] = tensors.read(piece.hf, piece.hf_index)
            parameter.copy_(shard)


def _check_shard(entry: Entry, parameter: torch.Tensor, tp: int) -> None:
    wanted = hf_to_megatron.shard_shape(entry, tp)
    if tuple(parameter.shape) != wanted:
        raise ValueError(f"{entry.megatron} has shape {tuple(parameter.shape)}, the table says {wanted}")


def save_hf(chunks: Iterable[torch.nn.Module], folder: Path, source: Path, shape: ModelShape) -> None:
    """Write the model as a Hugging Face folder; collective. `folder` is replaced only once all is written.

    Rank 0 receives the tensors one by one and holds one file of them at a time. config.json, tokenizer and
    other small files come from `source`.
    """
    heartbeat.at(f"the export to {folder}")
    own = place()
    shards = dict(named_shards(chunks))
    example = next(iter(shards.values()))
    offers = {
        entry.megatron: own.tp_rank
        for entry in hf_to_megatron.table(shape)
        if entry.megatron in shards and own.writes(entry)
    }
    if dist.get_rank() == 0:
        offered: list[dict[str, int]] = [{}] * dist.get_world_size()
        dist.gather_object(offers, offered)
        writer = _Writer(folder, source, shape, example.dtype)
        for entry in hf_to_megatron.table(shape):
            for rank, owned in enumerate(offered):
                if entry.megatron not in owned:
                    continue
                heartbeat.beat()
                if rank == 0:
                    shard = values(shards[entry.megatron])
                else:
                    wanted = hf_to_megatron.shard_shape(entry, own.tp)
                    shard = torch.empty(wanted, dtype=example.dtype, device=example.device)
                    dist.recv(shard, rank)
                writer.fill(shard, hf_to_megatron.pieces(entry, shape, own.tp, owned[entry.megatron]))
        writer.finish()
    else:
        dist.gather_object(offers)
        for name in offers:  # in the order of the table, as rank 0 asks for them
            dist.send(values(shards[name]).contiguous(), 0)
    dist.barrier()


class _Writer:
    """A Hugging Face folder in the making, beside its final place; a file is written when it is complete."""

    def __init__(self, folder: Path, source: Path, shape: ModelShape, dtype: torch.dtype) -> None:
        self.folder, self.source, self.dtype = folder, source, dtype
        self.partial = folder.with_name(f".{folder.name}.partial")
        self.shapes = hf_to_megatron.hf_shapes(shape)
        self.files = plan_files(self.shapes, dtype.itemsize, FILE_BYTES)
        self.file_of = {name: file for file, names in self.files.items() for name in names}
        self.missing = {file: sum(prod(self.shapes[name]) for name in names) for file, names in self.files.items()}
        self.open: dict[str, torch.Tensor] = {}
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)

    def fill(self, shard: torch.Tensor, pieces: Sequence[Piece]) -> None:
        """Copy the pieces of one shard into their tensors; write the files that they complete."""
        for piece in pieces:
            if piece.hf not in self.open:
                self.open[piece.hf] = torch.empty(self.shapes[piece.hf], dtype=self.dtype)
            part = shard[piece.shard_index]
            self.open[piece.hf][piece.hf_index] = part.cpu()
            self.missing[self.file_of[piece.hf]] -= part.numel()
        for file in {self.file_of[piece.hf] for piece in pieces}:
            if self.missing[file] == 0:
                tensors = {name: self.open.pop(name) for name in self.files[file]}
                save_file(tensors, self.partial / file, {"format": "pt"})

    def finish(self) -> None:
        """Add what is no weight, and put the folder into its place."""
        if self.open:
            raise RuntimeError(f"{self.folder}: tensors were not complete, the first is {min(self.open)}")
        write_rest(self.partial, self.source, self.dtype, self.files)
        old = self.folder.with_name(f".{self.folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if self.folder.exists():
            self.folder.rename(old)
        self.partial.rename(self.folder)
        shutil.rmtree(old, ignore_errors=True)
