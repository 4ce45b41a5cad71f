"""The parameters in a checkpoint under the names of `hf_to_megatron.table`, read one by one without ranks."""

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

from megatron_collab.config import ConfigError
from megatron_collab.models import hf_to_megatron
from megatron_collab.models.hf_to_megatron import LAYER, Shape

METADATA = ".metadata"  # of torch.distributed.checkpoint: which tensor lies where
FUSED = {norm: fused for fused, norm in hf_to_megatron.FUSED_NAMES.items()}
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(.+)")
_OTHERS = ("optimizer.", "critic.", "reference.")  # how keys begin that are not of the policy's weights

Location = tuple[str, tuple[int, ...]]


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
    """The parameters of the main network in the step_N folder `checkpoint`.

    A checkpoint holds global tensors, whatever layout wrote it. What `hf_to_megatron.table` calls a parameter on one
    tensor-parallel rank is such a tensor, or a slice of one where Megatron-Core stacks layers or experts.
    """

    def __init__(self, checkpoint: Path) -> None:
        """ConfigError where it cannot be read."""
        self.folder = checkpoint
        self._reader = FileSystemReader(checkpoint)
        try:
            metadata = self._reader.read_metadata()
        except Exception as error:  # a pickle: it raises whatever is in it
            raise ConfigError(f"{checkpoint}: is damaged ({METADATA} is corrupt); give another checkpoint") from error
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

    def beside(self, names: Iterable[str]) -> list[str]:
        """The tensors of which it holds more than the parameters `names`."""
        read: dict[str, set[tuple[int, ...]]] = defaultdict(set)
        for key, index in map(self._locate, names):
            read[key].add(index)

        def complete(key: str) -> bool:
            stacked = len(next(iter(read[key]), ()))
            return len(read[key]) == prod(self._tensors[key].size[:stacked])

        return sorted(key for key in self._tensors if not key.startswith(_OTHERS) and not complete(key))

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
