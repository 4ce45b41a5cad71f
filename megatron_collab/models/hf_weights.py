"""Reads the headers of a Hugging Face folder's safetensors: names, dtypes and shapes; no weights but a doubtful head.

Imports no framework except for that head. Raises ValueError if a file is incomplete or does not match config.json.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from megatron_collab.models.hf_config import ModelShape
from megatron_collab.models.hf_to_megatron import Shape, hf_shapes
from megatron_collab.runtime import files
from megatron_collab.settings.documents import parse_settings

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Dtypes that are converted to the run's. All others are quantized, and meaningless without their scales.
LOADABLE = ("BF16", "F16", "F32", "F64")
# Buffers in old checkpoints, which every implementation recomputes.
_COMPUTED = re.compile(r".*rotary_emb\.inv_freq$")
_CONSOLIDATED = "consolidated.safetensors"  # Mistral's own format, which neither transformers nor SGLang reads
_ROWS = 4096  # of the embedding, compared at a time
_FITTING = "give a folder that fits its config.json"
_WHOLE = "give a complete folder of safetensors"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class StoredTensor(NamedTuple):
    """A tensor in `file`; `dtype` as named by safetensors."""

    file: str
    dtype: str
    shape: Shape


def read(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor in `folder`, by name. Raises a one-line ValueError if a file is missing, cut or not as indexed.

    Reads the files that the index names or, without an index, model.safetensors, from the folder itself. Refuses a
    folder in which transformers and SGLang would load different files.
    """
    indexed = _index(folder)
    if (folder / SINGLE).is_file():
        weight_files = {file.name for file in folder.glob("*.safetensors")} - {_CONSOLIDATED} | set(indexed.values())
        if other := min(weight_files - {SINGLE}, default=None):
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
    if shape.tied and _HEAD in stored and not _is_tied(folder, stored):
        message = f"tie_word_embeddings=true in config.json, but {_HEAD} differs from {_EMBEDDING}"
        raise ValueError(f"{message}; set it to false, as transformers loads the model, or remove {_HEAD}")
    return {name: stored[name] for name in expected}


def embedding_rows(tensors: Mapping[str, StoredTensor]) -> int | None:
    """Number of token ids of a model of any family; None if its embedding has an unknown name."""
    rows = [tensor.shape[0] for name, tensor in tensors.items() if name.endswith("embed_tokens.weight")]
    return max(rows, default=None)


def _is_tied(folder: Path, stored: Mapping[str, StoredTensor]) -> bool:
    """Whether the head has the values of the embedding."""
    pair, (rows, _) = (_EMBEDDING, _HEAD), stored[_EMBEDDING].shape
    embedding, head = (safe_open(folder / stored[name].file, "pt", backend="pread").get_slice(name) for name in pair)
    blocks = (slice(start, min(start + _ROWS, rows)) for start in range(0, rows, _ROWS))
    same_shape = stored[_HEAD].shape == stored[_EMBEDDING].shape
    return same_shape and all(bool((embedding[block] == head[block]).all()) for block in blocks)


def _index(folder: Path) -> dict[str, str]:
    """Tensor name -> file, from the index; empty if there is no index."""
    if not (folder / INDEX).is_file():
        return {}
    invalid = f"{INDEX} has no valid weight_map; {_WHOLE}"
    try:
        weight_map = parse_settings(files.read_text(folder / INDEX))["weight_map"]
    except (ValueError, KeyError) as error:
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
    """Yield (name, tensor) from the header of a file, in file order; safetensors checks that they fill the file."""
    if reason := files.irregular(file):
        raise ValueError(f"{file.name} {reason}")
    try:
        with safe_open(file, framework="numpy", backend="pread") as header:
            for name in header.offset_keys():
                tensor = header.get_slice(name)
                yield name, StoredTensor(file.name, tensor.get_dtype(), tuple(tensor.get_shape()))
    except SafetensorError as error:
        raise ValueError(f"{file.name} is truncated or corrupt ({error}); {_WHOLE}") from error
