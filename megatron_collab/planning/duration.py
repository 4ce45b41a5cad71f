"""Estimates sampling and training time on GPUs by layout and token counts: rooflines at typical utilization."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

from megatron_collab.config import Config
from megatron_collab.launch import server_specs
from megatron_collab.models import hf_to_sglang
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.models.hf_to_sglang import ServerLayout
from megatron_collab.planning.memory import kv_cache, server_weights

# Typical utilization for large models: of a GPU's FLOP/s in training, of its memory bandwidth in sampling.
TRAINING, SAMPLING = 0.4, 0.6


@dataclass(frozen=True)
class Gpu:
    """FLOP/s of dense products in bfloat16, and memory bandwidth in bytes per second."""

    flops: float
    memory: float


def training_seconds(config: Config, shape: ModelShape, gpu: Gpu, tokens: float) -> float:
    """Seconds of forward and backward passes of `tokens` on all GPUs of the run: 6 FLOP per parameter and token.

    8 with full recomputation. The reference's pass adds 2.
    """
    passes = 6 + 2 * (config.parallel.recompute == "full") + 2 * config.refers
    gpus = config.launch.nodes * config.launch.nproc_per_node
    return passes * _parameters(shape) * tokens / (gpus * gpu.flops * TRAINING)


def sampling_seconds(
    config: Config, shape: ModelShape, gpu: Gpu, conversations: int, turns: float, reply: float, wait: float
) -> float:
    """Seconds of `conversations` started together, with `turns` replies and user turns of `reply` tokens each.

    A token takes as long as its server's GPUs need to read weights and cache. Conversations that do not fit the caches
    at once run afterwards. `wait`: seconds until the user answers a reply, or the judge scores the conversation.
    """
    server = server_specs.training(config).policy
    replicas = server.placement.replicas
    heads = kv_cache(server, shape) / max(1, server.max_total_tokens or 1)  # bytes of a token on a GPU
    context = 2 * turns * reply
    capacity = min(server.max_running_requests, (server.max_total_tokens or 0) // max(1.0, context) or 1)
    at_once = max(1.0, min(ceil(conversations / replicas), capacity))
    token = (server_weights(server, shape) + at_once * heads * context / 2) / (gpu.memory * SAMPLING)
    waves = ceil(conversations / (replicas * at_once))
    return waves * turns * (reply * token + wait)


def _parameters(shape: ModelShape) -> int:
    return sum(prod(parameter.shape) for parameter in hf_to_sglang.table(shape, ServerLayout(), 0))
