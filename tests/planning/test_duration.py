"""Estimated duration of a run, calculated by hand for Llama-3.1-8B on 8 GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_collab import patches

patches.apply("megatron")
from megatron_collab.planning import memory  # noqa: E402 (Megatron is imported with it)
from megatron_collab.planning.duration import Gpu, sampling_seconds, training_seconds  # noqa: E402

GPU = Gpu(flops=1e15, memory=3e12)
PARAMETERS = 8.03e9


def test_training_takes_six_flop_per_parameter_and_token() -> None:
    config, shape = memory.read_run(["experiment=train_8b", "algo.kl_coef=0"])
    seconds = training_seconds(config, shape, GPU, 1e6)
    assert seconds == pytest.approx(6 * PARAMETERS * 1e6 / (8 * 1e15 * 0.4), rel=0.01)
    config.parallel.recompute = "full"
    assert training_seconds(config, shape, GPU, 1e6) == pytest.approx(seconds * 8 / 6)
    config.algo.kl_coef = 1e-3
    assert training_seconds(config, shape, GPU, 1e6) == pytest.approx(seconds * 10 / 6)


def test_a_token_takes_the_time_to_read_weights_and_cache() -> None:
    config, shape = memory.read_run(["experiment=train_8b"])  # 8 servers of one GPU, 262,144 tokens, 256 at once
    alone = sampling_seconds(config, shape, GPU, 1, 1.0, 100.0, 0.0)
    assert alone == pytest.approx(100 * 2 * PARAMETERS / (3e12 * 0.6), rel=0.02)
    # 800 conversations of 3 replies: 100 per server, each reading half of its 600 tokens of 128 KiB on average.
    cache = 100 * 300 * 2 * shape.layers * shape.kv_heads * shape.head_dim * 2
    token = (2 * PARAMETERS + cache) / (3e12 * 0.6)
    together = sampling_seconds(config, shape, GPU, 800, 3.0, 100.0, 2.0)
    assert together == pytest.approx(3 * (100 * token + 2.0), rel=0.01)
    # Twice as many as fit at once take twice as long.
    config.rollout.server = replace(config.rollout.server, max_running_requests=100)
    assert sampling_seconds(config, shape, GPU, 1600, 3.0, 100.0, 2.0) == pytest.approx(2 * together)
