"""The table between Hugging Face tensors and Megatron-Core shards: one declaration for every direction.

Loading, export and publishing all move data along the same `Piece`s, so they cannot disagree. Nothing here
imports a framework: shapes are tuples, slices are slices.

    table(shape)                       what exists: an `WeightEntry` per Megatron parameter, global layer numbers
    pieces(entry, shape, tp, tp_rank)  shard[piece.shard_index] <-> hf_tensor[piece.hf_index]
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from megatron_collab.models.hf_config import Experts, ModelShape

Shape = tuple[int, ...]
Index = tuple[slice, ...]


class TensorCut(Enum):
    """How a parameter is sharded over the tensor-parallel ranks."""

    WHOLE = "every rank holds all of it"
    VOCABULARY = "dimension 0, padded to a multiple of the ranks"
    ROWS = "dimension 0"
    COLUMNS = "dimension 1"


class Join(Enum):
    """How the Hugging Face tensors of an entry are arranged along the rows of the Megatron tensor."""

    ONE = "there is one tensor"
    QKV = "per query group: the rows of its query heads, then its key's, then its value's"
    STACK = "one after another, within each tensor-parallel shard"


@dataclass(frozen=True)
class WeightEntry:
    """One Megatron parameter: `hf` names and `shapes` are the tensors it is made of, in `join` order.

    `exported` is False for a second copy (the output layer of a tied model's last pipeline stage): it is
    filled on loading, never written out. `expert`: a weight of one expert; these are spread over the
    expert-parallel ranks as they are, never cut.
    """

    megatron: str
    hf: tuple[str, ...]
    shapes: tuple[Shape, ...]
    cut: TensorCut
    join: Join = Join.ONE
    exported: bool = True
    expert: bool = False


@dataclass(frozen=True)
class TensorPlace:
    """A rank's place in the layout: its tensor-parallel rank, and the index of its replica.

    Dense parameters are replicated over the data (and context) parallel ranks, experts over their own ones.
    """

    tp: int = 1
    tp_rank: int = 0
    replica: int = 0
    expert_replica: int = 0

    def writes(self, entry: WeightEntry) -> bool:
        """Whether this rank, which holds `entry`, is the one that exports its pieces."""
        if entry.expert:
            return self.expert_replica == 0
        first = entry.cut is not TensorCut.WHOLE or self.tp_rank == 0
        return entry.exported and first and self.replica == 0


@dataclass(frozen=True)
class Piece:
    """A block that a shard and a Hugging Face tensor have in common: shard[shard_index] is hf[hf_index]."""

    hf: str
    hf_index: Index
    shard_index: Index


# A parameter of a layer: the layer's global number, and the name within it.
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")

# TransformerEngine fuses a norm into the linear layer that follows; the table knows the norms by their own names.
FUSED_NAMES: Mapping[str, str] = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def table(shape: ModelShape) -> tuple[WeightEntry, ...]:
    """Every parameter of the model under its global Megatron name, in the order of a forward pass."""
    return tuple(_entries(shape))


def _entries(shape: ModelShape) -> Iterator[WeightEntry]:
    vocabulary = (shape.vocab, shape.hidden)
    norm = (shape.hidden,)
    embedding = "model.embed_tokens.weight"
    yield WeightEntry("embedding.word_embeddings.weight", (embedding,), (vocabulary,), TensorCut.VOCABULARY)
    for layer in range(shape.layers):
        yield from _layer(shape, layer)
    yield WeightEntry("decoder.final_layernorm.weight", ("model.norm.weight",), (norm,), TensorCut.WHOLE)
    if shape.tied:
        yield WeightEntry("output_layer.weight", (embedding,), (vocabulary,), TensorCut.VOCABULARY, exported=False)
    else:
        yield WeightEntry("output_layer.weight", ("lm_head.weight",), (vocabulary,), TensorCut.VOCABULARY)


def _layer(shape: ModelShape, layer: int) -> Iterator[WeightEntry]:
    megatron, hf = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    norm, head_norm = (shape.hidden,), (shape.head_dim,)
    rows = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.kv_heads * shape.head_dim)
    attention = hf + "self_attn."

    def qkv(what: str) -> tuple[str, ...]:
        return tuple(f"{attention}{x}_proj.{what}" for x in "qkv")

    yield WeightEntry(megatron + "input_layernorm.weight", (hf + "input_layernorm.weight",), (norm,), TensorCut.WHOLE)
    weights = tuple((n, shape.hidden) for n in rows)
    yield WeightEntry(megatron + "self_attention.linear_qkv.weight", qkv("weight"), weights, TensorCut.ROWS, Join.QKV)
    if shape.qkv_bias:
        biases = tuple((n,) for n in rows)
        yield WeightEntry(megatron + "self_attention.linear_qkv.bias", qkv("bias"), biases, TensorCut.ROWS, Join.QKV)
    if shape.qk_norm:
        for x in "qk":
            name = f"{megatron}self_attention.{x}_layernorm.weight"
            yield WeightEntry(name, (f"{attention}{x}_norm.weight",), (head_norm,), TensorCut.WHOLE)
    projection = (shape.hidden, rows[0])
    yield WeightEntry(
        megatron + "self_attention.linear_proj.weight", (attention + "o_proj.weight",), (projection,), TensorCut.COLUMNS
    )
    yield WeightEntry(
        megatron + "pre_mlp_layernorm.weight", (hf + "post_attention_layernorm.weight",), (norm,), TensorCut.WHOLE
    )
    if shape.experts is not None and layer in shape.experts.layers:
        yield from _experts(shape.hidden, shape.experts, megatron + "mlp.", hf + "mlp.")
    else:
        gate_up = (hf + "mlp.gate_proj.weight", hf + "mlp.up_proj.weight")
        yield WeightEntry(
            megatron + "mlp.linear_fc1.weight", gate_up, ((shape.ffn, shape.hidden),) * 2, TensorCut.ROWS, Join.STACK
        )
        down = (shape.hidden, shape.ffn)
        yield WeightEntry(
            megatron + "mlp.linear_fc2.weight", (hf + "mlp.down_proj.weight",), (down,), TensorCut.COLUMNS
        )


def _experts(hidden: int, experts: Experts, megatron: str, hf: str) -> Iterator[WeightEntry]:
    yield WeightEntry(megatron + "router.weight", (hf + "gate.weight",), ((experts.count, hidden),), TensorCut.WHOLE)
    up, down = (experts.ffn, hidden), (hidden, experts.ffn)
    for number in range(experts.count):
        expert, source = f"{megatron}experts.{number}.", f"{hf}experts.{number}."
        gate_up = (source + "gate_proj.weight", source + "up_proj.weight")
        yield WeightEntry(expert + "linear_fc1.weight", gate_up, (up, up), TensorCut.WHOLE, Join.STACK, expert=True)
        yield WeightEntry(
            expert + "linear_fc2.weight", (source + "down_proj.weight",), (down,), TensorCut.WHOLE, expert=True
        )


def hf_shapes(shape: ModelShape) -> dict[str, Shape]:
    """Name and shape of every tensor of the Hugging Face checkpoint, in the order of the table."""
    return {name: hf for entry in table(shape) for name, hf in zip(entry.hf, entry.shapes, strict=True)}


def shard_shape(entry: WeightEntry, tp: int) -> Shape:
    """Shape of the Megatron parameter on one tensor-parallel rank, padding of the vocabulary included."""
    rows, *columns = (sum(_rows(entry, hf, tp) for hf in entry.shapes), *entry.shapes[0][1:])
    if entry.cut is TensorCut.COLUMNS:
        columns = [_divide(columns[0], tp)]
    return (rows, *columns)


def _rows(entry: WeightEntry, hf: Shape, tp: int) -> int:
    """Rows that one Hugging Face tensor has in the shard of a rank, padding included."""
    if entry.cut is TensorCut.VOCABULARY:
        return -(-hf[0] // tp)
    return _divide(hf[0], tp) if entry.cut is TensorCut.ROWS else hf[0]


def padded_vocab(shape: ModelShape, tp: int) -> int:
    """Rows of the embedding over all tensor-parallel ranks: the vocabulary, rounded up to a multiple of tp."""
    return -(-shape.vocab // tp) * tp


def pieces(entry: WeightEntry, shape: ModelShape, tp: int, tp_rank: int) -> tuple[Piece, ...]:
    """The blocks that the shard of `tp_rank` and the Hugging Face tensors share; padding rows are in no piece.

    Indices have a slice with explicit bounds for every dimension. ValueError if tp does not divide a size.
    """
    if entry.join is Join.QKV:
        return tuple(_qkv_pieces(entry, shape, tp, tp_rank))
    tail = tuple(slice(0, n) for n in entry.shapes[0][1:])
    if entry.cut is TensorCut.COLUMNS:
        rows, width = slice(0, entry.shapes[0][0]), _divide(entry.shapes[0][1], tp)
        columns = slice(tp_rank * width, (tp_rank + 1) * width)
        return (Piece(entry.hf[0], (rows, columns), (rows, slice(0, width))),)
    found, row = [], 0
    for name, hf in zip(entry.hf, entry.shapes, strict=True):
        height = _rows(entry, hf, tp)
        start = 0 if entry.cut is TensorCut.WHOLE else tp_rank * height
        stop = min(start + height, hf[0])
        if start < stop:
            found.append(Piece(name, (slice(start, stop), *tail), (slice(row, row + stop - start), *tail)))
        row += height
    return tuple(found)


def _qkv_pieces(entry: WeightEntry, shape: ModelShape, tp: int, tp_rank: int) -> Iterator[Piece]:
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
