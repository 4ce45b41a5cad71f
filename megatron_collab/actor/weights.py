"""Weights in and out: a Hugging Face folder into the shards of the ranks, and back.

What belongs where is said by publish/hf_map.py alone.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import safe_open
from safetensors.torch import save_file

from megatron_collab.publish import hf_map
from megatron_collab.publish.hf_map import Entry, ModelShape, Piece, Shape

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FILE_BYTES = 4 << 30
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_WEIGHT_FILE = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|h5|msgpack|index\.json)$")
# Buffers that old checkpoints hold; every implementation computes them anew.
_COMPUTED = re.compile(r".*rotary_emb\.inv_freq$")


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The GPTModel inside the wrappers for precision and data parallelism."""
    while hasattr(model, "module"):
        model = model.module
    return model


def named_shards(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """This rank's parameters, under the names that `hf_map.table` gives them (global layer numbers)."""
    inner = unwrap(model)
    offset = inner.decoder.layers[0].layer_number - 1
    for name, parameter in inner.named_parameters():
        layer = _LAYER.fullmatch(name)
        if layer:
            local = hf_map.FUSED_NAMES.get(layer[2], layer[2])
            name = f"decoder.layers.{int(layer[1]) + offset}.{local}"
        yield name, parameter


def load_hf(model: torch.nn.Module, folder: Path, shape: ModelShape) -> None:
    """Fill this rank's parameters from `folder`; only the rank's own slices are read.

    ValueError if the folder lacks a tensor, has one too many or one of another shape. The padding of the
    vocabulary becomes zero.
    """
    tp, tp_rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    files = _open(folder)
    _check_tensors(folder, files, shape)
    entries = {entry.megatron: entry for entry in hf_map.table(shape)}
    with torch.no_grad():
        for name, parameter in named_shards(model):
            entry = entries[name]
            _check_shard(entry, parameter, tp)
            parameter.zero_()
            for piece in hf_map.pieces(entry, shape, tp, tp_rank):
                parameter[piece.shard_index] = files[piece.hf].get_slice(piece.hf)[piece.hf_index].to(parameter)


def _open(folder: Path) -> dict[str, safe_open]:
    """Tensor name -> the opened file that holds it."""
    if (folder / INDEX).is_file():
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    else:
        names = [SINGLE]
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise ValueError(f"model.path={folder}: no {absent[0]} there; give a complete folder of safetensors")
    opened = [safe_open(folder / name, framework="pt", device="cpu") for name in names]
    return {tensor: file for file in opened for tensor in file.keys()}  # noqa: SIM118 (not a mapping)


def _check_tensors(folder: Path, files: Mapping[str, safe_open], shape: ModelShape) -> None:
    expected = hf_map.hf_shapes(shape)
    missing = sorted(expected.keys() - files.keys())
    if missing:
        raise ValueError(f"model.path={folder}: {len(missing)} tensors are missing, the first is {missing[0]}")
    extra = {name for name in files.keys() - expected.keys() if not _COMPUTED.fullmatch(name)}
    if shape.tied:
        extra.discard("lm_head.weight")  # the same tensor, written out a second time
    if extra:
        raise ValueError(f"model.path={folder}: {len(extra)} tensors are unexpected, the first is {min(extra)}")
    for name, wanted in expected.items():
        found = tuple(files[name].get_slice(name).get_shape())
        if found != wanted:
            raise ValueError(f"model.path={folder}: {name} has shape {found}, config.json asks for {wanted}")


def _check_shard(entry: Entry, parameter: torch.Tensor, tp: int) -> None:
    wanted = hf_map.shard_shape(entry, tp)
    if tuple(parameter.shape) != wanted:
        raise ValueError(f"{entry.megatron} has shape {tuple(parameter.shape)}, the table says {wanted}")


def save_hf(model: torch.nn.Module, folder: Path, source: Path, shape: ModelShape) -> None:
    """Write `model` as a Hugging Face folder; collective. `folder` is replaced only once all is written.

    Rank 0 receives the tensors one by one and holds one file of them at a time. config.json, tokenizer and
    other small files come from `source`.
    """
    tp, tp_rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    shards = {name: parameter.detach() for name, parameter in named_shards(model)}
    first_replica = parallel_state.get_data_parallel_rank() == 0
    offers = {
        entry.megatron: tp_rank
        for entry in hf_map.table(shape)
        if first_replica and entry.megatron in shards and hf_map.writes(entry, tp_rank)
    }
    if dist.get_rank() == 0:
        offered: list[dict[str, int]] = [{}] * dist.get_world_size()
        dist.gather_object(offers, offered)
        example = next(iter(shards.values()))
        writer = _Writer(folder, source, shape, example.dtype)
        for entry in hf_map.table(shape):
            for rank, owned in enumerate(offered):
                if entry.megatron not in owned:
                    continue
                shard = shards[entry.megatron] if rank == 0 else example.new_empty(hf_map.shard_shape(entry, tp))
                if rank != 0:
                    dist.recv(shard, rank)
                writer.fill(shard, hf_map.pieces(entry, shape, tp, owned[entry.megatron]))
        writer.finish()
    else:
        dist.gather_object(offers)
        for name in offers:  # in the order of the table, as rank 0 asks for them
            dist.send(shards[name].contiguous(), 0)
    dist.barrier()


class _Writer:
    """A Hugging Face folder in the making, beside its final place; a file is written when it is complete."""

    def __init__(self, folder: Path, source: Path, shape: ModelShape, dtype: torch.dtype) -> None:
        self.folder, self.source, self.dtype = folder, source, dtype
        self.partial = folder.with_name(f".{folder.name}.partial")
        self.shapes = hf_map.hf_shapes(shape)
        self.files = _plan_files(self.shapes, dtype.itemsize)
        self.missing = {name: prod(wanted) for name, wanted in self.shapes.items()}
        self.open: dict[str, torch.Tensor] = {}
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)

    def fill(self, shard: torch.Tensor, pieces: Iterable[Piece]) -> None:
        """Copy the pieces of one shard into their tensors."""
        for piece in pieces:
            if piece.hf not in self.open:
                self.open[piece.hf] = torch.empty(self.shapes[piece.hf], dtype=self.dtype)
            part = shard[piece.shard_index]
            self.open[piece.hf][piece.hf_index] = part.cpu()
            self.missing[piece.hf] -= part.numel()
        self._write_complete_files()

    def _write_complete_files(self) -> None:
        for file in {self.files[name] for name in self.open}:
            names = [name for name, where in self.files.items() if where == file]
            if not any(self.missing[name] for name in names):
                save_file({name: self.open.pop(name) for name in names}, self.partial / file, {"format": "pt"})

    def finish(self) -> None:
        """Add what is no weight, and put the folder into its place."""
        if self.open:
            raise RuntimeError(f"{self.folder}: tensors were not complete, the first is {min(self.open)}")
        for file in self.source.iterdir():
            if file.is_file() and not _WEIGHT_FILE.fullmatch(file.name):
                shutil.copy2(file, self.partial)
        config = json.loads((self.source / "config.json").read_text())
        config.pop("torch_dtype", None)  # how transformers 4 wrote it
        config["dtype"] = str(self.dtype).removeprefix("torch.")
        (self.partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if len(set(self.files.values())) > 1:
            total = sum(prod(wanted) for wanted in self.shapes.values()) * self.dtype.itemsize
            index = {"metadata": {"total_size": total}, "weight_map": self.files}
            (self.partial / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        old = self.folder.with_name(f".{self.folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if self.folder.exists():
            self.folder.rename(old)
        self.partial.rename(self.folder)
        shutil.rmtree(old, ignore_errors=True)


def _plan_files(shapes: Mapping[str, Shape], item_bytes: int) -> dict[str, str]:
    """Tensor name -> file name; files of at most FILE_BYTES, larger tensors alone."""
    numbers, number, filled = {}, 1, 0
    for name, wanted in shapes.items():
        size = prod(wanted) * item_bytes
        if filled and filled + size > FILE_BYTES:
            number, filled = number + 1, 0
        numbers[name], filled = number, filled + size
    if number == 1:
        return dict.fromkeys(shapes, SINGLE)
    return {name: f"model-{i:05d}-of-{number:05d}.safetensors" for name, i in numbers.items()}
