"""A Hugging Face folder as files: which tensor lies in which, and what there is beside tensors."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from megatron_collab.config import ConfigError
from megatron_collab.models import hf_config
from megatron_collab.models.hf_to_megatron import Index, ModelShape, Shape, hf_shapes

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Buffers that old checkpoints hold; every implementation computes them anew.
_COMPUTED = re.compile(r".*rotary_emb\.inv_freq$")
_WEIGHT_FILE = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|h5|msgpack|index\.json)$")


def read_shape(folder: Path) -> ModelShape:
    """The shape of the model in `folder`; ConfigError where there is none, or one that is not supported."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder}: no config.json there; give the folder of a Hugging Face model")
    try:
        return hf_config.read(folder / "config.json")
    except ValueError as error:
        raise ConfigError(f"{folder}: {error}; give another model") from error


class HFTensors:
    """The tensors of a Hugging Face folder, read without mapping files into memory."""

    def __init__(self, folder: Path, shape: ModelShape) -> None:
        """ConfigError where a file or a tensor is missing, one is too many, or has not the shape of config.json."""
        self._file_of: dict[str, safe_open] = {}
        for name in _files(folder):
            if not (folder / name).is_file():
                raise ConfigError(f"{folder}: no {name} there; give a complete folder of safetensors")
            try:
                opened = safe_open(folder / name, framework="pt", device="cpu", backend="pread")
            except SafetensorError as error:
                raise ConfigError(f"{folder}: {name} is corrupt ({error}); give a complete folder") from error
            self._file_of |= dict.fromkeys(opened.keys(), opened)
        expected = hf_shapes(shape)
        extra = {name for name in self._file_of.keys() - expected.keys() if not _COMPUTED.fullmatch(name)}
        if shape.tied:
            extra.discard("lm_head.weight")  # the same tensor, written out a second time
        if extra:
            raise ConfigError(f"{folder}: {min(extra)} is unexpected; give a folder that fits its config.json")
        for tensor, wanted in expected.items():
            if tensor not in self._file_of:
                raise ConfigError(f"{folder}: {tensor} is missing; give a complete folder of safetensors")
            found = tuple(self._file_of[tensor].get_slice(tensor).get_shape())
            if found != wanted:
                raise ConfigError(f"{folder}: {tensor} has shape {found}, config.json asks for {wanted}")

    def read(self, tensor: str, index: Index | None = None) -> torch.Tensor:
        """The tensor, or only the block of it at `index`."""
        opened = self._file_of[tensor]
        found: torch.Tensor = opened.get_tensor(tensor) if index is None else opened.get_slice(tensor)[index]
        return found


def _files(folder: Path) -> list[str]:
    """The names of the files with tensors; ConfigError where the index does not say them."""
    index = folder / INDEX
    if not index.is_file():
        return [SINGLE]
    try:
        names = {str(name) for name in json.loads(index.read_text())["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{folder}: {INDEX} has no valid weight_map; give a complete folder of safetensors"
        ) from error
    return sorted(names)


def plan_files(shapes: Mapping[str, Shape], item_bytes: int, file_bytes: int) -> dict[str, list[str]]:
    """File name -> its tensors, in the order of `shapes`: at most `file_bytes` each, a larger tensor alone."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes.items():
        size = prod(shape) * item_bytes
        if groups[-1] and filled + size > file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, start=1)}


def write_rest(folder: Path, source: Path, dtype: torch.dtype, files: Mapping[str, list[str]]) -> None:
    """Give `folder`, which holds the safetensors `files`, all that `source` has beside weights, and the index."""
    for file in source.iterdir():
        if file.is_file() and not _WEIGHT_FILE.fullmatch(file.name):
            shutil.copy2(file, folder)
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)  # how transformers 4 wrote it
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if len(files) > 1:
        shapes = hf_shapes(ModelShape.from_hf(config))
        total = sum(prod(shape) for shape in shapes.values()) * dtype.itemsize
        where = {tensor: file for file, tensors in files.items() for tensor in tensors}
        (folder / INDEX).write_text(
            json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2) + "\n"
        )
