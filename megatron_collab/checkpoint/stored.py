"""Reads parameters of a checkpoint one by one, without ranks, by the names of `hf_to_megatron.table`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from itertools import product
from math import prod
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader, LoadPlan
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_collab.models import hf_to_megatron
from megatron_collab.models.hf_to_megatron import LAYER, Shape
from megatron_collab.settings import ConfigError

METADATA = ".metadata"  # of torch.distributed.checkpoint: the file and offset of each tensor
FUSED = {norm: fused for fused, norm in hf_to_megatron.FUSED_NAMES.items()}
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(.+)")
_NOT_WEIGHTS = ("optimizer.", "critic.", "reference.")  # prefixes of keys that are not weights of the policy

Location = tuple[str, tuple[int, ...]]


def locate(name: str, apart: bool, fused: bool) -> Location:
    """Key of a parameter in a checkpoint, and its index in that tensor: layer and expert, if they are stacked.

    `apart`: layers are not stacked; Megatron-Core does that if they are not alike. `fused`: a norm has the name of the
    linear layer that it precedes, as in all of Megatron-Core's dense layers.
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


class StoredWeights:
    """The parameters of the main network in the step_N folder `checkpoint`.

    A checkpoint holds global tensors, whatever layout wrote it. A parameter of `hf_to_megatron.table` for one
    tensor-parallel rank is such a tensor, or a slice of one if Megatron-Core stacks layers or experts.
    """

    def __init__(self, checkpoint: Path) -> None:
        """Raises ConfigError if it cannot be read."""
        self.folder = checkpoint
        self._reader = FileSystemReader(checkpoint)
        try:
            metadata = self._reader.read_metadata()
        except Exception as error:  # a pickle: it may raise anything
            raise ConfigError(f"{checkpoint}: is damaged ({METADATA} is corrupt); give another checkpoint") from error
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._tensors = {
            key: tensor
            for key, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
        }
        self._parts: dict[str, dict[tuple[int, ...], list[ChunkStorageMetadata]]] = {}

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[self._locate(name)[0]].properties.dtype

    def shape(self, name: str) -> Shape | None:
        """Shape of a parameter on one tensor-parallel rank, the vocabulary padded; None if it is not stored."""
        key, index = self._locate(name)
        if key not in self._tensors:
            return None
        stack, size = self._tensors[key].size[: len(index)], self._tensors[key].size[len(index) :]
        return tuple(size) if all(i < n for i, n in zip(index, stack, strict=True)) else None

    def uncovered_keys(self, names: Iterable[str]) -> list[str]:
        """Keys of the tensors that are not fully covered by the parameters `names`."""
        read: dict[str, set[tuple[int, ...]]] = defaultdict(set)
        for key, index in map(self._locate, names):
            read[key].add(index)

        def complete(key: str) -> bool:
            stacked = len(next(iter(read[key]), ()))
            return len(read[key]) == prod(self._tensors[key].size[:stacked])

        return sorted(key for key in self._tensors if not key.startswith(_NOT_WEIGHTS) and not complete(key))

    def read(self, name: str) -> torch.Tensor:
        """The full parameter."""
        key, index = self._locate(name)
        tensor = self._tensors[key]
        shape = tensor.size[len(index) :]
        chunk = ChunkStorageMetadata(
            torch.Size((*index, *(0 for _ in shape))), torch.Size((*(1 for _ in index), *shape))
        )
        parts = TensorStorageMetadata(tensor.properties, tensor.size, self._parts_at(key, index))
        target = torch.empty(chunk.sizes, dtype=tensor.properties.dtype)
        plan = LoadPlan(create_read_items_for_chunk_list(key, parts, [chunk]))
        self._reader.read_data(plan, _Into(target)).wait()
        return target[(0,) * len(index)]

    def _locate(self, name: str) -> Location:
        options = [locate(name, apart, fused) for apart, fused in product((False, True), repeat=2)]
        return next((location for location in options if location[0] in self._tensors), options[0])

    def _parts_at(self, key: str, index: tuple[int, ...]) -> list[ChunkStorageMetadata]:
        """The stored chunks of one slice. They are grouped once per key: a key has up to layers x experts slices."""
        if key not in self._parts:
            groups = self._parts[key] = {}
            for part in self._tensors[key].chunks:
                groups.setdefault(tuple(part.offsets[: len(index)]), []).append(part)
        return self._parts[key][index]


class _Into(DefaultLoadPlanner):
    """A load planner that reads into a single tensor."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self._target = target

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._target
