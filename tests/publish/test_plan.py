"""The plan writes every byte of every tensor once, whatever the layout and the buckets."""

from __future__ import annotations

import random

import numpy as np
import pytest

from megatron_collab.publish import hf_map, plan
from megatron_collab.publish.hf_map import ModelShape


def random_shape(rng: random.Random, tp: int) -> ModelShape:
    kv_heads = tp * rng.randint(1, 2)
    return ModelShape(
        family="qwen3",
        layers=rng.randint(1, 4),
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
        rope_theta=1e4,
        rope_factor=None,
        max_positions=64,
    )


def stages(shape: ModelShape, pp: int) -> list[set[str]]:
    """Parameters of each pipeline stage, layers cut anywhere; a tied model has its embedding on both ends."""
    held: list[set[str]] = [set() for _ in range(pp)]
    for entry in hf_map.table(shape):
        if entry.megatron.startswith("decoder.layers."):
            layer = int(entry.megatron.split(".")[2])
            held[layer * pp // shape.layers].add(entry.megatron)
        else:
            held[0 if entry.megatron.startswith("embedding") else -1].add(entry.megatron)
    return held


@pytest.mark.parametrize("seed", range(40))
def test_every_element_is_written_once_to_its_place(seed: int) -> None:
    rng = random.Random(seed)
    tp, dp = rng.choice([1, 2, 4]), rng.choice([1, 2, 3])
    shape = random_shape(rng, tp)
    pp = rng.randint(1, min(3, shape.layers))
    limit = rng.choice([1, 200, 1000, 10**6])
    layout = plan.buckets(shape, 4, limit)

    placed = [tensor.name for bucket in layout for tensor in bucket.tensors]
    assert placed == list(hf_map.hf_shapes(shape))
    written = {name: np.zeros(dimensions, int) for name, dimensions in hf_map.hf_shapes(shape).items()}
    for held in stages(shape, pp):
        for tp_rank in range(tp):
            for dp_rank in range(dp):
                writes = plan.writes(layout, shape, held, tp=tp, tp_rank=tp_rank, dp=dp, dp_rank=dp_rank)
                assert len(writes) == len(layout)
                for bucket, found in zip(layout, writes, strict=True):
                    assert {write.target for write in found} <= {tensor.name for tensor in bucket.tensors}
                    for write in found:
                        assert write.source in held
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
