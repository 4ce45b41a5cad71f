"""Converts a training checkpoint to a Hugging Face folder and back, in one process, without ranks or a GPU.

Parameters are read, split or combined by the pieces of `hf_to_megatron.table`, and written one by one, so the full
model is never in memory. The output is read back and compared with its source.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from safetensors import SafetensorError
from torch.distributed.checkpoint import FileSystemWriter, SavePlan
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.planner import WriteItem

from megatron_collab.checkpoint import hf, storage
from megatron_collab.checkpoint.adapters import StoredAdapters, write_peft
from megatron_collab.checkpoint.hf import HFTensors
from megatron_collab.checkpoint.stored import FUSED, METADATA, Location, StoredWeights, locate
from megatron_collab.checkpoint.torch_dist import SaveItems, write_item
from megatron_collab.models import hf_to_megatron
from megatron_collab.models.hf_to_megatron import LAYER, ModelShape, TensorCut, WeightEntry
from megatron_collab.models.lora import from_state
from megatron_collab.runtime.screen import counted, phase
from megatron_collab.settings import ConfigError

logger = logging.getLogger(__name__)

EMBEDDING = "embedding.word_embeddings.weight"
_HINT = "give the model that the run started from"


def to_hf(checkpoint: Path, folder: Path, source: Path, dtype: torch.dtype | None, file_bytes: int) -> None:
    """Write the weights of `checkpoint` (a step_N folder) as a Hugging Face folder; all other files come from `source`.

    Adapters are merged into the weights of `source`. Files have at most `file_bytes`; `dtype` defaults to the
    checkpoint's. Raises ConfigError if `folder` exists, if the checkpoint is damaged or holds another model than
    `source` describes, or if the output differs when read back. Memory: one file, one Megatron parameter and one stored
    part of it.
    """
    shape, stored = _read(checkpoint, folder, source)
    logger.info(f"{folder}: converting {checkpoint}")
    dtype = dtype or stored.dtype(EMBEDDING)
    with _refusing(folder), hf.replacing(folder) as partial:
        writer = hf.HFWriter(partial, shape, dtype, file_bytes)
        for entry in counted(_exported_entries(shape), "converting", "parameter"):
            writer.fill(stored.read(entry.megatron), hf_to_megatron.pieces(entry, shape, tp=1, tp_rank=0))
        writer.finish(source)
        _check_written(stored, HFTensors(partial, shape), shape, dtype)


def to_peft(checkpoint: Path, folder: Path, source: Path, base: str, dtype: torch.dtype | None) -> None:
    """Write the adapters of `checkpoint` as a PEFT folder for the model in `source`, which it names `base`.

    `dtype` defaults to the checkpoint's. Raises ConfigError as `to_hf` does, and if the checkpoint holds full weights
    instead of adapters. Memory: all adapters.
    """
    _, stored = _read(checkpoint, folder, source)
    if not isinstance(stored, StoredAdapters):
        raise ConfigError(f"{checkpoint}: holds whole weights: its run had no model.lora.rank; remove --peft")
    with _refusing(folder), hf.replacing(folder) as partial:
        write_peft(partial, stored.lora, stored.factors(dtype), base)


def _read(checkpoint: Path, folder: Path, source: Path) -> tuple[ModelShape, StoredWeights | StoredAdapters]:
    """Open the checkpoint and check it against `source`; `folder`, the output, must not exist."""
    if folder.exists():
        raise ConfigError(f"{folder}: exists; give another folder, or remove it")
    saved = storage.read_state(checkpoint)
    damage = storage.damage(checkpoint, saved)
    if not damage and not (checkpoint / METADATA).is_file():
        damage = [f"{METADATA} is missing"]
    if damage:
        raise ConfigError(f"{checkpoint}: is damaged ({'; '.join(damage)}); give another checkpoint")
    shape, stored, lora = hf.read_shape(source), StoredWeights(checkpoint), from_state(saved or {})
    _check_recorded_shape((saved or {}).get("model"), shape, source)
    if lora is not None:
        return shape, StoredAdapters(stored, lora, HFTensors(source, shape), shape, source)
    _check_model(stored, shape, source)
    return shape, stored


def to_checkpoint(source: Path, folder: Path, dtype: torch.dtype | None, file_bytes: int) -> None:
    """Write the Hugging Face folder `source` as a folder of checkpoints that a run can start from at step 0.

    It holds only weights. `dtype` defaults to one that holds those of `source` exactly. Raises ConfigError if `folder`
    exists, `source` is not a complete model, or the output differs when read back. Memory: one file of at most
    `file_bytes` and two parameters.
    """
    if folder.exists():
        raise ConfigError(f"{folder}: exists; give another folder, or remove it")
    shape = hf.read_shape(source)
    tensors = HFTensors(source, shape)
    planner = _Convert(tensors, shape, dtype)

    with _refusing(folder), hf.replacing(folder) as partial:
        step = storage.begin(partial, 0)
        writer = FileSystemWriter(step)
        writer.set_up_storage_writer(is_coordinator=True)
        # Each file gets a plan as if another rank wrote it: the writer keeps the contents of a file until it is closed.
        plans, metadata = create_default_global_save_plan(list(planner.plans(file_bytes)))
        with phase("converting"):
            results = [writer.write_data(plan, planner).wait() for plan in writer.prepare_global_plan(plans)]
        writer.finish(metadata, results)
        torch.save({}, step / "common.pt")
        save_config(CheckpointingConfig("torch_dist"), str(step))
        state = {"step": 0, "ranks": 0, "state": {}, "weights_only": True, "model": asdict(shape)}
        storage.commit(step, state, storage.checksums(step.iterdir()))
        _check_written(StoredWeights(storage.find_checkpoint(partial)), tensors, shape, planner.dtype)


def _exported_entries(shape: ModelShape) -> list[WeightEntry]:
    return [entry for entry in hf_to_megatron.table(shape) if entry.exported]


def _check_recorded_shape(trained: Any, shape: ModelShape, source: Path) -> None:
    """`trained`: the model shape recorded in the checkpoint; None in checkpoints of earlier versions."""
    if trained is None:
        return
    values = json.loads(json.dumps(asdict(shape)))
    for name in values:
        recorded = trained.get(name) if isinstance(trained, dict) else None
        if isinstance(recorded, dict) and "attention_factor" in recorded:
            continue  # earlier versions recorded the rotary embedding in other fields
        if values[name] != recorded:
            difference = f"has {name}={values[name]}, and the model in the checkpoint {name}={recorded}"
            raise ConfigError(f"--model={source}: {difference}; {_HINT}")


def _check_model(stored: StoredWeights, shape: ModelShape, source: Path) -> None:
    """Raises ConfigError unless the checkpoint and the model have the same tensors in the same shapes."""
    for entry in _exported_entries(shape):
        actual, expected = stored.shape(entry.megatron), hf_to_megatron.shard_shape(entry, tp=1)
        if entry.cut is TensorCut.VOCABULARY and actual and actual[0] > expected[0]:
            padded = not stored.read(entry.megatron)[expected[0] :].any()
            actual = (expected[0], *actual[1:]) if padded else actual
        if actual != expected:
            state = f"has shape {actual}" if actual else "is missing"
            raise ConfigError(
                f"--model={source}: {entry.megatron} has shape {expected}; in the checkpoint it {state}; {_HINT}"
            )
        if not (dtype := stored.dtype(entry.megatron)).is_floating_point:
            raise ConfigError(f"{stored.folder}: {entry.megatron} has dtype {dtype}, weights must be floating-point")
    if stored.shape(f"decoder.layers.{shape.layers}.input_layernorm.weight"):
        raise ConfigError(f"--model={source}: has {shape.layers} layers, the checkpoint has more; {_HINT}")
    if extra := stored.uncovered_keys(entry.megatron for entry in _exported_entries(shape)):
        raise ConfigError(f"--model={source}: lacks all or part of {extra[0]}, which the checkpoint has; {_HINT}")


def _check_written(
    stored: StoredWeights | StoredAdapters, tensors: HFTensors, shape: ModelShape, dtype: torch.dtype
) -> None:
    """Raises ConfigError unless both hold the same values, bit for bit, in `dtype`, the dtype of the output."""
    for entry in counted(_exported_entries(shape), "comparing with the source", "parameter"):
        parameter = stored.read(entry.megatron)
        for piece in hf_to_megatron.pieces(entry, shape, tp=1, tp_rank=0):
            blocks = parameter[piece.shard_index], tensors.read(piece.hf, piece.hf_index)
            stored_bytes, hf_bytes = (block.to(dtype).contiguous().view(torch.uint8) for block in blocks)
            if not torch.equal(stored_bytes, hf_bytes):
                raise ConfigError(f"{piece.hf}: differs from the source when read back; check this host's memory")


@contextmanager
def _refusing(folder: Path) -> Iterator[None]:
    """Raise ConfigError if writing to the disk fails within the block."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        # If the disk is full, torch.save fails a second time when it closes its file.
        reason = error.__context__ if isinstance(error, RuntimeError) else error
        if not isinstance(reason, OSError | SafetensorError):
            raise
        raise ConfigError(f"{folder}: cannot be written ({reason}); give another folder, or free disk space") from error


class _Convert(SaveItems):
    """Save planner for the parameters of a Hugging Face folder; converts one at a time."""

    def __init__(self, tensors: HFTensors, shape: ModelShape, dtype: torch.dtype | None) -> None:
        self._tensors, self._shape = tensors, shape
        self.dtype = dtype or tensors.dtype
        super().__init__(list(self._requests()))

    def plans(self, file_bytes: int) -> Iterator[SavePlan]:
        """A plan for each file: parameters of at most `file_bytes` in total, or a single larger one."""
        sizes = (prod(item.tensor_data.chunk.sizes) * self.dtype.itemsize for item in self._items)
        return map(SavePlan, hf.size_groups(zip(self._items, sizes, strict=True), file_bytes))

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        parameter = self._tensors.shard(super().resolve_data(write_item), self._shape, 1, 0, self.dtype)
        return parameter.view(write_item.tensor_data.chunk.sizes)

    def _requests(self) -> Iterator[tuple[WriteItem, WeightEntry]]:
        entries = _exported_entries(self._shape)
        locations = _locations(entry.megatron for entry in entries)
        stacks: dict[str, tuple[int, ...]] = {}
        for key, index in locations.values():
            stacks[key] = tuple(map(max, stacks.get(key, index), index))
        for entry in entries:
            key, index = locations[entry.megatron]
            shard = hf_to_megatron.shard_shape(entry, tp=1)
            offsets, sizes = (*index, *(0 for _ in shard)), (*(1 for _ in index), *shard)
            global_shape = (*(last + 1 for last in stacks[key]), *shard)
            yield write_item(key, global_shape, offsets, sizes, self.dtype), entry


def _locations(names: Iterable[str]) -> dict[str, Location]:
    """Megatron-Core's location of each parameter: layers are stacked if all of them have the same parameters."""
    names = list(names)
    layers: dict[str, set[str]] = {}
    for match in filter(None, map(LAYER.fullmatch, names)):
        layers.setdefault(match[1], set()).add(match[2])
    apart = len(set(map(frozenset, layers.values()))) > 1

    def fused(name: str) -> bool:
        """Whether this norm precedes a linear layer; norms before experts do not."""
        match = LAYER.fullmatch(name)
        return match is not None and f"{FUSED.get(match[2], '').rpartition('.')[0]}.weight" in layers[match[1]]

    return {name: locate(name, apart, fused(name)) for name in names}
