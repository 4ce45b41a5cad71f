"""The parameters on each rank of an SGLang server, and the position of each block of a Hugging Face tensor in them.

The server's counterpart of hf_to_megatron.py, also without a framework. Names, fusions, cuts and padding are those of
SGLang 0.5.23: families in srt/models; linear.py, vocab_parallel_embedding.py and moe/fused_moe_triton/layer.py in
srt/layers. Tensors that are not fused keep their Hugging Face names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_collab.models import lora
from megatron_collab.models.hf_config import Experts, ModelShape
from megatron_collab.models.hf_to_megatron import Piece, Shape, divide, stacked
from megatron_collab.models.lora import LoraSettings

# Families whose SGLang models pass the quantization config to attention, which then has scales for an FP8 KV cache.
# The cache is never in FP8 here, but some attention backends apply these scales anyway: they must be 1.
_KV_SCALE_FAMILIES = {"llama", "mistral", "qwen2"}
_TP = "rollout.server.tp"

ADAPTERS = (".lora_a", ".lora_b")  # suffixes of the names of adapters


@dataclass(frozen=True)
class ServerLayout:
    """Layout of a server: `tp` ranks, experts distributed over `ep` groups of them; `fp8`: linear layers in FP8 blocks.

    `lora`: the adapters that a server holds beside its parameters, if any.
    """

    tp: int = 1
    ep: int = 1
    fp8: bool = False
    lora: LoraSettings | None = None


@dataclass(frozen=True)
class Parameter:
    """One parameter of a server rank, its parts in the order of its rows; rows in no part are padding.

    `quantized`: float8_e4m3fn, with a second parameter NAME_scale_inv, a float32 per block of 128 x 128.
    `constant`: float32 without parts; the server's rank fills it with this number at every publish.
    """

    name: str
    shape: Shape
    parts: tuple[Piece, ...]
    quantized: bool = False
    constant: float | None = None


# A block of rows [start, stop) of a Hugging Face tensor.
_Rows = tuple[str, int, int]


def table(shape: ModelShape, server: ServerLayout, rank: int) -> tuple[Parameter, ...]:
    """The parameters of server rank `rank` in forward order; raises ValueError if the layout does not divide a size."""
    check_layers(shape)
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    heads = []
    if not shape.tied or shape.experts is not None:  # SGLang gives Qwen3-MoE a separate head even if it is tied
        heads.append(_vocabulary(head, embedding if shape.tied else head, shape, server.tp, rank))
    return (
        _vocabulary(embedding, embedding, shape, server.tp, rank),
        *(parameter for layer in range(shape.layers) for parameter in _layer(shape, server, rank, layer)),
        _whole("model.norm.weight", (shape.hidden,)),
        *heads,
    )


def adapters(shape: ModelShape, server: ServerLayout, rank: int) -> tuple[Parameter, ...]:
    """The lora_a and lora_b on rank `rank` of every linear layer that has adapters (srt/lora/layers.py).

    The k matrices of a fused layer are concatenated in A [k r, columns] and in B [rows, r], r the LoRA rank, and cut
    like the layer; matrices of the layer that are no target stay zero.
    """
    if server.lora is None:
        return ()
    assert server.lora.rank is not None
    r = server.lora.rank
    keys = {factor.key for factor in lora.factors(shape, server.lora)}
    parameters = []
    for linear in table(shape, server, rank):
        targets = [(place, part, part.hf.removesuffix(".weight")) for place, part in enumerate(linear.parts)]
        targets = [(place, part, name) for place, part, name in targets if f"{name}.lora_A.weight" in keys]
        if not targets:
            continue
        a, b = [], []
        for place, part, name in targets:
            rows, columns = part.hf_index
            at = slice(place * r, (place + 1) * r), part.shard_index[1]
            a.append(Piece(f"{name}.lora_A.weight", (slice(0, r), columns), at))
            b.append(Piece(f"{name}.lora_B.weight", (rows, slice(0, r)), (part.shard_index[0], slice(0, r))))
        layer = linear.name.removesuffix(".weight")
        shapes = (len(linear.parts) * r, linear.shape[1]), (linear.shape[0], r)
        for name, sides, parts in zip(ADAPTERS, shapes, (a, b), strict=True):
            parameters.append(Parameter(layer + name, sides, tuple(parts)))
    return tuple(parameters)


def check_layers(shape: ModelShape) -> None:
    """Raises ValueError if only some layers have experts: SGLang 0.5.23 gives every layer of a Qwen3-MoE experts."""
    dense = set(range(shape.layers)) - set(shape.experts.layers) if shape.experts else set()
    if dense:
        raise ValueError(
            f"model.path: layer {min(dense)} has no experts, but SGLang expects them in every layer; give another "
            "model, or set train.stage=sft"
        )


def _layer(shape: ModelShape, server: ServerLayout, rank: int, layer: int) -> Iterator[Parameter]:
    prefix, fp8 = f"model.layers.{layer}.", server.fp8
    attention = prefix + "self_attn."
    width = divide(shape.heads, server.tp, "attention heads", _TP) * shape.head_dim
    yield _whole(prefix + "input_layernorm.weight", (shape.hidden,))
    yield _fused(attention + "qkv_proj.weight", _qkv(attention, "weight", shape, server, rank), (shape.hidden,), fp8)
    if shape.qkv_bias:
        yield _fused(attention + "qkv_proj.bias", _qkv(attention, "bias", shape, server, rank), ())
    if shape.qk_norm:
        for x in "qk":
            yield _whole(f"{attention}{x}_norm.weight", (shape.head_dim,))
    if fp8 and shape.family in _KV_SCALE_FAMILIES:
        for x in "kv":
            yield Parameter(f"{attention}attn.{x}_scale", (), (), constant=1.0)
    yield _columns(attention + "o_proj.weight", shape.hidden, width, rank, fp8)
    yield _whole(prefix + "post_attention_layernorm.weight", (shape.hidden,))
    mlp = prefix + "mlp."
    if shape.experts is not None:
        yield from _experts(shape.hidden, shape.experts, server, rank, mlp)
    else:
        ffn = divide(shape.ffn, server.tp, "feed-forward width", _TP)
        rows = [(f"{mlp}{x}_proj.weight", rank * ffn, (rank + 1) * ffn) for x in ("gate", "up")]
        yield _fused(mlp + "gate_up_proj.weight", rows, (shape.hidden,), fp8)
        yield _columns(mlp + "down_proj.weight", shape.hidden, ffn, rank, fp8)


def _qkv(attention: str, suffix: str, shape: ModelShape, server: ServerLayout, rank: int) -> list[_Rows]:
    """A rank's query, key and value heads in this order; with fewer key/value heads than tp, ranks share them."""
    tp, kv_heads = server.tp, shape.kv_heads
    if max(tp, kv_heads) % min(tp, kv_heads):
        raise ValueError(
            f"rollout.server.tp={tp}: neither divides the model's {kv_heads} key/value heads nor is a multiple"
        )
    replicas = max(1, tp // kv_heads)
    queries, heads = divide(shape.heads, tp, "attention heads", _TP), max(1, kv_heads // tp)
    blocks = []
    for x, count, place in (("q", queries, rank), ("k", heads, rank // replicas), ("v", heads, rank // replicas)):
        rows = count * shape.head_dim
        blocks.append((f"{attention}{x}_proj.{suffix}", place * rows, (place + 1) * rows))
    return blocks


def _experts(hidden: int, experts: Experts, server: ServerLayout, rank: int, mlp: str) -> Iterator[Parameter]:
    """Each group of tp / ep consecutive ranks has the same experts, cut over the group."""
    cuts = server.tp // server.ep
    count = divide(experts.count, server.ep, "experts", "rollout.server.ep")
    ffn = divide(experts.ffn, cuts, "width of an expert", "rollout.server.tp / rollout.server.ep")
    first, cut = rank // cuts * count, rank % cuts
    cut_rows, across = slice(cut * ffn, (cut + 1) * ffn), slice(0, hidden)
    yield _whole(mlp + "gate.weight", (experts.count, hidden))
    up, down = [], []
    for number in range(count):
        source, slot = f"{mlp}experts.{first + number}.", slice(number, number + 1)
        for half, x in enumerate(("gate", "up")):
            rows = slice(half * ffn, (half + 1) * ffn)
            up.append(Piece(f"{source}{x}_proj.weight", (cut_rows, across), (slot, rows, across)))
        down.append(Piece(f"{source}down_proj.weight", (across, cut_rows), (slot, across, slice(0, ffn))))
    yield Parameter(mlp + "experts.w13_weight", (count, 2 * ffn, hidden), tuple(up), server.fp8)
    yield Parameter(mlp + "experts.w2_weight", (count, hidden, ffn), tuple(down), server.fp8)


def _vocabulary(name: str, hf: str, shape: ModelShape, tp: int, rank: int) -> Parameter:
    """Equal parts of the vocabulary, padded to a multiple of 64, or of 64 tp if tp does not divide that."""
    multiple = 64 if -(-shape.vocab // 64) * 64 % tp == 0 else 64 * tp
    rows = -(-shape.vocab // multiple) * multiple // tp
    start, stop = rank * rows, min((rank + 1) * rows, shape.vocab)
    return Parameter(name, (rows, shape.hidden), stacked([(hf, start, stop)], (shape.hidden,)))


def _whole(name: str, shape: Shape) -> Parameter:
    return _fused(name, [(name, 0, shape[0])], shape[1:])


def _columns(name: str, rows: int, width: int, rank: int, fp8: bool) -> Parameter:
    down = slice(0, rows)
    part = Piece(name, (down, slice(rank * width, (rank + 1) * width)), (down, slice(0, width)))
    return Parameter(name, (rows, width), (part,), fp8)


def _fused(name: str, blocks: Sequence[_Rows], tail: Shape, fp8: bool = False) -> Parameter:
    """A parameter that concatenates blocks of rows of several tensors."""
    return Parameter(name, (sum(stop - start for _, start, stop in blocks), *tail), stacked(blocks, tail), fp8)
