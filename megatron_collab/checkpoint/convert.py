"""From a training checkpoint to a Hugging Face folder and back, in one process, without ranks or a GPU.

One parameter after the other is fetched, taken apart or put together by the pieces of `hf_map.table`, and written:
the model as a whole is never in memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from math import prod
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemWriter, SavePlan
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from megatron_collab.checkpoint import hf_folder, storage
from megatron_collab.checkpoint.blocks import write_item
from megatron_collab.checkpoint.hf_folder import HFTensors
from megatron_collab.checkpoint.stored import FUSED, Location, Stored, locate
from megatron_collab.config import ConfigError
from megatron_collab.models import hf_to_megatron
from megatron_collab.models.hf_to_megatron import LAYER, Cut, Entry, ModelShape

METADATA = ".metadata"  # of torch.distributed.checkpoint: which tensor lies where
EMBEDDING = "embedding.word_embeddings.weight"


def to_hf(checkpoint: Path, folder: Path, source: Path, dtype: torch.dtype | None, file_bytes: int) -> None:
    """Write the weights of `checkpoint` (a step_N folder) as a Hugging Face folder; `source` gives the rest of it.

    Files have at most `file_bytes`; `dtype` is that of the checkpoint unless given. ConfigError where `folder`
    exists, the checkpoint is not whole or it holds another model than `source` describes. Memory: one file, one
    Megatron parameter and one stored part of it.
    """
    _check_free(folder)
    _check_whole(checkpoint)
    shape, stored = hf_folder.read_shape(source), Stored(checkpoint)
    _check_model(stored, shape, source)
    target = dtype or stored.dtype(EMBEDDING)
    entries = {name: entry for entry in _exported(shape) for name in entry.hf}
    shapes = hf_to_megatron.hf_shapes(shape)
    files = hf_folder.plan_files(shapes, target.itemsize, file_bytes)
    whole: dict[str, torch.Tensor] = {}  # the last parameter: q, k and v come from one

    def convert(name: str) -> torch.Tensor:
        entry = entries[name]
        if entry.megatron not in whole:
            whole.clear()
            whole[entry.megatron] = stored.read(entry.megatron)
        tensor = torch.empty(shapes[name], dtype=target)
        for piece in hf_to_megatron.pieces(entry, shape, tp=1, tp_rank=0):
            if piece.hf == name:
                tensor[piece.hf_index] = whole[entry.megatron][piece.shard_index].to(target)
        return tensor

    def write(partial: Path) -> None:
        for file, names in files.items():
            save_file({name: convert(name) for name in names}, partial / file, {"format": "pt"})
        hf_folder.write_rest(partial, source, target, files)

    _make(folder, write)


def to_checkpoint(source: Path, folder: Path, dtype: torch.dtype | None, file_bytes: int) -> None:
    """Write the Hugging Face folder `source` as a folder of checkpoints, from which a run can start at step 0.

    It holds weights alone. `dtype` is that of `source` unless given. ConfigError where `folder` exists or `source`
    is not a whole model. Memory: one file of at most `file_bytes` and two parameters.
    """
    _check_free(folder)
    shape = hf_folder.read_shape(source)
    planner = _Convert(HFTensors(source, shape), shape, dtype)

    def write(partial: Path) -> None:
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

    _make(folder, write)


def find(folder: Path) -> Path:
    """`folder` if it is a checkpoint, else the newest one in it; ConfigError where there is none."""
    found = [folder] if folder.name.startswith("step_") else storage.candidates(folder)
    if not found or not found[0].is_dir():
        raise ConfigError(f"{folder}: no checkpoint there; give a step_N folder, or the folder that holds them")
    return found[0]


def _exported(shape: ModelShape) -> list[Entry]:
    return [entry for entry in hf_to_megatron.table(shape) if entry.exported]


def _check_free(folder: Path) -> None:
    if folder.exists():
        raise ConfigError(f"{folder}: exists; give another folder, or remove it")


def _check_whole(checkpoint: Path) -> None:
    saved = storage.read_state(checkpoint)
    if saved is None:
        damage = [f"no valid {storage.STATE}"]
    elif not (checkpoint / METADATA).is_file():
        damage = [f"{METADATA} is missing"]
    else:
        damage = storage.damage(checkpoint, saved.get("files", {}))
    if damage:
        raise ConfigError(f"{checkpoint}: is not whole ({'; '.join(damage)}); give another checkpoint")


def _check_model(stored: Stored, shape: ModelShape, source: Path) -> None:
    way_out = "give the model that the run began with"
    for entry in _exported(shape):
        found, wanted = stored.shape(entry.megatron), hf_to_megatron.shard_shape(entry, tp=1)
        if entry.cut is Cut.VOCABULARY and found and found[0] > wanted[0]:
            found = (wanted[0], *found[1:])  # the rest is padding
        if found != wanted:
            there = f"has shape {found}" if found else "is not there"
            raise ConfigError(
                f"--model={source}: {entry.megatron} has shape {wanted}; in the checkpoint it {there}; {way_out}"
            )
    if stored.shape(f"decoder.layers.{shape.layers}.input_layernorm.weight"):
        raise ConfigError(f"--model={source}: has {shape.layers} layers, the checkpoint has more; {way_out}")


def _make(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a folder that becomes `folder` once it is done; ConfigError where the disk refuses it."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        write(partial)
        partial.rename(folder)
    except (OSError, SafetensorError, RuntimeError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        # torch.save meets the full disk, then fails once more while it closes its file.
        reason = error.__context__ if isinstance(error, RuntimeError) else error
        if not isinstance(reason, OSError | SafetensorError):
            raise
        raise ConfigError(f"{folder}: cannot be written ({reason}); give another folder, or make room") from error


class _Convert(DefaultSavePlanner):
    """Writes the parameters of a Hugging Face folder, each made when its turn comes."""

    def __init__(self, tensors: HFTensors, shape: ModelShape, dtype: torch.dtype | None) -> None:
        super().__init__(flatten_state_dict=False)
        self._tensors, self._shape = tensors, shape
        self._dtype = dtype or tensors.read(next(iter(hf_to_megatron.hf_shapes(shape)))).dtype
        self._entries: dict[MetadataIndex, Entry] = {}

    def plans(self, file_bytes: int) -> Iterator[SavePlan]:
        """The parameters in files of at most `file_bytes`, a larger one alone."""
        items: list[WriteItem] = []
        filled = 0
        for item in self._items():
            size = prod(item.tensor_data.chunk.sizes) * self._dtype.itemsize
            if items and filled + size > file_bytes:
                yield SavePlan(items)
                items, filled = [], 0
            items.append(item)
            filled += size
        yield SavePlan(items)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        entry = self._entries[write_item.index]
        parameter = torch.empty(write_item.tensor_data.chunk.sizes, dtype=self._dtype)
        shard = parameter.view(hf_to_megatron.shard_shape(entry, tp=1))
        pieces = hf_to_megatron.pieces(entry, self._shape, tp=1, tp_rank=0)
        for name in entry.hf:
            tensor = self._tensors.read(name)
            for piece in pieces:
                if piece.hf == name:
                    shard[piece.shard_index] = tensor[piece.hf_index].to(self._dtype)
        return parameter

    def _items(self) -> Iterator[WriteItem]:
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
            item = write_item(key, whole, offsets, sizes, self._dtype)
            self._entries[item.index] = entry
            yield item


def _locations(names: Iterable[str]) -> dict[str, Location]:
    """Where Megatron-Core looks for each parameter: layers are stacked where all of them have the same parameters."""
    names = list(names)
    layers: dict[str, set[str]] = {}
    for match in filter(None, map(LAYER.fullmatch, names)):
        layers.setdefault(match[1], set()).add(match[2])
    apart = len(set(map(frozenset, layers.values()))) > 1

    def fused(name: str) -> bool:
        """Whether the linear layer is there that this norm precedes (before experts there is none)."""
        match = LAYER.fullmatch(name)
        return match is not None and f"{FUSED.get(match[2], '').rpartition('.')[0]}.weight" in layers[match[1]]

    return {name: locate(name, apart, fused(name)) for name in names}
