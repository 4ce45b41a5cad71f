"""About how long sampling and training take on GPUs, by layout and token counts: rooflines at usual utilisations."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from megatron_collab.config import Config
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.planning.memory import kv_cache, server_weights
from megatron_collab.trainer.megatron.config import DTYPES

# Shares of what a GPU can do that large models usually reach: of its FLOP/s in training, of its memory in sampling.
TRAINING, SAMPLING = 0.4, 0.6


@dataclass(frozen=True)
class Gpu:
    """FLOP/s of dense products in bfloat16, and bytes a second of its memory."""

    flops: float
    memory: float


def training_seconds(config: Config, shape: ModelShape, gpu: Gpu, tokens: float) -> float:
    """Of forward and backward passes of so many tokens on all GPUs of the run: 6 FLOP a parameter and token.

    With full recomputation 8. The reference's pass adds 2.
    """
    passes = 6 + 2 * (config.parallel.recompute == "full") + 2 * config.refers
    gpus = config.launch.nodes * config.launch.nproc_per_node
    return passes * _parameters(config, shape) * tokens / (gpus * gpu.flops * TRAINING)


def sampling_seconds(
    config: Config, shape: ModelShape, gpu: Gpu, conversations: int, turns: float, reply: float, wait: float
) -> float:
    """Of so many conversations, begun together, each of `turns` replies of `reply` tokens and as much said between.

    A token takes as long as its server's GPUs need to read weights and cache. What does not fit their caches at once
    comes after. `wait`: seconds until the user has answered a reply, or the judge the conversation.
    """
    server = config.rollout.server
    heads = kv_cache(config, shape) / max(1, server.max_total_tokens or 1)  # bytes of a token on a GPU
    context = 2 * turns * reply
    fits = min(server.max_running_requests, (server.max_total_tokens or 0) // max(1.0, context) or 1)
    at_once = max(1.0, min(ceil(conversations / server.replicas), fits))
    token = (server_weights(config, shape) + at_once * heads * context / 2) / (gpu.memory * SAMPLING)
    waves = ceil(conversations / (server.replicas * at_once))
    return waves * turns * (reply * token + wait)


def _parameters(config: Config, shape: ModelShape) -> float:
    return server_weights(config, shape) * config.rollout.server.tp / DTYPES[config.model.dtype].itemsize
