"""Reads the headers of a Hugging Face folder's safetensors: names, dtypes and shapes; no weights but a doubtful head.

Imports no framework. Raises ValueError if a file is incomplete or does not match the model of config.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import starmap
from math import prod
from operator import ne
from pathlib import Path
from typing import Any, NamedTuple

from megatron_collab.models.hf_config import ModelShape
from megatron_collab.models.hf_to_megatron import Shape, hf_shapes

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Dtypes that are converted to the run's. All others are quantized, and meaningless without their scales.
LOADABLE = ("BF16", "F16", "F32", "F64")
_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2}
_BYTES |= {"I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
_LARGEST_HEADER = 100_000_000  # bytes; limit of the format
# Buffers in old checkpoints, which every implementation recomputes.
_COMPUTED = re.compile(r".*rotary_emb\.inv_freq$")
_CONSOLIDATED = "consolidated.safetensors"  # Mistral's own format, which neither transformers nor SGLang reads
_CHUNK = 1 << 24  # bytes that are compared at a time
_FITTING = "give a folder that fits its config.json"
_WHOLE = "give a complete folder of safetensors"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class StoredTensor(NamedTuple):
    """A tensor in `file`, whose data begin at byte `start`; `dtype` as named by safetensors."""

    file: str
    dtype: str
    shape: Shape
    start: int


def read(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor in `folder`, by name. Raises a one-line ValueError if a file is missing, cut or not as indexed.

    Reads the files that the index names or, without an index, model.safetensors, from the folder itself. Refuses a
    folder in which transformers and SGLang would load different files.
    """
    indexed = _index(folder)
    if (folder / SINGLE).is_file():
        others = {file.name for file in folder.glob("*.safetensors")} - {_CONSOLIDATED} | set(indexed.values())
        if other := min(others - {SINGLE}, default=None):
            message = f"{SINGLE}, which transformers loads, and {other}, which SGLang loads"
            raise ValueError(f"there are weights in {message}; remove the stale one, and {INDEX} if it names that")
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

    Raises ValueError like `read`, if a tensor is missing, unexpected or has the wrong shape or dtype, and if a tied
    model has a head that differs from its embedding.
    """
    stored, expected = read(folder), hf_shapes(shape)
    extra = {name for name in stored.keys() - expected.keys() if not _COMPUTED.fullmatch(name)}
    if shape.tied:
        extra.discard(_HEAD)
    if extra:
        raise ValueError(f"{min(extra)} is unexpected; {_FITTING}")
    for name, sides in expected.items():
        if name not in stored:
            out = ", or set tie_word_embeddings=true in config.json if the embedding is its head" * (name == _HEAD)
            raise ValueError(f"{name} is missing; {_WHOLE}{out}")
        if stored[name].shape != sides:
            raise ValueError(f"{name} has shape {stored[name].shape}, config.json asks for {sides}; {_FITTING}")
        if stored[name].dtype not in LOADABLE:
            known = ", ".join(LOADABLE)
            raise ValueError(f"{name} has dtype {stored[name].dtype}, and {known} can be loaded; give such weights")
    tied = [_data(folder, stored[name]) for name in (_EMBEDDING, _HEAD)] if shape.tied and _HEAD in stored else []
    if any(starmap(ne, zip(*tied, strict=True))):
        message = f"tie_word_embeddings=true in config.json, but {_HEAD} differs from {_EMBEDDING}"
        raise ValueError(f"{message}; set it to false, as transformers loads the model, or remove {_HEAD}")
    return {name: stored[name] for name in expected}


def embedding_rows(tensors: Mapping[str, StoredTensor]) -> int | None:
    """Number of token ids of a model of any family; None if its embedding has an unknown name."""
    rows = [tensor.shape[0] for name, tensor in tensors.items() if name.endswith("embed_tokens.weight")]
    return max(rows, default=None)


def _data(folder: Path, tensor: StoredTensor) -> Iterator[object]:
    """The shape and dtype of a tensor, then its bytes in pieces."""
    yield tensor.shape, tensor.dtype
    with (folder / tensor.file).open("rb") as stream:
        stream.seek(tensor.start)
        size = prod(tensor.shape) * _BYTES[tensor.dtype]
        yield from (stream.read(min(_CHUNK, size - at)) for at in range(0, size, _CHUNK))


def _index(folder: Path) -> dict[str, str]:
    """Tensor name -> file, from the index; empty if there is no index."""
    if not (folder / INDEX).is_file():
        return {}
    invalid = f"{INDEX} has no valid weight_map; {_WHOLE}"
    try:
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
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
            tensors = sorted(_tensor(file.name, name, fields, 8 + length) for name, fields in header.items())
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


def _tensor(file: str, name: str, fields: dict[str, Any], data: int) -> tuple[int, int, str, StoredTensor]:
    """(start, stop, name, tensor) from a header entry; start and stop are byte offsets from `data`."""
    start, stop = fields["data_offsets"]
    numbers = [*fields["shape"], start, stop]
    if not all(type(number) is int and number >= 0 for number in numbers) or not isinstance(fields["dtype"], str):
        raise ValueError(name)
    return start, stop, name, StoredTensor(file, fields["dtype"], tuple(fields["shape"]), data + start)
