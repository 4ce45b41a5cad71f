"""Converts a training checkpoint to a Hugging Face folder and back, in one process, without ranks or a GPU.

One parameter after the other is read, taken apart or put together by the pieces of `hf_to_megatron.table`, and
written: the model as a whole is never in memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from math import prod
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from safetensors import SafetensorError
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, LoadPlan, SavePlan
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_collab.checkpoint import hf, storage
from megatron_collab.checkpoint.hf import HFTensors
from megatron_collab.checkpoint.torch_dist import SaveItems, write_item
from megatron_collab.config import ConfigError
from megatron_collab.models import hf_to_megatron
from megatron_collab.models.hf_to_megatron import LAYER, ModelShape, Shape, TensorCut, WeightEntry

METADATA = ".metadata"  # of torch.distributed.checkpoint: which tensor lies where
EMBEDDING = "embedding.word_embeddings.weight"
FUSED = {norm: fused for fused, norm in hf_to_megatron.FUSED_NAMES.items()}
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(.+)")

Location = tuple[str, tuple[int, ...]]


def to_hf(checkpoint: Path, folder: Path, source: Path, dtype: torch.dtype | None, file_bytes: int) -> None:
    """Write the weights of `checkpoint` (a step_N folder) as a Hugging Face folder; all other files come from `source`.

    Files have at most `file_bytes`; `dtype` is that of the checkpoint unless given. ConfigError where `folder`
    exists, the checkpoint is damaged or it holds another model than `source` describes. Memory: one file, one
    Megatron parameter and one stored part of it.
    """
    if folder.exists():
        raise ConfigError(f"{folder}: exists; give another folder, or remove it")
    damage = storage.damage(checkpoint, storage.read_state(checkpoint))
    if not damage and not (checkpoint / METADATA).is_file():
        damage = [f"{METADATA} is missing"]
    if damage:
        raise ConfigError(f"{checkpoint}: is damaged ({'; '.join(damage)}); give another checkpoint")
    shape, stored = hf.read_shape(source), Stored(checkpoint)
    _check_model(stored, shape, source)
    with _refusing(folder), hf.replacing(folder) as partial:
        writer = hf.HFWriter(partial, shape, dtype or stored.dtype(EMBEDDING), file_bytes)
        for entry in _exported(shape):
            writer.fill(stored.read(entry.megatron), hf_to_megatron.pieces(entry, shape, tp=1, tp_rank=0))
        writer.finish(source)


def to_checkpoint(source: Path, folder: Path, dtype: torch.dtype | None, file_bytes: int) -> None:
    """Write the Hugging Face folder `source` as a folder of checkpoints that a run can start from at step 0.

    It holds weights alone. `dtype` is that of `source` unless given. ConfigError where `folder` exists or `source`
    is not a whole model. Memory: one file of at most `file_bytes` and two parameters.
    """
    if folder.exists():
        raise ConfigError(f"{folder}: exists; give another folder, or remove it")
    shape = hf.read_shape(source)
    planner = _Convert(HFTensors(source, shape), shape, dtype)

    with _refusing(folder), hf.replacing(folder) as partial:
        step = storage.begin(partial, 0)
        writer = FileSystemWriter(step)
        writer.set_up_storage_writer(is_coordinator=True)
        # Each file as though another rank had written it: the writer keeps what a file holds until it is closed.
        plans, metadata = create_default_global_save_plan(list(planner.plans(file_bytes)))
        results = [writer.write_data(plan, planner).wait() for plan in writer.prepare_global_plan(plans)]
        writer.finish(metadata, results)
        torch.save({}, step / "common.pt")
        save_config(CheckpointingConfig("torch_dist"), str(step))
        state = {"step": 0, "ranks": 0, "state": {}, "weights_only": True}
        storage.commit(step, state, storage.checksums(step.iterdir()))


def _exported(shape: ModelShape) -> list[WeightEntry]:
    return [entry for entry in hf_to_megatron.table(shape) if entry.exported]


def _check_model(stored: Stored, shape: ModelShape, source: Path) -> None:
    way_out = "give the model that the run started from"
    for entry in _exported(shape):
        found, wanted = stored.shape(entry.megatron), hf_to_megatron.shard_shape(entry, tp=1)
        if entry.cut is TensorCut.VOCABULARY and found and found[0] > wanted[0]:
            found = (wanted[0], *found[1:])  # the rest is padding
        if found != wanted:
            there = f"has shape {found}" if found else "is missing"
            raise ConfigError(
                f"--model={source}: {entry.megatron} has shape {wanted}; in the checkpoint it {there}; {way_out}"
            )
    if stored.shape(f"decoder.layers.{shape.layers}.input_layernorm.weight"):
        raise ConfigError(f"--model={source}: has {shape.layers} layers, the checkpoint has more; {way_out}")


@contextmanager
def _refusing(folder: Path) -> Iterator[None]:
    """ConfigError if writing to the disk fails within it."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        # torch.save meets the full disk, then fails once more while it closes its file.
        reason = error.__context__ if isinstance(error, RuntimeError) else error
        if not isinstance(reason, OSError | SafetensorError):
            raise
        raise ConfigError(f"{folder}: cannot be written ({reason}); give another folder, or free disk space") from error


class _Convert(SaveItems):
    """Writes the parameters of a Hugging Face folder, converting one at a time."""

    def __init__(self, tensors: HFTensors, shape: ModelShape, dtype: torch.dtype | None) -> None:
        self._tensors, self._shape = tensors, shape
        self._dtype = dtype or tensors.read(next(iter(hf_to_megatron.hf_shapes(shape))), (slice(1),)).dtype
        super().__init__(list(self._requests()))

    def plans(self, file_bytes: int) -> Iterator[SavePlan]:
        """The parameters in files of at most `file_bytes`, a larger one alone."""
        sizes = (prod(item.tensor_data.chunk.sizes) * self._dtype.itemsize for item in self._items)
        return map(SavePlan, hf.grouped(zip(self._items, sizes, strict=True), file_bytes))

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        parameter = self._tensors.shard(super().resolve_data(write_item), self._shape, 1, 0, self._dtype)
        return parameter.view(write_item.tensor_data.chunk.sizes)

    def _requests(self) -> Iterator[tuple[WriteItem, WeightEntry]]:
        entries = _exported(self._shape)
        locations = _locations(entry.megatron for entry in entries)
        stacks: dict[str, tuple[int, ...]] = {}
        for key, index in locations.values():
            stacks[key] = tuple(map(max, stacks.get(key, index), index))
        for entry in entries:
            key, index = locations[entry.megatron]
            shard = hf_to_megatron.shard_shape(entry, tp=1)
            offsets, sizes = (*index, *(0 for _ in shard)), (*(1 for _ in index), *shard)
            whole = (*(last + 1 for last in stacks[key]), *shard)
            yield write_item(key, whole, offsets, sizes, self._dtype), entry


def _locations(names: Iterable[str]) -> dict[str, Location]:
    """Where Megatron-Core looks for each parameter: layers are stacked if all of them have the same parameters."""
    names = list(names)
    layers: dict[str, set[str]] = {}
    for match in filter(None, map(LAYER.fullmatch, names)):
        layers.setdefault(match[1], set()).add(match[2])
    apart = len(set(map(frozenset, layers.values()))) > 1

    def fused(name: str) -> bool:
        """Whether this norm precedes a linear layer (before experts it does not)."""
        match = LAYER.fullmatch(name)
        return match is not None and f"{FUSED.get(match[2], '').rpartition('.')[0]}.weight" in layers[match[1]]

    return {name: locate(name, apart, fused(name)) for name in names}


def locate(name: str, apart: bool, fused: bool) -> Location:
    """Key of a parameter in a checkpoint, and its index there: layer, expert, as far as they are stacked.

    `apart`: layers are not stacked, as Megatron-Core does it where they are not alike. `fused`: a norm goes by
    the name of the linear layer that it precedes, as all of Megatron-Core's dense layers have it.
    """
    layer = LAYER.fullmatch(name)
    if not layer:
        return name, ()
    number, local = int(layer[1]), layer[2]
    expert = _EXPERT.fullmatch(local)
    index: tuple[int, ...] = ()
    if expert:
        index, local = (int(expert[1]),), f"mlp.experts.experts.{expert[2]}"
    if fused:
        local = FUSED.get(local, local)
    return (f"decoder.layers.{number}.{local}", index) if apart else (f"decoder.layers.{local}", (number, *index))


class Stored:
    """The parameters of the main network in the step_N folder `checkpoint`, read one by one.

    A checkpoint holds global tensors, whatever layout wrote it. What `hf_to_megatron.table` calls a parameter on one
    tensor-parallel rank is such a tensor, or a slice of one where Megatron-Core stacks layers or experts.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._reader = FileSystemReader(checkpoint)
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._tensors = {
            key: found
            for key, found in metadata.state_dict_metadata.items()
            if isinstance(found, TensorStorageMetadata)
        }
        self._parts: dict[str, dict[tuple[int, ...], list[ChunkStorageMetadata]]] = {}

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[self._locate(name)[0]].properties.dtype

    def shape(self, name: str) -> Shape | None:
        """Shape of a parameter as on one tensor-parallel rank, the vocabulary padded; None where there is none."""
        key, index = self._locate(name)
        if key not in self._tensors:
            return None
        stack, size = self._tensors[key].size[: len(index)], self._tensors[key].size[len(index) :]
        return tuple(size) if all(i < n for i, n in zip(index, stack, strict=True)) else None

    def read(self, name: str) -> torch.Tensor:
        """A parameter as a whole."""
        key, index = self._locate(name)
        tensor = self._tensors[key]
        beyond = tensor.size[len(index) :]
        wanted = ChunkStorageMetadata(
            torch.Size((*index, *(0 for _ in beyond))), torch.Size((*(1 for _ in index), *beyond))
        )
        parts = TensorStorageMetadata(tensor.properties, tensor.size, self._parts_at(key, index))
        target = torch.empty(wanted.sizes, dtype=tensor.properties.dtype)
        plan = LoadPlan(create_read_items_for_chunk_list(key, parts, [wanted]))
        self._reader.read_data(plan, _Into(target)).wait()
        return target[(0,) * len(index)]

    def _locate(self, name: str) -> Location:
        options = [locate(name, apart, fused) for apart, fused in product((False, True), repeat=2)]
        return next((found for found in options if found[0] in self._tensors), options[0])

    def _parts_at(self, key: str, index: tuple[int, ...]) -> list[ChunkStorageMetadata]:
        """The stored parts of one slice; grouped once per key, which has as many as layers x experts."""
        if key not in self._parts:
            found = self._parts[key] = {}
            for part in self._tensors[key].chunks:
                found.setdefault(tuple(part.offsets[: len(index)]), []).append(part)
        return self._parts[key][index]


class _Into(DefaultLoadPlanner):
    """Reads into one tensor."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self._target = target

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._target
