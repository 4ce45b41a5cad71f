"""Random small models and layouts of trainer and server, drawn by seed."""

from __future__ import annotations

import random
from typing import Any

import pytest

from megatron_collab.models.hf_config import Experts, ModelShape, Rope
from megatron_collab.models.hf_to_sglang import ServerLayout
from megatron_collab.models.parallel_layout import TrainerLayout

Case = tuple[ModelShape, TrainerLayout, ServerLayout]


def divisors(size: int) -> list[int]:
    return [part for part in range(1, size + 1) if size % part == 0]


def seeds(count: int) -> list[Any]:
    """Seeds to draw by: the first 40 in make test, the remaining ones in make test-exhaustive."""
    return [*range(40), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(40, count))]


def draw(seed: int, equal_cuts: bool = False, fp8: bool = False) -> Case:
    """A model that both layouts can hold. `equal_cuts`: of the same tensor parallel size; `fp8`: in whole blocks."""
    rng = random.Random(seed)
    tp, server_tp = rng.choice([1, 2, 4]), rng.choice([1, 2, 4, 8])
    server_tp = tp if equal_cuts else server_tp
    block = 128 if fp8 else 1
    widest = max(tp, server_tp)
    kv_heads = tp * rng.choice([1, 2])
    if max(kv_heads, server_tp) % min(kv_heads, server_tp):
        kv_heads = widest
    heads = kv_heads * rng.choice([1, 2, 3])
    heads *= 1 if heads % server_tp == 0 else server_tp
    layers = rng.randint(1, 6)
    pp = rng.choice([size for size in (1, 2, 3) if size <= layers])
    vpp = rng.randint(1, layers // pp) if pp > 1 else 1
    cp, dp = rng.choice([1, 1, 2]), rng.choice([1, 2, 3])
    experts, ep, server_ep = None, 1, 1
    if rng.random() < 0.4:
        ep = rng.choice([size for size in divisors(tp * cp * dp) if size <= 6])
        server_ep = rng.choice(divisors(server_tp))
        count = ep * server_ep * rng.choice([1, 2])
        experts = Experts(count, 1, server_tp * rng.randint(1, 2) * block, False, tuple(range(layers)))
    shape = ModelShape(
        family="llama",
        layers=layers,
        hidden=rng.choice([130, 256]) if fp8 else rng.randint(2, 6),
        ffn=tp * server_tp * rng.randint(1, 2) * block,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=block if fp8 else rng.randint(1, 3),
        vocab=rng.randint(3, 200),
        tied=rng.random() < 0.5,
        qkv_bias=rng.random() < 0.5,
        qk_norm=rng.random() < 0.5,
        norm_eps=1e-6,
        rope=Rope(1e4),
        max_positions=64,
        experts=experts,
    )
    trainer = TrainerLayout(tp, pp, vpp, cp, ep, tp * pp * cp * dp)
    return shape, trainer, ServerLayout(server_tp, server_ep, fp8)
