"""The table between Hugging Face tensors and Megatron-Core shards: one declaration for every direction.

Loading, export and publishing all move data along the same `Piece`s, so they cannot disagree. Nothing here
imports a framework: shapes are tuples, slices are slices.

    table(shape)                       what exists: an `Entry` per Megatron parameter, global layer numbers
    pieces(entry, shape, tp, tp_rank)  shard[piece.shard_index] <-> hf_tensor[piece.hf_index]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

Shape = tuple[int, ...]
Index = tuple[slice, ...]


@dataclass(frozen=True)
class Family:
    """What sets a model family apart: biases on q/k/v, RMSNorm on the heads of q and k."""

    qkv_bias: bool = False
    qk_norm: bool = False


FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
}

_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "rms_norm_eps",
    "vocab_size",
)

# Settings of config.json that change the computation, with the values that leave it as we compute it.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "attention_dropout": (None, 0, 0.0),
    "hidden_act": (None, "silu"),
    "mlp_bias": (None, False),
    "partial_rotary_factor": (None, 1, 1.0),
    "quantization_config": (None,),
    "use_sliding_window": (None, False),
}

# Megatron-Core's RoPE scaling has these numbers of Llama 3 built in; only the factor is free.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class ModelShape:
    """What config.json says about a decoder-only transformer: sizes, and what its family adds.

    `rope_factor` is the factor of Llama 3's RoPE scaling, None for plain RoPE.
    """

    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    norm_eps: float
    rope_theta: float
    rope_factor: float | None
    max_positions: int

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> ModelShape:
        """From the dictionary in config.json; ValueError names a field that is missing or not supported."""
        name = str(hf.get("model_type"))
        if name not in FAMILIES:
            raise ValueError(f"config.json: model_type={name!r} is not known; known are {', '.join(sorted(FAMILIES))}")
        family = FAMILIES[name]
        absent = [field for field in _REQUIRED if field not in hf]
        if absent:
            raise ValueError(f"config.json: {absent[0]} is missing")
        _check_neutral(hf, name)
        rope_theta, rope_factor = _rope(hf)
        heads = hf["num_attention_heads"]
        return cls(
            family=name,
            layers=hf["num_hidden_layers"],
            hidden=hf["hidden_size"],
            ffn=hf["intermediate_size"],
            heads=heads,
            kv_heads=hf.get("num_key_value_heads") or heads,
            head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
            vocab=hf["vocab_size"],
            tied=bool(hf.get("tie_word_embeddings", False)),
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            norm_eps=hf["rms_norm_eps"],
            rope_theta=rope_theta,
            rope_factor=rope_factor,
            max_positions=hf["max_position_embeddings"],
        )


def _check_neutral(hf: Mapping[str, Any], family: str) -> None:
    for field, neutral in _NEUTRAL.items():
        if hf.get(field) not in neutral:
            raise ValueError(f"config.json: {field}={hf[field]!r} is not supported; only {neutral[-1]!r} is")
    # Qwen writes a window that use_sliding_window then switches off; elsewhere the number alone decides.
    window = hf.get("sliding_window") if "use_sliding_window" not in hf else None
    if window is not None and window < hf["max_position_embeddings"]:
        raise ValueError(f"config.json: sliding_window={window!r} is not supported by {family}; only null is")
    if set(hf.get("layer_types") or ()) - {"full_attention"}:
        raise ValueError("config.json: layer_types has layers that are not full_attention; these are not supported")


def _rope(hf: Mapping[str, Any]) -> tuple[float, float | None]:
    """(base, Llama 3 factor or None); transformers 5 keeps both in rope_parameters, older ones apart."""
    field = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    rope = hf.get(field) or {}
    theta = rope.get("rope_theta", hf.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"config.json: {field}.partial_rotary_factor={rope['partial_rotary_factor']} is not supported")
    if kind == "default":
        return float(theta), None
    if kind != "llama3":
        raise ValueError(f"config.json: {field}.rope_type={kind!r} is not supported; default and llama3 are")
    for name, built_in in _LLAMA3_ROPE.items():
        if rope.get(name) != built_in:
            raise ValueError(f"config.json: {field}.{name}={rope.get(name)!r} is not supported; only {built_in} is")
    return float(theta), float(rope["factor"])


class Cut(Enum):
    """How a parameter is divided over the tensor-parallel ranks."""

    WHOLE = "every rank holds all of it"
    VOCABULARY = "dimension 0, padded to a multiple of the ranks"
    ROWS = "dimension 0"
    COLUMNS = "dimension 1"


class Join(Enum):
    """How the Hugging Face tensors of an entry lie in the Megatron tensor, along its rows."""

    ONE = "there is one tensor"
    QKV = "per query group: the rows of its query heads, then its key's, then its value's"
    STACK = "one after another, within each tensor-parallel shard"


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter: `hf` names and `shapes` are the tensors it is made of, in `join` order.

    `exported` is False for a second copy (the output layer of a tied model's last pipeline stage): it is
    filled on loading, never written out.
    """

    megatron: str
    hf: tuple[str, ...]
    shapes: tuple[Shape, ...]
    cut: Cut
    join: Join = Join.ONE
    exported: bool = True


@dataclass(frozen=True)
class Piece:
    """A block that a shard and a Hugging Face tensor have in common: shard[shard_index] is hf[hf_index]."""

    hf: str
    hf_index: Index
    shard_index: Index


# TransformerEngine fuses a norm into the linear layer that follows; the table knows the norms by their own names.
FUSED_NAMES: Mapping[str, str] = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def table(shape: ModelShape) -> tuple[Entry, ...]:
    """Every parameter of the model under its global Megatron name, in the order of a forward pass."""
    return tuple(_entries(shape))


def _entries(shape: ModelShape) -> Iterator[Entry]:
    vocabulary = (shape.vocab, shape.hidden)
    norm = (shape.hidden,)
    embedding = "model.embed_tokens.weight"
    yield Entry("embedding.word_embeddings.weight", (embedding,), (vocabulary,), Cut.VOCABULARY)
    for layer in range(shape.layers):
        yield from _layer(shape, f"decoder.layers.{layer}.", f"model.layers.{layer}.")
    yield Entry("decoder.final_layernorm.weight", ("model.norm.weight",), (norm,), Cut.WHOLE)
    if shape.tied:
        yield Entry("output_layer.weight", (embedding,), (vocabulary,), Cut.VOCABULARY, exported=False)
    else:
        yield Entry("output_layer.weight", ("lm_head.weight",), (vocabulary,), Cut.VOCABULARY)


def _layer(shape: ModelShape, megatron: str, hf: str) -> Iterator[Entry]:
    norm, head_norm = (shape.hidden,), (shape.head_dim,)
    rows = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.kv_heads * shape.head_dim)
    attention, mlp = hf + "self_attn.", hf + "mlp."

    def qkv(what: str) -> tuple[str, ...]:
        return tuple(f"{attention}{x}_proj.{what}" for x in "qkv")

    yield Entry(megatron + "input_layernorm.weight", (hf + "input_layernorm.weight",), (norm,), Cut.WHOLE)
    weights = tuple((n, shape.hidden) for n in rows)
    yield Entry(megatron + "self_attention.linear_qkv.weight", qkv("weight"), weights, Cut.ROWS, Join.QKV)
    if shape.qkv_bias:
        biases = tuple((n,) for n in rows)
        yield Entry(megatron + "self_attention.linear_qkv.bias", qkv("bias"), biases, Cut.ROWS, Join.QKV)
    if shape.qk_norm:
        for x in "qk":
            name = f"{megatron}self_attention.{x}_layernorm.weight"
            yield Entry(name, (f"{attention}{x}_norm.weight",), (head_norm,), Cut.WHOLE)
    projection = (shape.hidden, rows[0])
    yield Entry(
        megatron + "self_attention.linear_proj.weight", (attention + "o_proj.weight",), (projection,), Cut.COLUMNS
    )
    yield Entry(megatron + "pre_mlp_layernorm.weight", (hf + "post_attention_layernorm.weight",), (norm,), Cut.WHOLE)
    gate_up = (mlp + "gate_proj.weight", mlp + "up_proj.weight")
    yield Entry(megatron + "mlp.linear_fc1.weight", gate_up, ((shape.ffn, shape.hidden),) * 2, Cut.ROWS, Join.STACK)
    down = (shape.hidden, shape.ffn)
    yield Entry(megatron + "mlp.linear_fc2.weight", (mlp + "down_proj.weight",), (down,), Cut.COLUMNS)


def hf_shapes(shape: ModelShape) -> dict[str, Shape]:
    """Name and shape of every tensor of the Hugging Face checkpoint, in the order of the table."""
    return {name: hf for entry in table(shape) for name, hf in zip(entry.hf, entry.shapes, strict=True)}


def shard_shape(entry: Entry, tp: int) -> Shape:
    """Shape of the Megatron parameter on one tensor-parallel rank, padding of the vocabulary included."""
    rows, *columns = (sum(_rows(entry, hf, tp) for hf in entry.shapes), *entry.shapes[0][1:])
    if entry.cut is Cut.COLUMNS:
        columns = [_divide(columns[0], tp)]
    return (rows, *columns)


def _rows(entry: Entry, hf: Shape, tp: int) -> int:
    """Rows that one Hugging Face tensor has in the shard of a rank, padding included."""
    if entry.cut is Cut.VOCABULARY:
        return -(-hf[0] // tp)
    return _divide(hf[0], tp) if entry.cut is Cut.ROWS else hf[0]


def padded_vocab(shape: ModelShape, tp: int) -> int:
    """Rows of the embedding over all tensor-parallel ranks: the vocabulary, rounded up to a multiple of tp."""
    return -(-shape.vocab // tp) * tp


def writes(entry: Entry, tp_rank: int) -> bool:
    """Whether this tensor-parallel rank is the one that exports its pieces of the entry."""
    return entry.exported and (entry.cut is not Cut.WHOLE or tp_rank == 0)


def pieces(entry: Entry, shape: ModelShape, tp: int, tp_rank: int) -> tuple[Piece, ...]:
    """What the shard of `tp_rank` shares with the Hugging Face tensors; padding rows are in no piece.

    Indices have a slice with explicit bounds for every dimension. ValueError if tp does not divide a size.
    """
    if entry.join is Join.QKV:
        return tuple(_qkv_pieces(entry, shape, tp, tp_rank))
    tail = tuple(slice(0, n) for n in entry.shapes[0][1:])
    if entry.cut is Cut.COLUMNS:
        rows, width = slice(0, entry.shapes[0][0]), _divide(entry.shapes[0][1], tp)
        columns = slice(tp_rank * width, (tp_rank + 1) * width)
        return (Piece(entry.hf[0], (rows, columns), (rows, slice(0, width))),)
    found, row = [], 0
    for name, hf in zip(entry.hf, entry.shapes, strict=True):
        height = _rows(entry, hf, tp)
        start = 0 if entry.cut is Cut.WHOLE else tp_rank * height
        stop = min(start + height, hf[0])
        if start < stop:
            found.append(Piece(name, (slice(start, stop), *tail), (slice(row, row + stop - start), *tail)))
        row += height
    return tuple(found)


def _qkv_pieces(entry: Entry, shape: ModelShape, tp: int, tp_rank: int) -> Iterator[Piece]:
    groups = _divide(shape.kv_heads, tp)
    # rows that one query group has in q, k and v
    heights = (_divide(shape.heads, shape.kv_heads) * shape.head_dim, shape.head_dim, shape.head_dim)
    tail = tuple(slice(0, n) for n in entry.shapes[0][1:])
    row = 0
    for group in range(tp_rank * groups, (tp_rank + 1) * groups):
        for name, height in zip(entry.hf, heights, strict=True):
            hf_rows = slice(group * height, (group + 1) * height)
            yield Piece(name, (hf_rows, *tail), (slice(row, row + height), *tail))
            row += height


def _divide(size: int, parts: int) -> int:
    if size % parts:
        raise ValueError(f"a size of {size} cannot be divided by {parts}; choose a parallel.tp that divides it")
    return size // parts
