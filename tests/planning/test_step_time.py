"""The time of a step on paper against computations of its own: weights by name, a pipeline played pass by pass."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from math import prod

import pytest
from megatron.core.pipeline_parallel.schedules import get_schedule_table

from megatron_collab.config import CONF, Config
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.models.hf_to_megatron import hf_shapes
from megatron_collab.planning import h100
from megatron_collab.planning.memory import network_parts
from megatron_collab.planning.step_time import StepTime, step_samples, step_time


def shape_of(name: str) -> ModelShape:
    return ModelShape.from_hf(json.loads((CONF / "shapes" / f"{name}.json").read_text()))


LLAMA_8B, LLAMA_70B, QWEN_30B = map(shape_of, ("Llama-3.1-8B-Instruct", "Llama-3.3-70B-Instruct", "Qwen3-30B-A3B"))


def configure(nodes: int = 1, gpus: int = 1, tokens: int = 8192, **parallel: object) -> Config:
    """Supervised training of 64 sequences a step."""
    config = Config()
    config.launch.device, config.launch.nodes, config.launch.nproc_per_node = "cuda", nodes, gpus
    config.model.dtype, config.train.stage, config.train.prompts_per_step = "bfloat16", "sft", 64
    config.train.tokens_per_micro_batch = tokens
    config.parallel = replace(config.parallel, **parallel)
    return config


def operations(shape: ModelShape, length: int) -> float:
    """Of a forward pass per token: two a weight of its matrices, and causal attention, as in tools/bench/gpu.py."""
    total = 0.0
    for name, sides in hf_shapes(shape).items():
        if len(sides) == 2 and "embed_tokens" not in name:
            used = shape.experts.per_token / shape.experts.count if shape.experts and ".experts." in name else 1.0
            total += 2 * used * prod(sides)
    return total + shape.layers * 2 * length * shape.heads * shape.head_dim


@pytest.mark.parametrize("shape", [LLAMA_8B, QWEN_30B], ids=["dense", "experts"])
def test_a_gpu_alone_computes_at_the_measured_rate(shape: ModelShape) -> None:
    time = step_time(configure(), shape, 4096)
    assert time.seconds == pytest.approx(3 * 64 * 4096 * operations(shape, 4096) / h100.LAYERS, rel=1e-9)
    assert time.mfu == pytest.approx(h100.LAYERS / 989e12, rel=1e-9)
    assert (time.micro_batches, time.bubble, time.node_bytes, time.network_bytes) == (32, 0, 0, 0)


def played(micro_batches: int, pp: int, vpp: int) -> float:
    """Seconds of a pipeline whose forward passes take 1 / vpp and backward passes 2 / vpp, each as soon as Megatron's
    order on its rank and its inputs allow."""
    table = get_schedule_table(micro_batches, vpp, pp)
    orders = []
    for rank in range(pp):
        warm_up = pp - rank - 1 if vpp == 1 else 2 * (pp - rank - 1) + (vpp - 1) * pp
        forward = [(True, number, chunk) for number, chunk in table]
        backward = [(False, number, vpp - 1 - chunk) for number, chunk in table]
        warm_up = min(warm_up, len(table))
        steady = [passed for pair in zip(forward[warm_up:], backward, strict=False) for passed in pair]
        orders.append([*forward[:warm_up], *steady, *backward[len(table) - warm_up :]])
    ended: dict[tuple[bool, int, int], float] = {}
    free, last = [0.0] * pp, pp * vpp - 1
    while any(orders):
        for rank, order in enumerate(orders):
            while order:
                forward, number, chunk = order[0]
                stage = chunk * pp + rank
                needed = (True, number, stage - 1) if forward else (False, number, stage + 1)
                if not forward and stage == last:
                    needed = (True, number, stage)
                if needed[2] >= 0 and needed not in ended:
                    break
                free[rank] = max(free[rank], ended.get(needed, 0.0)) + (1 if forward else 2) / vpp
                ended[forward, number, stage] = free[rank]
                order.pop(0)
    return max(free)


@pytest.mark.parametrize(("micro_batches", "pp", "vpp"), [(8, 4, 1), (8, 4, 2), (16, 4, 4), (4, 2, 2), (5, 2, 1)])
def test_the_bubble_is_that_of_the_pipeline_played(micro_batches: int, pp: int, vpp: int) -> None:
    config = configure(gpus=pp, tokens=-(-64 * 512 // micro_batches), pp=pp, vpp=vpp)
    time = step_time(config, LLAMA_8B, 512)
    assert time.micro_batches == micro_batches
    assert time.bubble == pytest.approx(1 - 3 * micro_batches / played(micro_batches, pp, vpp), rel=1e-9)


@pytest.mark.parametrize(
    ("shape", "parallel"),
    [(LLAMA_70B, {"tp": 8, "pp": 4}), (QWEN_30B, {"tp": 2, "pp": 2, "ep": 8}), (LLAMA_8B, {"tp": 2}), (LLAMA_8B, {})],
    ids=["70B", "experts", "8B", "8B of its own"],
)
def test_gradients_and_parameters_are_exchanged_once(shape: ModelShape, parallel: Mapping[str, int]) -> None:
    """As many bytes as the memory plan has of gradients and, for them, of parameters in 16 bits, sent over rings."""
    config = configure(nodes=16, gpus=8, **{"sequence_parallel": "tp" in parallel, **parallel})
    tp, pp, ep = config.parallel.tp, config.parallel.pp, config.parallel.ep
    far = step_time(config, shape, 512).network_bytes - hidden_states(config, shape)
    parts = [network_parts(config, shape, rank) for rank in range(pp)]
    gradients = max(part.training for stage in parts for part in stage if part.name == "gradients")
    experts = 4 * sum(prod(sides) for name, sides in hf_shapes(shape).items() if ".experts." in name) / pp / ep
    expected = (gradients - experts) * sent_to_other_nodes(128 // pp, tp) + experts * sent_to_other_nodes(128 // pp, ep)
    assert far == pytest.approx(1.5 * expected, rel=0.03)  # norms are not counted


def test_a_group_over_nodes_takes_as_long_as_its_adapters_need() -> None:
    """All bytes of a node's group leave it over as many adapters as the group has ranks there."""
    alone, far = (step_time(configure(nodes, 8, tp=2, sequence_parallel=True), LLAMA_8B, 64 * 512) for nodes in (1, 2))
    added = (far.seconds - alone.seconds / 2, far.network_bytes / h100.NETWORK)
    within = sum(prod(sides) for sides in hf_shapes(LLAMA_8B).values()) / 2 * 6 * 3 / 4 / h100.NODE
    assert added[0] == pytest.approx(added[1] - within / 2, rel=0.02)


def sent_to_other_nodes(ranks: int, distance: int) -> float:
    """The part of a buffer that the busiest rank of a group sends to other nodes of 8, summed or gathered over rings.

    The group has every `distance`-th of `ranks`; each of its rings leaves a node from another of them.
    """
    nodes = [list(members) for _, members in groupby(range(0, ranks, distance), lambda rank: rank // 8)]
    size, replicas = len(nodes[0]), ranks // distance
    sent = Counter[int]()
    for ring in range(size):
        order = [members[(ring + place) % size] for members in nodes for place in range(size)]
        for rank, following in zip(order, order[1:] + order[:1], strict=True):
            if rank // 8 != following // 8:
                sent[rank] += 1
    return max(sent.values()) / size * (replicas - 1) / replicas


@pytest.mark.parametrize(("nodes", "pp"), [(1, 2), (2, 2), (2, 4), (4, 8)])
@pytest.mark.parametrize("vpp", [1, 2])
def test_hidden_states_cross_nodes_if_a_border_does(nodes: int, pp: int, vpp: int) -> None:
    """The replicas of a stage are on one node here, so that gradients stay there."""
    config = configure(nodes, 8, pp=pp, vpp=vpp)
    stage = 8 * nodes // pp
    crosses = any(rank // 8 != (rank + stage) // 8 for rank in range(8 * nodes - stage))
    expected = vpp * hidden_states(config, LLAMA_8B) if crosses else 0.0
    assert step_time(config, LLAMA_8B, 512).network_bytes == pytest.approx(expected)


def hidden_states(config: Config, shape: ModelShape) -> float:
    """Bytes that a rank sends to the next stage forward and to the previous one backward."""
    parallel = config.parallel
    rows = 64 * 512 / (config.launch.ranks / parallel.pp)
    return 2 * rows * shape.hidden * 2 if parallel.pp > 1 else 0.0


def test_what_slows_a_step() -> None:
    def time(**parallel: object) -> StepTime:
        return step_time(configure(nodes=4, gpus=8, **parallel), LLAMA_8B, 512)

    plain, split = time(), time(tp=8, sequence_parallel=True)
    assert split.node_bytes == 32 * 8 * (64 * 512 / 4) * 4096 * 2 * 7 / 8  # gradients leave the node
    assert split.network_bytes < plain.network_bytes
    none, selective, full = (time(tp=8, recompute=name) for name in ("none", "selective", "full"))
    assert none.seconds < selective.seconds < full.seconds and none.mfu > full.mfu
    assert full.seconds == pytest.approx(4 / 3 * none.seconds, rel=0.25)
    assert time(tp=8, pp=4, vpp=2).seconds < time(tp=8, pp=4).seconds


@pytest.mark.parametrize("vpp", [1, 2])
def test_a_scoring_pass_is_over_the_whole_batch(vpp: int) -> None:
    """So that it waits for the pipeline once, whatever the number of mini-batches."""

    def reference_pass(mini_batches: int) -> float:
        config = configure(gpus=4, tokens=512, pp=4, vpp=vpp)
        config.train.stage, config.train.prompts_per_step, config.train.rollouts_per_prompt = "rl", 8, 8
        config.algo.mini_batches = mini_batches
        scored = step_time(config, LLAMA_8B, 512).seconds
        config.algo.kl_coef = 0.0
        return scored - step_time(config, LLAMA_8B, 512).seconds

    assert reference_pass(4) == pytest.approx(reference_pass(1), rel=1e-9)


def test_a_step_of_reinforcement_learning_counts_its_passes() -> None:
    config = configure(tokens=16384)
    trained = step_time(config, LLAMA_8B, 512).seconds
    config.train.stage, config.train.prompts_per_step, config.train.rollouts_per_prompt = "rl", 8, 8
    assert step_samples(config) == 64
    assert step_time(config, LLAMA_8B, 512).seconds == pytest.approx(4 / 3 * trained)  # and the reference
    config.algo.kl_coef = 0.0
    assert step_time(config, LLAMA_8B, 512).seconds == pytest.approx(trained)
    config.algo.epochs = 2  # old log-probs are computed beforehand
    assert step_time(config, LLAMA_8B, 512).seconds == pytest.approx(7 / 3 * trained)
    config.rollout.train_turns = "all"
    assert step_samples(config) == 64 * (1 + config.rollout.futures)
