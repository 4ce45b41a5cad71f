"""Activations on paper: what the layers of trainer/megatron/layers.py keep between forward and backward pass, in bytes.

Counted is what autograd saves, each tensor once, with the fused SwiGLU that GPUs use. TransformerEngine's layers keep
the same or less: their norms keep no float32 copy of the input, and their FP8 products keep inputs in one byte. Not
counted are the tensors that live for a moment within a pass: about half of what a layer keeps, measured on a CPU.

Per token, with i the bytes of the dtype, h the hidden size, t = parallel.tp, and s = t with sequence parallelism, else
1; Q and K are the widths of queries and of keys, heads (or key/value heads) times their size:

    a norm of width w     4 w (its input, in float32) + 2 i w (normalised; scaled) + 4
    layer norms           two of width h, over s
    queries and keys      i (Q + 2 K) / t; keys and values are views of it, queries too if every head has its own key
    their norms, if any   as above, but the scaled one is not kept, nor in float32 an input that is a view
    core attention        (i (2 Q + K) + 4 heads) / t: rotated queries and keys, output, log-sum-exp
    projection            its input: i Q / t
    feed-forward          i 3 f / t: gate and up, and their product
    experts instead       k i (h + 3 e) / s: k of n experts of width e, routed evenly
    and their router      (k (20 + i) + n (1 + i)) / s

Selective recomputation keeps of the core attention only its inputs, where they are no views; what it makes anew is
less than what the backward pass of that layer's feed-forward has freed by then. Full recomputation keeps of a layer
only its input, i h / s, and makes all of one layer anew at a time, when the final norm is done with; in float32 the
input is the first norm's.
Korthikanti et al. 2022 (arXiv:2205.05198), section 4, count the same way for a layer with dropout and without a gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_collab.config import Config
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.models.parallel_layout import stage_layers
from megatron_collab.trainer.megatron.config import DTYPES


@dataclass(frozen=True)
class Layer:
    """Bytes of one layer and one micro-batch: its input, what the core attention takes and keeps, and the rest."""

    input: float
    core_inputs: float
    core: float
    rest: float

    def kept(self, recompute: str) -> float:
        """From the forward to the backward pass."""
        kept = {
            "none": self.rest + self.core,
            "selective": self.rest + self.core_inputs,
            "full": self.input,
        }
        return kept[recompute]


def layer(config: Config, shape: ModelShape, number: int, tokens: int) -> Layer:
    """Layer `number` (from 0) with a micro-batch of `tokens` on this context parallel rank."""
    item, tp = DTYPES[config.model.dtype].itemsize, config.parallel.tp
    rows = _rows(config, tokens)
    queries, keys = (tokens * heads * shape.head_dim / tp for heads in (shape.heads, shape.kv_heads))
    rest = 2 * rows * (_norm(shape.hidden, item) + item * shape.hidden)
    rest += item * (queries + 2 * keys) + item * queries
    views = keys + (queries if shape.heads == shape.kv_heads else 0)
    if shape.qk_norm:
        rest += (4 + item) * (queries + keys) + 4 * tokens * (shape.heads + shape.kv_heads) / tp
        rest -= 4 * views if item == 4 else 0
    experts = shape.experts
    if experts is None or number not in experts.layers:
        rest += item * 3 * shape.ffn * tokens / tp
    else:
        rest += rows * experts.per_token * item * (shape.hidden + 3 * experts.ffn)
        rest += rows * (experts.per_token * (20 + item) + experts.count * (1 + item))
    return Layer(
        input=rows * item * shape.hidden,
        core_inputs=item * (queries + keys - (0 if shape.qk_norm else views)),
        core=item * (2 * queries + keys) + 4 * tokens * shape.heads / tp,
        rest=rest,
    )


def of_rank(config: Config, shape: ModelShape, rank: int, tokens: int) -> float:
    """The most bytes that pipeline rank `rank` holds at once, in a step of many micro-batches of `tokens`.

    Beside the layers a micro-batch keeps its token ids and rotation, the final norm on the last stage, and what a
    stage received from the one before and sent to the next one.
    """
    pp, vpp = config.parallel.pp, config.parallel.vpp
    counts = stage_layers(shape.layers, pp * vpp)
    item, rows = DTYPES[config.model.dtype].itemsize, _rows(config, tokens)
    recompute, full = config.parallel.recompute, config.parallel.recompute == "full"
    chunks, remade = [], 0.0
    for stage in range(rank, pp * vpp, pp):
        first = sum(counts[:stage])
        layers = [layer(config, shape, number, tokens) for number in range(first, first + counts[stage])]
        kept = sum(one.kept(recompute) for one in layers) + tokens * (8 + 2 * item * shape.head_dim)
        last = stage == pp * vpp - 1
        kept += rows * _norm(shape.hidden, item) if last and not full else 0
        kept += rows * item * shape.hidden * ((stage > 0) + (not last))
        chunks.append(kept)
        if full:
            remade = max(remade, *(one.rest + one.core - (one.input if item == 4 else 0) for one in layers))
    return in_flight(chunks, pp, rank) + remade


def in_flight(chunks: Sequence[float], pp: int, rank: int) -> float:
    """The most that is held at once where a micro-batch keeps `chunks[c]` in the rank's virtual stage c.

    Megatron's schedules (Narayanan et al. 2021, arXiv:2104.04473, section 2.2): forward passes go through groups of pp
    micro-batches, all of them through one virtual stage and then the next; backward passes take the virtual stages in
    the opposite order. After the warm-up of pp - rank - 1 passes, or 2 (pp - rank - 1) + (v - 1) pp where there are
    v > 1 virtual stages, each forward pass is followed by a backward pass. With one stage that is pp - rank
    micro-batches.
    """
    count = len(chunks)
    order = [chunk for _ in range(3) for chunk in range(count) for _ in range(pp)]  # as far as it takes to repeat
    warm_up = pp - rank - 1 if count == 1 else 2 * (pp - rank - 1) + (count - 1) * pp
    held = most = sum(chunks[chunk] for chunk in order[:warm_up])
    for forward, backward in zip(order[warm_up:], order, strict=False):
        held += chunks[forward]
        most = max(most, held)
        held -= chunks[count - 1 - backward]
    return most


def _rows(config: Config, tokens: int) -> float:
    """Tokens of a micro-batch that a rank has outside of attention and feed-forward layer."""
    return tokens / config.parallel.tp if config.parallel.sequence_parallel else tokens


def _norm(width: int, item: int) -> float:
    """Bytes a token that an RMS norm keeps for itself; what it gives is kept by what follows."""
    return (4 + item) * width + 4
