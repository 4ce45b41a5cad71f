"""Time of the learning part of a step, its pipeline bubble and its traffic, by a roofline of an H100 (h100.py).

The time includes the forward passes before the update (old and reference log-probs, values) and the update. It excludes
the optimizer's own step, and sampling, publishing and memory transfers, which hardly depend on the trainer's layout.

A pass of M micro-batches over p stages with v virtual stages each takes (M + (p - 1) / v) times the pass of a
micro-batch over the slowest stage, of which the (p - 1) / v are the bubble (Narayanan et al. 2021, arXiv:2104.04473,
section 2.2). That pass is arithmetic at the measured rate of whole layers, or reading the weights if this takes longer,
plus what waits for other GPUs. For T tokens of a micro-batch on a rank, with the letters of activations.py:

    a layer        2 T weights / t, and 2 T L Q / t of causal attention in sequences of length L; backward twice that,
                   with adapters once
    tensor         4 exchanges of T i h (t - 1) / t, forward and backward each; a layer with experts has 2 of them
    experts        2 exchanges of k T / t tokens of i h, of which (e - 1) / e leave the rank
    context        2 T i K / t (c - 1), forward and backward each, hidden behind attention unless it takes longer
    pipeline       T i h / s between stages; hidden with virtual stages
    data parallel  after the last micro-batch 4 bytes a gradient, and i a parameter: Megatron-Core reduces after the
                   backward pass, since overlap is off. A group with m ranks on a node has m rings, each of which leaves
                   the node by the adapter of another rank, so that an adapter carries 1 / m of these bytes

Backward, tensor parallel ranks gather their inputs once more, hidden behind products; these bytes are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from megatron_collab.algo.advantages import advantage_class
from megatron_collab.config import Config
from megatron_collab.launch.trainer_specs import trainer_layout
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.models.parallel_layout import stages
from megatron_collab.planning import h100
from megatron_collab.trainer.megatron.config import DTYPES


@dataclass(frozen=True)
class StepTime:
    """The learning part of a step; `score`: the seconds before the update. `micro_batches`: of a rank in a pass for one
    optimizer step; `bubble`: the part of a pass in which a stage waits for others; `mfu`: arithmetic without
    recomputation over the seconds, as a part of h100.PEAK; bytes that the busiest rank sends within its node and to
    other nodes.
    """

    seconds: float
    score: float
    micro_batches: int
    bubble: float
    mfu: float
    node_bytes: float
    network_bytes: float


class _Work(NamedTuple):
    """Of one forward pass on a rank: seconds of arithmetic, seconds of waiting, bytes sent by link."""

    arithmetic: float = 0.0
    waiting: float = 0.0
    node_bytes: float = 0.0
    network_bytes: float = 0.0

    def plus(self, other: _Work, times: float = 1.0) -> _Work:
        return _Work(*(value + times * addend for value, addend in zip(self, other, strict=True)))

    @property
    def seconds(self) -> float:
        return self.arithmetic + self.waiting


def step_samples(config: Config) -> int:
    """Sequences that a step learns from, at most."""
    train, rollout = config.train, config.rollout
    if config.objective == "policy":
        futures = rollout.futures if rollout.train_turns == "all" else 0
        return train.prompts_per_step * train.rollouts_per_prompt * (1 + futures)
    return train.prompts_per_step * (2 if config.objective == "dpo" else 1)


def step_time(config: Config, shape: ModelShape, sample_tokens: float) -> StepTime:
    """The learning part of a step of `step_samples`; `sample_tokens`: mean positions that a sample adds, after prefixes
    that samples share are computed once. The settings must have been validated.
    """
    parallel, algo, pp, vpp = config.parallel, config.algo, config.parallel.pp, config.parallel.vpp
    samples = step_samples(config) / algo.mini_batches
    replicas = config.launch.ranks // (parallel.tp * pp * parallel.cp)
    positions = samples * sample_tokens / replicas
    count = ceil(positions / (config.train.tokens_per_micro_batch * parallel.cp))
    count = min(count, ceil(samples / replicas))  # a sample above the budget is a micro-batch
    count = ceil(count / pp) * pp if vpp > 1 else count  # see microbatches.pack
    tokens = max(positions / count, sample_tokens) / parallel.cp

    forward, recomputed = _slowest_stage(config, shape, tokens, sample_tokens)
    gradients_of = 1 if config.model.lora.rank else 2  # inputs, and weights unless they are frozen
    arithmetic = gradients_of * forward.arithmetic + recomputed.arithmetic
    update = forward.plus(forward.plus(recomputed)._replace(arithmetic=arithmetic))
    exchange = _pipeline_exchange(config, shape, tokens)
    forward, update = forward.plus(exchange), update.plus(exchange, 2)

    networks = 2 if config.objective == "policy" and advantage_class(algo.advantage).critic else 1
    updates = networks * algo.epochs * algo.mini_batches
    passes, idle = _scoring_passes(config), (pp - 1) / vpp
    scored = passes * count * algo.mini_batches  # micro-batches; a pass is over the whole batch
    rounds, gradients = count + idle, _gradient_exchange(config, shape)
    score = (scored + passes * idle) * forward.seconds
    seconds = score + updates * (rounds * update.seconds + gradients.seconds)
    sent = _Work().plus(forward, scored).plus(update, count * updates).plus(gradients, updates)
    operations = samples * sample_tokens * _operations(shape, sample_tokens)
    operations *= passes * algo.mini_batches + updates * (1 + gradients_of)
    return StepTime(
        seconds=seconds,
        score=score,
        micro_batches=count,
        bubble=1 - count / rounds,
        mfu=operations / (seconds * config.launch.ranks * h100.PEAK),
        node_bytes=sent.node_bytes,
        network_bytes=sent.network_bytes,
    )


def _scoring_passes(config: Config) -> int:
    """Forward passes over all samples before the update, as PolicyTrainer.score decides."""
    algo, refers = config.algo, config.reference in ("copy", "base")
    if config.objective != "policy":
        return int(refers)
    old = algo.mini_batches * algo.epochs > 1 or (refers and algo.kl_in == "reward")
    teaches = algo.teacher.place in ("reference", "policy", "model")
    return int(refers) + int(old) + int(teaches) + int(advantage_class(algo.advantage).critic)


def _operations(shape: ModelShape, length: float) -> float:
    """Operations of a forward pass per token."""
    layers = sum(2 * sum(_used_weights(shape, number)) for number in range(shape.layers))
    return layers + shape.layers * _attention(shape, length) + 2 * shape.hidden * shape.vocab


def _attention(shape: ModelShape, length: float) -> float:
    """Operations per token: scores and weighted values, 2 each per element, of half a sequence on average."""
    return 2 * 2 * length / 2 * shape.heads * shape.head_dim


def _used_weights(shape: ModelShape, number: int) -> tuple[float, float]:
    """Weights of layer `number` that a token is multiplied with, in attention and in the feed-forward network."""
    attention = 2 * shape.hidden * shape.head_dim * (shape.heads + shape.kv_heads)
    experts = shape.experts
    if experts is None or number not in experts.layers:
        return attention, 3 * shape.hidden * shape.ffn
    return attention, shape.hidden * (experts.count + 3 * experts.per_token * experts.ffn)


def _experts(shape: ModelShape, number: int) -> float:
    """Weights of all experts of layer `number`."""
    experts = shape.experts
    sparse = experts is not None and number in experts.layers
    return 3 * shape.hidden * experts.count * experts.ffn if experts and sparse else 0.0


def _slowest_stage(config: Config, shape: ModelShape, tokens: float, length: float) -> tuple[_Work, _Work]:
    """The forward pass of a micro-batch over the slowest stage, and what of it is computed again for the backward."""
    counts: list[dict[bool, int]] = [{} for _ in range(config.parallel.pp)]  # layers with and without experts
    for number, stage in enumerate(stages(shape, trainer_layout(config))):
        sparse = _experts(shape, number) > 0
        counts[stage][sparse] = counts[stage].get(sparse, 0) + 1
    first = {sparse: number for number in reversed(range(shape.layers)) for sparse in [_experts(shape, number) > 0]}
    kinds = {sparse: _layer(config, shape, number, tokens, length) for sparse, number in first.items()}
    totals = []
    for stage, layers in enumerate(counts):
        forward = recomputed = _Work()
        for sparse, count in layers.items():
            attention, feed_forward = kinds[sparse]
            forward = forward.plus(attention, count).plus(feed_forward, count)
            repeated = {"none": (), "selective": (feed_forward,), "full": (attention, feed_forward)}
            for part in repeated[config.parallel.recompute]:
                recomputed = recomputed.plus(part, count)
        if stage == config.parallel.pp - 1:
            head = _arithmetic(config, 2 * shape.hidden * shape.vocab, shape.hidden * shape.vocab, tokens)
            forward = forward.plus(_Work(head))
        totals.append((forward, recomputed))
    return max(totals, key=lambda total: 3 * total[0].seconds + total[1].seconds)


def _layer(config: Config, shape: ModelShape, number: int, tokens: float, length: float) -> tuple[_Work, _Work]:
    """The forward pass of attention and of the feed-forward network of a layer."""
    parallel, item = config.parallel, DTYPES[config.model.dtype].itemsize
    tp, cp, ep, states = parallel.tp, parallel.cp, parallel.ep, tokens * shape.hidden * item
    attention_weights, weights = _used_weights(shape, number)
    experts = _experts(shape, number)
    core = _attention(shape, length)
    attention = _Work(_arithmetic(config, 2 * attention_weights + core, attention_weights, tokens))
    ring = 2 * tokens * item * shape.kv_heads * shape.head_dim / tp * (cp - 1)
    sent = _sent(config, ring, tp * cp)
    hidden = tokens * core / tp / _rate(config)
    attention = attention.plus(sent._replace(waiting=max(0.0, sent.waiting - hidden)))
    halves = _sent(config, 2 * states * (tp - 1) / tp, tp)  # a gather and a sum over the ranks
    if not experts:
        feed_forward = _Work(_arithmetic(config, 2 * weights, weights, tokens))
        return attention.plus(halves), feed_forward.plus(halves)
    assert shape.experts is not None
    feed_forward = _Work(_arithmetic(config, 2 * weights, experts * tp / ep, tokens))
    routed = 2 * shape.experts.per_token * states / tp * (ep - 1) / ep
    return attention.plus(halves), feed_forward.plus(_sent(config, routed, ep))


def _arithmetic(config: Config, operations: float, weights: float, tokens: float) -> float:
    """Seconds for `operations` per token, or for reading the `weights`, over the tensor parallel ranks."""
    read = weights * DTYPES[config.model.dtype].itemsize / h100.HBM
    return max(operations * tokens / _rate(config), read) / config.parallel.tp


def _rate(config: Config) -> float:
    return h100.LAYERS / (h100.FP8_TIME if config.model.fp8 else 1.0)


def _sent(config: Config, size: float, span: int) -> _Work:
    """A rank sends `size` bytes within a group of ranks that covers `span` consecutive ones."""
    if span > config.launch.nproc_per_node:
        return _Work(0.0, size / h100.NETWORK, 0.0, size)
    return _Work(0.0, size / h100.NODE, size, 0.0)


def _pipeline_exchange(config: Config, shape: ModelShape, tokens: float) -> _Work:
    """Hidden states of a micro-batch to the next stage, of all virtual stages of a rank, over the slowest border."""
    parallel = config.parallel
    if parallel.pp == 1:
        return _Work()
    rows = tokens / parallel.tp if parallel.sequence_parallel else tokens
    size = rows * shape.hidden * DTYPES[config.model.dtype].itemsize * parallel.vpp
    sent = _sent(config, size, config.launch.ranks)  # some border crosses nodes if the stages do
    return sent if parallel.vpp == 1 else sent._replace(waiting=0.0)


def _gradient_exchange(config: Config, shape: ModelShape) -> _Work:
    """Sum of the gradients and gather of the parameters of an optimizer step, of the stage with most parameters."""
    parallel, layout = config.parallel, trainer_layout(config)
    if config.model.lora.rank:
        return _Work()  # adapters are small
    stage_ranks = config.launch.ranks // parallel.pp
    dense, experts = [0.0] * parallel.pp, [0.0] * parallel.pp
    for number, stage in enumerate(stages(shape, layout)):
        attention, feed_forward = _used_weights(shape, number)
        sparse = _experts(shape, number)
        dense[stage] += (attention + (0.0 if sparse else feed_forward)) / parallel.tp
        experts[stage] += sparse / parallel.ep
    vocabulary = shape.hidden * shape.vocab / parallel.tp
    dense[0] += vocabulary
    dense[-1] += 0.0 if shape.tied and parallel.pp == 1 else vocabulary
    works = [
        _reduced(config, stage_dense, stage_ranks // parallel.tp).plus(
            _reduced(config, stage_experts, stage_ranks // parallel.ep)
        )
        for stage_dense, stage_experts in zip(dense, experts, strict=True)
    ]
    return max(works, key=lambda work: work.seconds)


def _reduced(config: Config, elements: float, replicas: int) -> _Work:
    """As `_gradient_exchange`, of `elements` on a rank, which `replicas` ranks of the stage hold."""
    size = elements * (4 + DTYPES[config.model.dtype].itemsize) * (replicas - 1) / replicas
    width, stage_ranks = config.launch.nproc_per_node, config.launch.ranks // config.parallel.pp
    rings = max(1, width // (stage_ranks // replicas))  # the group's ranks on a node, one every stage_ranks / replicas
    far = size / rings if stage_ranks > width else 0.0
    return _Work(0.0, max(far / h100.NETWORK, (size - far) / h100.NODE), size - far, far)
