"""The table between Hugging Face tensors and Megatron-Core shards: one declaration for every direction.

Loading, export and publishing all move data along the same `Piece`s, so they cannot disagree. Imports no
framework: shapes are tuples, indices are slices.

    table(shape)                       a `WeightEntry` per Megatron parameter, with global layer numbers
    pieces(entry, shape, tp, tp_rank)  shard[piece.shard_index] <-> hf_tensor[piece.hf_index]
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from megatron_collab.models.hf_config import ModelShape

Shape = tuple[int, ...]
Index = tuple[slice, ...]


class TensorCut(Enum):
    """How a parameter is sharded over the tensor-parallel ranks."""

    WHOLE = "every rank holds all of it"
    VOCABULARY = "dimension 0, padded to a multiple of the ranks"
    ROWS = "dimension 0"
    COLUMNS = "dimension 1"


@dataclass(frozen=True)
class WeightEntry:
    """One Megatron parameter; `hf` and `shapes` are the names and shapes of the tensors it consists of.

    Within each tensor-parallel shard the tensors are concatenated along the rows; with `qkv` within each query group:
    the rows of its query heads, then of its key, then of its value. `exported` is False for a second copy (the output
    layer on the last pipeline stage of a tied model), which is filled on loading but never exported. `expert`: a
    weight of one expert; experts are distributed over the expert-parallel ranks, never cut.
    """

    megatron: str
    hf: tuple[str, ...]
    shapes: tuple[Shape, ...]
    cut: TensorCut
    qkv: bool = False
    exported: bool = True
    expert: bool = False


@dataclass(frozen=True)
class Piece:
    """A block that a shard and a Hugging Face tensor have in common: shard[shard_index] is hf[hf_index].

    Both have the same elements in the same order; on a server, an expert's block has an extra leading dimension of 1.
    """

    hf: str
    hf_index: Index
    shard_index: Index


# A parameter of a layer: the layer's global number, and the name within it.
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")

# TransformerEngine fuses a norm into the linear layer that follows; the table has the norms under separate names.
FUSED_NAMES: Mapping[str, str] = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def table(shape: ModelShape) -> tuple[WeightEntry, ...]:
    """Every parameter of the model under its global Megatron name, in the order of a forward pass."""
    vocabulary, embedding = (shape.vocab, shape.hidden), "model.embed_tokens.weight"
    head = embedding if shape.tied else "lm_head.weight"
    return (
        WeightEntry("embedding.word_embeddings.weight", (embedding,), (vocabulary,), TensorCut.VOCABULARY),
        *(entry for layer in range(shape.layers) for entry in _layer(shape, layer)),
        WeightEntry("decoder.final_layernorm.weight", ("model.norm.weight",), ((shape.hidden,),), TensorCut.WHOLE),
        WeightEntry("output_layer.weight", (head,), (vocabulary,), TensorCut.VOCABULARY, exported=not shape.tied),
    )


def _layer(shape: ModelShape, layer: int) -> Iterator[WeightEntry]:
    megatron, hf = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    hidden, queries, keys = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def tensor(name: str, source: str, sides: Shape, cut: TensorCut = TensorCut.WHOLE) -> WeightEntry:
        return WeightEntry(f"{megatron}{name}.weight", (f"{hf}{source}.weight",), (sides,), cut)

    def qkv(suffix: str, *columns: int) -> WeightEntry:
        names = tuple(f"{hf}self_attn.{x}_proj.{suffix}" for x in "qkv")
        shapes = tuple((rows, *columns) for rows in (queries, keys, keys))
        return WeightEntry(f"{megatron}self_attention.linear_qkv.{suffix}", names, shapes, TensorCut.ROWS, qkv=True)

    def mlp(name: str, ffn: int, expert: bool) -> Iterator[WeightEntry]:
        """The weights of a feed-forward network; an expert is one too."""
        names = tuple(f"{hf}{name}.{x}_proj.weight" for x in ("gate", "up", "down"))
        rows, columns = (TensorCut.WHOLE,) * 2 if expert else (TensorCut.ROWS, TensorCut.COLUMNS)
        up, down = (((ffn, hidden),) * 2, ((hidden, ffn),))
        yield WeightEntry(f"{megatron}{name}.linear_fc1.weight", names[:2], up, rows, expert=expert)
        yield WeightEntry(f"{megatron}{name}.linear_fc2.weight", names[2:], down, columns, expert=expert)

    yield tensor("input_layernorm", "input_layernorm", (hidden,))
    yield qkv("weight", hidden)
    if shape.qkv_bias:
        yield qkv("bias")
    if shape.qk_norm:
        for x in "qk":
            yield tensor(f"self_attention.{x}_layernorm", f"self_attn.{x}_norm", (shape.head_dim,))
    yield tensor("self_attention.linear_proj", "self_attn.o_proj", (hidden, queries), TensorCut.COLUMNS)
    yield tensor("pre_mlp_layernorm", "post_attention_layernorm", (hidden,))
    if shape.experts is not None and layer in shape.experts.layers:
        yield tensor("mlp.router", "mlp.gate", (shape.experts.count, hidden))
        for number in range(shape.experts.count):
            yield from mlp(f"mlp.experts.{number}", shape.experts.ffn, expert=True)
    else:
        yield from mlp("mlp", shape.ffn, expert=False)


def exports(entry: WeightEntry, tp_rank: int, replica: int, expert_replica: int) -> bool:
    """Whether a rank that holds `entry` exports its pieces.

    Dense parameters are replicated over the data (and context) parallel ranks, experts over expert data parallel ones.
    """
    if entry.expert:
        return expert_replica == 0
    return entry.exported and replica == 0 and (entry.cut is not TensorCut.WHOLE or tp_rank == 0)


def hf_shapes(shape: ModelShape) -> dict[str, Shape]:
    """Name and shape of every tensor of the Hugging Face checkpoint, in the order of the table."""
    return {name: hf for entry in table(shape) for name, hf in zip(entry.hf, entry.shapes, strict=True)}


def shard_shape(entry: WeightEntry, tp: int) -> Shape:
    """Shape of the Megatron parameter on one tensor-parallel rank, padding of the vocabulary included."""
    rows, *columns = (sum(_rows(entry, hf, tp) for hf in entry.shapes), *entry.shapes[0][1:])
    if entry.cut is TensorCut.COLUMNS:
        columns = [divide(columns[0], tp)]
    return (rows, *columns)


def _rows(entry: WeightEntry, hf: Shape, tp: int) -> int:
    """Rows that one Hugging Face tensor has in the shard of a rank, padding included."""
    if entry.cut is TensorCut.VOCABULARY:
        return -(-hf[0] // tp)
    return divide(hf[0], tp) if entry.cut is TensorCut.ROWS else hf[0]


def pieces(entry: WeightEntry, shape: ModelShape, tp: int, tp_rank: int) -> tuple[Piece, ...]:
    """The blocks that the shard of `tp_rank` and the Hugging Face tensors share; padding rows are in no piece.

    Indices have a slice with explicit bounds for every dimension. Raises ValueError if tp does not divide a size.
    """
    if entry.cut is TensorCut.COLUMNS:
        down, width = slice(0, entry.shapes[0][0]), divide(entry.shapes[0][1], tp)
        across = slice(tp_rank * width, (tp_rank + 1) * width)
        return (Piece(entry.hf[0], (down, across), (down, slice(0, width))),)
    numbers = range(1) if entry.cut is TensorCut.WHOLE else range(tp_rank, tp_rank + 1)
    heights = [_rows(entry, hf, tp) for hf in entry.shapes]
    if entry.qkv:
        groups = divide(shape.kv_heads, tp)
        numbers = range(tp_rank * groups, (tp_rank + 1) * groups)
        # rows of one query group in q, k and v
        heights = [shape.heads // shape.kv_heads * shape.head_dim, shape.head_dim, shape.head_dim]
    tensors = list(zip(entry.hf, entry.shapes, heights, strict=True))
    rows = ((name, n * height, min((n + 1) * height, hf[0])) for n in numbers for name, hf, height in tensors)
    return stacked(rows, entry.shapes[0][1:])


def stacked(blocks: Iterable[tuple[str, int, int]], tail: Shape) -> tuple[Piece, ...]:
    """Concatenate rows [start, stop) of several tensors; empty ranges are skipped."""
    stack, row, columns = [], 0, tuple(slice(0, n) for n in tail)
    for name, start, stop in blocks:
        if start < stop:
            stack.append(Piece(name, (slice(start, stop), *columns), (slice(row, row + stop - start), *columns)))
            row += stop - start
    return tuple(stack)


def divide(size: int, parts: int, noun: str = "size", setting: str = "parallel.tp") -> int:
    """size / parts; raises ValueError, which names the setting, if parts does not divide size."""
    if size % parts:
        raise ValueError(f"{setting}={parts}: does not divide the model's {noun} ({size}); choose a divisor")
    return size // parts
