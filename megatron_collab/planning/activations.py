"""Activations of a micro-batch on a rank between forward and backward pass: every tensor that autograd saves, once.

On GPUs, in 16 bits, the layers are TransformerEngine's, which environments for GPUs include; a run without it would
keep more. Otherwise they are those of trainer/megatron/layers.py, with the fused SwiGLU that GPUs use.

Per token, with i the bytes of the dtype, h the hidden size, t = parallel.tp, and s = t with sequence parallelism, else
1; Q and K are the widths of queries and of keys, heads (or key/value heads) times their size. TransformerEngine saves
operands of products in q bytes per number: i, or 1 in FP8, plus 4 bytes of scale per 128 with block scaling.

                          TransformerEngine                 layers.py
    two norms of width h  (i + q) h + 4, over s             (4 + 2 i) h + 4, over s: input in float32, both results
    queries, keys, values i (Q + 2 K) / t, rotated          i (Q + 2 K) / t, and i (Q + K) / t rotated
    their norms, if any   (i (Q + K) + 4 heads) / t         (4 + i) (Q + K) / t + 4 heads / t; see _local_layer
    attention             (i Q + 4 heads) / t               (2 i Q + 4 heads) / t: its output, log-sum-exp
    projection            Q / t with delayed FP8            (its input is the output of attention)
    feed-forward          (2 i + q) f / t                   3 i f / t: gate and up, and their product
    experts instead       k (q h + (2 i + q) e) / s         k i (h + 3 e) / s: k of n experts of width e, routed evenly
    and their router      (k (20 + i) + n (9 + i) + 4) / s  (k (20 + i) + n (1 + i)) / s

With model.lora.rank (trainer/megatron/lora.py) weights are frozen: instead of a linear layer, its adapters save its
input, in i bytes; layers.py's norms do not save their result, i less, and experts save only SwiGLU's input, k 2 i e.
Adapters with k matrices of rank r in a layer of `in` columns and `out` rows on the rank save: A x, i k r; the
concatenated A and B, i k r (in + out) once per micro-batch; with dropout a mask, 1 in.

Selective recompute saves only the input of the feed-forward network, or of the experts and their router. Full recompute
saves only the input of a layer, i h / s (in float32 layers.py's first norm saves the same). Both recompute one layer at
a time. Korthikanti et al. 2022 (arXiv:2205.05198), section 4, count the same way for a layer with dropout and no gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron_collab.algo.advantages import advantage_class
from megatron_collab.config import Config
from megatron_collab.models import lora
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.models.hf_to_megatron import TensorCut, shard_shape
from megatron_collab.models.parallel_layout import stage_layers
from megatron_collab.runtime import device
from megatron_collab.trainer import logprobs
from megatron_collab.trainer.megatron.config import DTYPES


class _Layer(NamedTuple):
    """Bytes that a layer saves: up to the input of its feed-forward, from there on, and, of the former, its input."""

    attention: float
    feed_forward: float
    layer_input: float


def micro_batch_tokens(config: Config) -> int:
    """Tokens of the largest micro-batch on a rank; a sequence or pair above the budget is a separate micro-batch."""
    longest = -(-config.rollout.context_length // config.parallel.cp) if config.train.stage == "rl" else 0
    longest *= 2 if config.objective == "dpo" else 1
    return max(config.train.tokens_per_micro_batch, longest)


def activations(config: Config, shape: ModelShape, rank: int, tokens: int) -> float:
    """Peak bytes of activations on pipeline rank `rank` in a step of many micro-batches of `tokens` tokens."""
    pp, vpp = config.parallel.pp, config.parallel.vpp
    counts = stage_layers(shape.layers, pp * vpp)
    chunks, recomputed = [], 0.0
    for stage in range(rank, pp * vpp, pp):
        first = sum(counts[:stage])
        layers = [layer_activations(config, shape, number, tokens) for number in range(first, first + counts[stage])]
        saved = sum(layer for layer, _ in layers)
        chunks.append(saved + _outside_layers(config, shape, tokens, stage == 0, stage == pp * vpp - 1))
        recomputed = max(recomputed, *(recomputed_in_layer for _, recomputed_in_layer in layers))
    state = _rows(config, tokens) * _item(config) * shape.hidden
    if vpp > 1:
        in_passes = in_flight(chunks, pp, rank, exchanged=state)
    else:
        in_passes = in_flight(chunks, pp, rank) + _exchanged_states(config, rank) * state
    return in_passes + recomputed + _rotations(config, shape, tokens)


def _exchanged_states(config: Config, rank: int) -> int:
    """Number of hidden states of a micro-batch that stage `rank` holds in addition to saved tensors.

    Per neighbor a gradient and the hidden states that it belongs to, until the next pass ends. With recompute the peak
    is in a backward pass, when only the gradients are allocated.
    """
    neighbors = (rank > 0) + (rank < config.parallel.pp - 1)
    return neighbors * (2 if config.parallel.recompute == "none" else 1)


def _rotations(config: Config, shape: ModelShape, tokens: int) -> float:
    """Bytes of the rotary tables, one per (virtual) stage of every network; see RotaryTable.

    A table has a row per token of the longest sequence, of which a context parallel rank has a part.
    """
    networks = 1 + (config.reference == "copy") + (config.algo.teacher.place == "model") + _critic(config)
    rows = tokens * config.parallel.cp * networks * config.parallel.vpp
    return 4 * shape.head_dim * rows if engine(config) else 0.0


def layer_activations(config: Config, shape: ModelShape, number: int, tokens: int) -> tuple[float, float]:
    """(saved, recomputed) bytes of layer `number` (from 0): until the backward pass, and again during it.

    For a micro-batch of `tokens` on a context parallel rank.
    """
    layer = (_engine_layer if engine(config) else _local_layer)(config, shape, number, tokens)
    if config.model.lora.rank:
        attention, feed_forward = _adapters(config, shape, number, tokens)
        layer = layer._replace(attention=layer.attention + attention, feed_forward=layer.feed_forward + feed_forward)
    total = layer.attention + layer.feed_forward
    return {
        "none": (total, 0.0),
        "selective": (layer.attention, layer.feed_forward),
        "full": (_rows(config, tokens) * _item(config) * shape.hidden, total - layer.layer_input),
    }[config.parallel.recompute]


def _adapters(config: Config, shape: ModelShape, number: int, tokens: int) -> tuple[float, float]:
    """(attention, feed-forward) bytes that the adapters of layer `number` save."""
    sparse = shape.experts is not None and number in shape.experts.layers
    single = replace(shape, layers=1, experts=replace(shape.experts, layers=(0,)) if shape.experts and sparse else None)
    tp, dropped = config.parallel.tp, config.model.lora.dropout > 0
    saved = [0.0, 0.0]
    for entry, entry_adapters in lora.lora_entries(single, config.model.lora):
        (rank, columns), (rows, _) = entry_adapters[0].a.local(tp), shard_shape(entry, tp)
        gathered = entry.cut is TensorCut.ROWS  # A x of all tokens, computed from the input of a part of them
        width, read = len(entry_adapters) * rank, _rows(config, tokens) if gathered else tokens
        size = width * (tokens if gathered else _rows(config, tokens)) + width * (columns + rows)
        saved["mlp." in entry.megatron] += _item(config) * size + dropped * columns * read
    return saved[0], saved[1]


def engine(config: Config) -> bool:
    """Whether the plan assumes TransformerEngine's layers."""
    return config.model.dtype == "bfloat16" and config.launch.device != "cpu"


def _engine_layer(config: Config, shape: ModelShape, number: int, tokens: int) -> _Layer:
    item, tp, rows, hidden = _item(config), config.parallel.tp, _rows(config, tokens), shape.hidden
    operand = _operand_bytes(config, shape, number)
    queries, keys = _widths(config, shape, tokens)
    heads = 4 * tokens / tp
    attention = rows * ((item + operand) * hidden + 4)
    attention += item * 2 * (queries + keys) + heads * shape.heads
    if shape.qk_norm:
        attention += item * (queries + keys) + heads * (shape.heads + shape.kv_heads)
    if operand < item and config.model.fp8_recipe == "delayed":
        attention += queries
    attention += rows * item * hidden
    layer_input, experts = rows * item * hidden, shape.experts
    if experts is None or number not in experts.layers:
        feed_forward = rows * (operand * hidden + 4) + (2 * item + operand) * shape.ffn * tokens / tp
        return _Layer(attention, feed_forward, layer_input)
    attention += rows * (item * hidden + 4)
    per_expert = (
        2 * item * experts.ffn if config.model.lora.rank else operand * hidden + (2 * item + operand) * experts.ffn
    )
    router = experts.per_token * (20 + item) + experts.count * (9 + item) + 4
    return _Layer(attention, rows * (experts.per_token * per_expert + router), layer_input)


def _operand_bytes(config: Config, shape: ModelShape, number: int) -> float:
    """Bytes per number of an operand that a product of layer `number` reads in both passes."""
    model = config.model
    if model.lora.rank or not model.fp8 or not model.fp8_skip_first <= number < shape.layers - model.fp8_skip_last:
        return _item(config)
    return 1 + 4 / 128 if model.fp8_recipe == "blockwise" else 1


def _local_layer(config: Config, shape: ModelShape, number: int, tokens: int) -> _Layer:
    """Keys and values are views of the fused tensor; queries too if every head has its own key.

    Their norms save the input in float32 (if the dtype is float32, not that of a view), but not the scaled result.
    """
    item, tp, rows = _item(config), config.parallel.tp, _rows(config, tokens)
    queries, keys = _widths(config, shape, tokens)
    attention = 2 * rows * (_norm(config, shape.hidden) + item * shape.hidden)
    attention += item * (queries + 2 * keys) + item * queries
    views = keys + (queries if shape.heads == shape.kv_heads else 0)
    if shape.qk_norm:
        attention += _norm_bytes(config) * (queries + keys) + 4 * tokens * (shape.heads + shape.kv_heads) / tp
        attention -= 4 * views if item == 4 else 0
    attention += item * (2 * queries + keys) + 4 * tokens * shape.heads / tp
    layer_input, experts = rows * item * shape.hidden if item == 4 else 0.0, shape.experts
    if experts is None or number not in experts.layers:
        return _Layer(attention, item * 3 * shape.ffn * tokens / tp, layer_input)
    per_expert = 2 * experts.ffn if config.model.lora.rank else shape.hidden + 3 * experts.ffn
    feed_forward = rows * experts.per_token * item * per_expert
    feed_forward += rows * (experts.per_token * (20 + item) + experts.count * (1 + item))
    return _Layer(attention, feed_forward, layer_input)


def _outside_layers(config: Config, shape: ModelShape, tokens: int, first: bool, last: bool) -> float:
    """Bytes of a micro-batch outside its layers: token ids, the final norm, a stage's result; layers.py's rotations.

    With recompute the peak is when the last stage has finished its final norm.
    """
    item, rows, recompute = _item(config), _rows(config, tokens), config.parallel.recompute
    state = rows * item * shape.hidden
    if engine(config):
        saved, norm, received = 8.0 * tokens, state + 4 * rows, False  # its layers save their input
    else:
        saved, norm = tokens * (8.0 + 2 * item * shape.head_dim), rows * _norm(config, shape.hidden)
        received = not first and recompute != "full"  # then its layers save their input too
    result = (norm if recompute == "none" else 0.0) if last else state
    return saved + received * state + result


def in_flight(chunks: Sequence[float], pp: int, rank: int, exchanged: float = 0.0) -> float:
    """Peak bytes if a micro-batch keeps `chunks[c]` bytes in the rank's virtual stage c.

    Megatron's schedules (Narayanan et al. 2021, arXiv:2104.04473, section 2.2): groups of pp micro-batches go forward
    through one virtual stage and then the next, and backward in the opposite order. After the warm-up of pp - rank - 1
    passes, or 2 (pp - rank - 1) + (v - 1) pp with v > 1 virtual stages, a backward pass follows each forward pass.

    Between passes, v > 1 stages hold up to three `exchanged` tensors (hidden states or their gradients): received for
    the next forward pass, received for this backward pass, sent by the last backward pass; each if it has a peer.
    Until its end the schedule also keeps the last hidden states received in the warm-up, with their gradient.
    """
    count = len(chunks)
    order = [chunk for _ in range(3) for chunk in range(count) for _ in range(pp)]  # long enough to repeat
    warm_up = pp - rank - 1 if count == 1 else 2 * (pp - rank - 1) + (count - 1) * pp
    current = most = sum(chunks[chunk] for chunk in order[:warm_up])
    last = 0  # virtual stage of the last backward pass; stage 0 of the first rank has no predecessor
    for forward, next_forward, opposite in zip(order[warm_up:], order[warm_up + 1 :], order, strict=False):
        backward = count - 1 - opposite
        current += chunks[forward]
        exchanges = rank > 0 or next_forward > 0, rank < pp - 1 or backward < count - 1, rank > 0 or last > 0
        most = max(most, current + sum(exchanges) * exchanged)
        current -= chunks[backward]
        last = backward
    return most + 2 * exchanged * (rank > 0)


def _rows(config: Config, tokens: int) -> float:
    """Tokens of a micro-batch on a rank, outside of attention and feed-forward network."""
    return tokens / config.parallel.tp if config.parallel.sequence_parallel else tokens


def _norm(config: Config, width: int) -> float:
    """Bytes per token that an RMS norm of layers.py saves; its output is counted with the consumer."""
    return _norm_bytes(config) * width + 4


def _norm_bytes(config: Config) -> int:
    """Bytes per number: the input in float32 and, for the gradient of the weights, the unscaled result."""
    return 4 + (0 if config.model.lora.rank else _item(config))


def head(config: Config, shape: ModelShape, tokens: int) -> float:
    """Bytes of the head on the last stage, if all of `tokens` are trained.

    For log-probs (trainer/logprobs.py): two float32 tiles of logits, and the gradient of one in the dtype; hidden
    states of the trained tokens, and their gradient in float32 and the dtype. For the KL to a teacher
    (trainer/divergence.py) a tile and a copy of the states more. For values (trainer/critic.py), which are computed at
    another time: hidden states of all and of the trained tokens, and three times these while the ranks' are summed.
    """
    item, tile, states = _item(config), logprobs.TILE[device.GPU], tokens * shape.hidden
    narrow = item if item < 4 else 0
    logits = min(tile, tokens * -(-shape.vocab // config.parallel.tp))
    log_probs = 2 * 4 * tile + narrow * logits + states * (item + 4 + narrow)
    divergence = 4 * tile + item * states if config.algo.teacher.full else 0
    return max(log_probs + divergence, 5 * item * states if _critic(config) else 0)


def _critic(config: Config) -> bool:
    return config.objective == "policy" and advantage_class(config.algo.advantage).critic


def _widths(config: Config, shape: ModelShape, tokens: int) -> tuple[float, float]:
    """(queries, keys): elements of the queries and of the keys of `tokens` on a tensor parallel rank."""
    per_head = tokens * shape.head_dim / config.parallel.tp
    return per_head * shape.heads, per_head * shape.kv_heads


def _item(config: Config) -> int:
    return DTYPES[config.model.dtype].itemsize
