"""What the safetensors of a Hugging Face folder hold, from their headers alone: no weight is read.

Nothing here imports a framework. What is not whole, or not the model that config.json describes, is named and refused.
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

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# What is converted to the dtype of a run. Others are quantised: without their scales they are other numbers.
LOADABLE = ("BF16", "F16", "F32", "F64")
_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2}
_BYTES |= {"I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
_LARGEST_HEADER = 100_000_000  # bytes; the format's own limit
# Buffers that old checkpoints hold; every implementation computes them anew.
_COMPUTED = re.compile(r".*rotary_emb\.inv_freq$")
_FITTING = "give a folder that fits its config.json"
_WHOLE = "give a complete folder of safetensors"


class StoredTensor(NamedTuple):
    """A tensor in `file`; `dtype` as safetensors call it."""

    file: str
    dtype: str
    shape: Shape


def read(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor in `folder`, by name; ValueError, one line, where a file is missing, cut or not what the index says.

    Files are those that the index names, without one model.safetensors. They lie in the folder itself.
    """
    indexed = _index(folder)
    found: dict[str, StoredTensor] = {}
    for file in sorted(set(indexed.values())) if indexed else [SINGLE]:
        if not (folder / file).is_file():
            raise ValueError(_missing(folder, file))
        for name, tensor in _header(folder / file):
            if name in found:
                raise ValueError(f"{found[name].file} and {file} both hold {name}; {_WHOLE}")
            found[name] = tensor
    for name, file in indexed.items():
        if name not in found or found[name].file != file:
            raise ValueError(f"{INDEX} says that {file} holds {name}, and it does not; {_WHOLE}")
    return found


def of_model(folder: Path, shape: ModelShape) -> dict[str, StoredTensor]:
    """The tensors of a model of `shape` in `folder`; ValueError also for one that is missing, unexpected or another.

    What is not loaded is left out.
    """
    stored, expected = read(folder), hf_shapes(shape)
    extra = {name for name in stored.keys() - expected.keys() if not _COMPUTED.fullmatch(name)}
    if shape.tied:
        extra.discard("lm_head.weight")  # the same tensor, written out a second time
    if extra:
        raise ValueError(f"{min(extra)} is unexpected; {_FITTING}")
    for name, wanted in expected.items():
        if name not in stored:
            raise ValueError(f"{name} is missing; {_WHOLE}")
        if stored[name].shape != wanted:
            raise ValueError(f"{name} has shape {stored[name].shape}, config.json asks for {wanted}; {_FITTING}")
        if stored[name].dtype not in LOADABLE:
            known = ", ".join(LOADABLE)
            raise ValueError(f"{name} has dtype {stored[name].dtype}, and {known} can be loaded; give such weights")
    return {name: stored[name] for name in expected}


def _index(folder: Path) -> dict[str, str]:
    """The file of each tensor by the index; empty without one."""
    if not (folder / INDEX).is_file():
        return {}
    invalid = f"{INDEX} has no valid weight_map; {_WHOLE}"
    try:
        found = json.loads((folder / INDEX).read_text())["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(invalid) from error
    if not (isinstance(found, dict) and found and all(isinstance(file, str) for file in found.values())):
        raise ValueError(invalid)
    for file in set(found.values()):
        if Path(file).name != file or file == ".." or "\0" in file:
            raise ValueError(f"{INDEX} names {file!r}, which is no file of the folder itself; {_WHOLE}")
    return found


def _missing(folder: Path, file: str) -> str:
    pickled = min((other.name for other in folder.glob("*.bin")), default=None)
    if pickled is None:
        return f"{file} is missing; {_WHOLE}"
    out = "save it again with transformers, AutoModelForCausalLM.from_pretrained(…).save_pretrained(…)"
    return f"{file} is missing, and {pickled}, a pickle, is not read; {out}"


def _header(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    """What the header of a file says of its tensors, which fill the rest of it."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _LARGEST_HEADER):
            raise ValueError(f"{file.name} is cut, or no file of safetensors ({size} bytes); {_WHOLE}")
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            found = sorted(_tensor(file.name, name, said) for name, said in header.items())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{file.name} is corrupt: its header is no header of safetensors; {_WHOLE}") from error
    end = 0
    for start, stop, name, tensor in found:
        if start != end:
            raise ValueError(f"{file.name} is corrupt: {name} does not follow the tensor before; {_WHOLE}")
        if tensor.dtype in _BYTES and stop - start != prod(tensor.shape) * _BYTES[tensor.dtype]:
            raise ValueError(f"{file.name} is corrupt: {name} has not the bytes of its shape; {_WHOLE}")
        end = stop
        yield name, tensor
    if size != 8 + length + end:
        raise ValueError(f"{file.name} is cut: it has {size} bytes, its header says {8 + length + end}; {_WHOLE}")


def _tensor(file: str, name: str, said: dict[str, Any]) -> tuple[int, int, str, StoredTensor]:
    """First and last byte of a tensor, and what it is."""
    start, stop = said["data_offsets"]
    numbers = [*said["shape"], start, stop]
    if not all(type(number) is int and number >= 0 for number in numbers) or not isinstance(said["dtype"], str):
        raise ValueError(name)
    return start, stop, name, StoredTensor(file, said["dtype"], tuple(said["shape"]))
