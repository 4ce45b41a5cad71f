"""The plan writes every byte of every tensor once, whatever the layout and the buckets."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest

from megatron_collab.publish import hf_buckets as plan
from megatron_collab.publish import hf_map
from megatron_collab.publish.hf_config import Experts, ModelShape, Rope
from megatron_collab.publish.hf_map import Place


def random_shape(rng: random.Random, tp: int) -> ModelShape:
    kv_heads = tp * rng.randint(1, 2)
    layers = rng.randint(1, 4)
    sparse = tuple(layer for layer in range(layers) if rng.random() < 0.5)
    return ModelShape(
        family="qwen3",
        layers=layers,
        hidden=rng.randint(2, 6),
        ffn=tp * rng.randint(1, 4),
        heads=kv_heads * rng.randint(1, 3),
        kv_heads=kv_heads,
        head_dim=2 * rng.randint(1, 2),
        vocab=rng.randint(3, 20),
        tied=rng.random() < 0.5,
        qkv_bias=rng.random() < 0.5,
        qk_norm=rng.random() < 0.5,
        norm_eps=1e-6,
        rope=Rope(1e4),
        max_positions=64,
        experts=Experts(4, 2, rng.randint(1, 3), True, sparse) if sparse else None,
    )


def held(shape: ModelShape, chunks: int, pp: int, pp_rank: int, ep: int, ep_rank: int) -> set[str]:
    """Parameters of a rank, layers cut anywhere into `chunks` that go round over the pipeline stages.

    A tied model has its embedding on both ends; an expert-parallel rank has its share of the experts.
    """
    found = set()
    for entry in hf_map.table(shape):
        if entry.megatron.startswith("decoder.layers."):
            chunk = int(entry.megatron.split(".")[2]) * chunks // shape.layers
        else:
            chunk = 0 if entry.megatron.startswith("embedding") else chunks - 1
        expert = int(entry.megatron.split(".")[5]) * ep // 4 if entry.expert else ep_rank
        if chunk % pp == pp_rank and expert == ep_rank:
            found.add(entry.megatron)
    return found


@pytest.mark.parametrize("seed", range(40))
def test_every_element_is_written_once_to_its_place(seed: int) -> None:
    rng = random.Random(seed)
    tp, dp = rng.choice([1, 2, 4]), rng.choice([1, 2, 4])
    shape = random_shape(rng, tp)
    pp = rng.randint(1, min(3, shape.layers))
    chunks = pp * rng.randint(1, shape.layers // pp)
    ep = rng.choice([size for size in (1, 2, 4) if tp * dp % size == 0])
    limit = rng.choice([1, 200, 1000, 10**6])
    layout = plan.buckets(shape, 4, limit)

    placed = [tensor.name for bucket in layout for tensor in bucket.tensors]
    assert placed == list(hf_map.hf_shapes(shape))
    written = {name: np.zeros(dimensions, int) for name, dimensions in hf_map.hf_shapes(shape).items()}
    for pp_rank, rank in product(range(pp), range(tp * dp)):
        own = held(shape, chunks, pp, pp_rank, ep, rank % ep)
        place = Place(tp, rank % tp, dp, rank // tp, tp * dp // ep, rank // ep)
        writes = plan.writes(layout, shape, own, place)
        assert len(writes) == len(layout)
        for bucket, found in zip(layout, writes, strict=True):
            assert {write.target for write in found} <= {tensor.name for tensor in bucket.tensors}
            for write in found:
                assert write.source in own
                written[write.target][write.target_index] += 1
    assert all((count == 1).all() for count in written.values())


@pytest.mark.parametrize("limit", [1, 300, 4096, 10**9])
def test_buckets_are_aligned_and_within_the_limit(limit: int) -> None:
    shape = random_shape(random.Random(limit), 2)
    for bucket in plan.buckets(shape, 2, limit):
        end = 0
        for tensor in bucket.tensors:
            assert tensor.offset >= end and tensor.offset % plan.ALIGNMENT == 0
            end = tensor.offset + 2 * int(np.prod(tensor.shape))
        assert end <= bucket.size
        assert len(bucket.tensors) == 1 or end <= limit
