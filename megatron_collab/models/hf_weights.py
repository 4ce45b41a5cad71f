"""Reads only the headers of a Hugging Face folder's safetensors: names, dtypes and shapes, no weights.

Imports no framework. Raises ValueError if a file is incomplete or does not match the model of config.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from megatron_collab.models.hf_config import ModelShape
from megatron_collab.models.hf_to_megatron import Shape, hf_shapes
from megatron_collab.runtime import files

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Dtypes that are converted to the run's. All others are quantized, and meaningless without their scales.
LOADABLE = ("BF16", "F16", "F32", "F64")
_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2}
_BYTES |= {"I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
_LARGEST_HEADER = 100_000_000  # bytes; limit of the format
# Buffers in old checkpoints, which every implementation recomputes.
_COMPUTED = re.compile(r".*rotary_emb\.inv_freq$")
_FITTING = "give a folder that fits its config.json"
_WHOLE = "give a complete folder of safetensors"


class StoredTensor(NamedTuple):
    """A tensor in `file`; `dtype` as named by safetensors."""

    file: str
    dtype: str
    shape: Shape


def read(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor in `folder`, by name. Raises a one-line ValueError if a file is missing, cut or not as indexed.

    Reads the files that the index names or, without an index, model.safetensors, from the folder itself.
    """
    indexed = _index(folder)
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(indexed.values())) if indexed else [SINGLE]:
        if not (folder / file).is_file():
            raise ValueError(_missing(folder, file))
        for name, tensor in _header(folder / file):
            if name in tensors:
                raise ValueError(f"{tensors[name].file} and {file} both hold {name}; {_WHOLE}")
            tensors[name] = tensor
    for name, file in indexed.items():
        if name not in tensors or tensors[name].file != file:
            raise ValueError(f"{INDEX} says that {file} holds {name}, but it does not; {_WHOLE}")
    return tensors


def model_tensors(folder: Path, shape: ModelShape) -> dict[str, StoredTensor]:
    """The tensors of a model of `shape` in `folder`, without tensors that are not loaded.

    Raises ValueError like `read`, and if a tensor is missing, unexpected or has the wrong shape or dtype.
    """
    stored, expected = read(folder), hf_shapes(shape)
    extra = {name for name in stored.keys() - expected.keys() if not _COMPUTED.fullmatch(name)}
    if shape.tied:
        extra.discard("lm_head.weight")  # a second copy of the embedding
    if extra:
        raise ValueError(f"{min(extra)} is unexpected; {_FITTING}")
    for name, sides in expected.items():
        if name not in stored:
            raise ValueError(f"{name} is missing; {_WHOLE}")
        if stored[name].shape != sides:
            raise ValueError(f"{name} has shape {stored[name].shape}, config.json asks for {sides}; {_FITTING}")
        if stored[name].dtype not in LOADABLE:
            known = ", ".join(LOADABLE)
            raise ValueError(f"{name} has dtype {stored[name].dtype}, and {known} can be loaded; give such weights")
    return {name: stored[name] for name in expected}


def _index(folder: Path) -> dict[str, str]:
    """Tensor name -> file, from the index; empty if there is no index."""
    if not (folder / INDEX).is_file():
        return {}
    invalid = f"{INDEX} has no valid weight_map; {_WHOLE}"
    try:
        weight_map = json.loads(files.read_text(folder / INDEX))["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(invalid) from error
    if not (isinstance(weight_map, dict) and weight_map and all(isinstance(file, str) for file in weight_map.values())):
        raise ValueError(invalid)
    for file in set(weight_map.values()):
        if Path(file).name != file or file == ".." or "\0" in file:
            raise ValueError(f"{INDEX} names {file!r}, which is not a file in this folder; {_WHOLE}")
    return weight_map


def _missing(folder: Path, file: str) -> str:
    pickled = min((other.name for other in folder.glob("*.bin")), default=None)
    if pickled is None:
        return f"{file} is missing; {_WHOLE}"
    out = "save it again with transformers, AutoModelForCausalLM.from_pretrained(…).save_pretrained(…)"
    return f"{file} is missing, and {pickled}, a pickle, is not read; {out}"


def _header(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Yield (name, tensor) from the header of a file, in file order; the tensors must fill the rest of the file."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _LARGEST_HEADER):
            raise ValueError(f"{file.name} is truncated, or not a safetensors file ({size} bytes); {_WHOLE}")
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            tensors = sorted(_tensor(file.name, name, fields) for name, fields in header.items())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{file.name} is corrupt: it has no safetensors header; {_WHOLE}") from error
    end = 0
    for start, stop, name, tensor in tensors:
        if start != end:
            raise ValueError(f"{file.name} is corrupt: {name} does not follow the previous tensor; {_WHOLE}")
        if tensor.dtype in _BYTES and stop - start != prod(tensor.shape) * _BYTES[tensor.dtype]:
            raise ValueError(f"{file.name} is corrupt: {name} does not have the bytes of its shape; {_WHOLE}")
        end = stop
        yield name, tensor
    if size != 8 + length + end:
        raise ValueError(f"{file.name} is truncated: it has {size} bytes, its header says {8 + length + end}; {_WHOLE}")


def _tensor(file: str, name: str, fields: dict[str, Any]) -> tuple[int, int, str, StoredTensor]:
    """(start, stop, name, tensor) from a header entry; start and stop are byte offsets of its data."""
    start, stop = fields["data_offsets"]
    numbers = [*fields["shape"], start, stop]
    if not all(type(number) is int and number >= 0 for number in numbers) or not isinstance(fields["dtype"], str):
        raise ValueError(name)
    return start, stop, name, StoredTensor(file, fields["dtype"], tuple(fields["shape"]))
