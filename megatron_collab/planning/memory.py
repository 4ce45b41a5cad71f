"""Memory of a GPU on paper: what a run needs, from its settings and the model's shape alone.

`plan` counts what the program allocates and keeps. Not counted: CUDA contexts, NCCL's buffers, CUDA graphs and
workspaces of SGLang, what lives for a moment within a pass, and fragments; leave some GiB.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod

from megatron_collab.config import Config
from megatron_collab.models import hf_to_megatron, hf_to_sglang
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.models.parallel_layout import ranks, servers_per_node, stage_layers
from megatron_collab.planning import activations
from megatron_collab.runtime import device
from megatron_collab.trainer import logprobs
from megatron_collab.trainer.megatron.config import DTYPES
from megatron_collab.weight_sync import fp8
from megatron_collab.weight_sync.plan import BUCKET_BYTES, server_layout

GIB = float(1 << 30)


@dataclass(frozen=True)
class Part:
    """Bytes on the device while the run trains, and while it samples; `host`: on the host instead."""

    name: str
    training: float
    sampling: float
    host: float = 0.0


@dataclass(frozen=True)
class Plan:
    """`stages[r]`: the parts of a rank of pipeline stage r that holds as much as any other one of that stage.

    `dp` is the data parallel size.
    """

    gpus: int
    dp: int
    stages: tuple[tuple[Part, ...], ...]

    @property
    def fullest(self) -> int:
        """The pipeline stage whose ranks need the most."""
        return max(range(len(self.stages)), key=lambda stage: self.peak(stage))

    def peak(self, stage: int) -> float:
        """Bytes in the phase that needs more."""
        parts = self.stages[stage]
        return max(sum(part.training for part in parts), sum(part.sampling for part in parts))


@dataclass(frozen=True)
class Network:
    """Bytes of a trained network on a rank: its parameters, their gradients, its optimizer."""

    parameters: float
    gradients: float
    optimizer: float


def plan(config: Config, shape: ModelShape) -> Plan:
    """The parts by pipeline stage; the settings must have passed their checks.

    Policy, reference and critic share their layout. The optimizer works on the policy and the critic in turn, so
    activations are counted once. Colocated servers have their weights and their cache while the run samples only.
    """
    parallel = config.parallel
    gpus, tokens = ranks(config), micro_batch_tokens(config)
    sampling = config.train.stage == "rl"
    stages = []
    for rank in range(parallel.pp):
        policy = network(config, shape, rank)
        parts = [
            Part("parameters", policy.parameters, policy.parameters),
            _away("gradients", policy.gradients, config, host=False),
            _away("optimizer", policy.optimizer, config),
        ]
        if sampling and config.algo.kl_coef > 0:
            parts.append(Part("reference", policy.parameters, policy.parameters))
        if sampling and config.algo.advantage == "gae":
            critic = network(config, shape, rank, critic=True)
            parts += [
                Part("critic: parameters", critic.parameters, critic.parameters),
                _away("critic: gradients", critic.gradients, config, host=False),
                _away("critic: optimizer", critic.optimizer, config),
            ]
        parts.append(Part("activations", activations.of_rank(config, shape, rank, tokens), 0.0))
        if rank == parallel.pp - 1:
            parts.append(Part("head", head(config, shape, tokens), 0.0))
        # Servers take a node's devices in order, and so do pipeline stages: all ranks of the first, then of the second.
        first_gpu = rank * gpus // parallel.pp % config.launch.nproc_per_node
        server = config.rollout.server
        if sampling and server.colocated and first_gpu < servers_per_node(config) * server.tp:
            weights, cache = server_weights(config, shape), kv_cache(config, shape)
            buckets = publish_buckets(config, weights)
            parts += [
                Part("server: weights", 0.0, weights),
                Part("server: KV cache", 0.0, cache),
                Part("publish buckets", buckets, buckets),
            ]
        stages.append(tuple(parts))
    return Plan(
        gpus=gpus,
        dp=gpus // (parallel.tp * parallel.pp * parallel.cp),
        stages=tuple(stages),
    )


def _away(name: str, size: float, config: Config, host: bool = True) -> Part:
    """What parallel.offload takes off the device while sampling; gradients come back as zeros, so nothing is kept."""
    if not config.parallel.offload:
        return Part(name, size, size)
    return Part(name, size, 0.0, size if host else 0.0)


def network(config: Config, shape: ModelShape, rank: int, critic: bool = False) -> Network:
    """A trained network on a rank of pipeline stage `rank`.

    With i bytes of the dtype and d data (times context) parallel ranks, over which the optimizer is cut (Rajbhandari
    et al. 2020, arXiv:1910.02054, stage 1), a parameter takes i bytes, 4 for its gradient (the float32 buffer of
    Megatron's DistributedDataParallel) and 12 / d for float32 master and two moments; 8 / d where it is float32
    itself. Experts, spread over parallel.ep, have tp cp dp / ep replicas instead. With FP8 (read, not measured) the
    linear layers hold data and transpose, 2 bytes a weight, instead of their parameters with model.fp8_params, else
    beside them. A `critic` has a value of width h on the last stage, and does not train an output layer of its own.
    """
    parallel, model = config.parallel, config.model
    item = DTYPES[model.dtype].itemsize
    state = 8 if item == 4 else 12
    stage_ranks = ranks(config) // parallel.pp
    dense, experts, eight_bit, frozen = _counts(config, shape, rank, critic)
    trained = dense + experts
    copies = (2 - item if model.fp8_params else 2) * eight_bit
    return Network(
        parameters=item * (trained + frozen) + copies,
        gradients=4 * trained,
        optimizer=state * (dense / (stage_ranks // parallel.tp) + experts / (stage_ranks // parallel.ep)),
    )


def _counts(config: Config, shape: ModelShape, rank: int, critic: bool) -> tuple[float, float, float, float]:
    """Elements on a rank: trained and dense, trained experts, those with FP8 data, not trained."""
    parallel, model = config.parallel, config.model
    stages = parallel.pp * parallel.vpp
    stage_of = [stage for stage, count in enumerate(stage_layers(shape.layers, stages)) for _ in range(count)]
    found: Counter[str] = Counter()
    for entry in hf_to_megatron.table(shape):
        layer = hf_to_megatron.LAYER.fullmatch(entry.megatron)
        number = int(layer[1]) if layer else -1
        stage = stage_of[number] if layer else 0 if entry.megatron.startswith("embedding") else stages - 1
        copy = not entry.exported and stages == 1  # of a tied embedding, which the same rank has
        if stage % parallel.pp != rank or copy:
            continue
        size = prod(hf_to_megatron.shard_shape(entry, parallel.tp))
        output = entry.megatron.startswith("output_layer") and entry.exported
        found["expert" if entry.expert else "frozen" if critic and output else "dense"] += size
        fp8 = model.fp8 and model.fp8_skip_first <= number < shape.layers - model.fp8_skip_last
        if fp8 and ".linear_" in entry.megatron:
            found["fp8 expert" if entry.expert else "fp8"] += size
    if critic and rank == parallel.pp - 1:
        found["dense"] += shape.hidden
    ep = parallel.ep
    return found["dense"], found["expert"] / ep, found["fp8"] + found["fp8 expert"] / ep, found["frozen"]


def micro_batch_tokens(config: Config) -> int:
    """Tokens of the largest micro-batch on a context parallel rank: a sequence longer than the budget goes alone."""
    longest = -(-config.rollout.context_length // config.parallel.cp) if config.train.stage == "rl" else 0
    return max(config.train.tokens_per_micro_batch, longest)


def head(config: Config, shape: ModelShape, tokens: int) -> float:
    """Log-probs by trainer/logprobs.py on the last stage, where every one of `tokens` is trained.

    Two tiles of float32; of the hidden states, complete on every rank, the states themselves and those asked for, and
    of the latter the gradient in float32 and in a narrower dtype of the model: (2 i + 4) h a token, i h more.
    """
    item = DTYPES[config.model.dtype].itemsize
    narrow = item if item < 4 else 0
    return 2 * 4 * logprobs.TILE[device.GPU] + tokens * shape.hidden * (2 * item + 4 + narrow)


def server_weights(config: Config, shape: ModelShape) -> float:
    """The parameters of the first rank of a server; in FP8 a byte each, and float32 scales of the blocks."""
    item = DTYPES[config.model.dtype].itemsize
    return sum(
        fp8.nbytes(parameter.shape)
        if parameter.quantised
        else (item if parameter.constant is None else 4) * prod(parameter.shape)
        for parameter in hf_to_sglang.table(shape, server_layout(config), 0)
    )


def kv_cache(config: Config, shape: ModelShape) -> float:
    """A GPU's part of SGLang's cache: 2 x layers x key/value heads x their size x bytes of the dtype a token.

    Heads are cut over rollout.server.tp, at least one stays on each GPU. Tokens are rollout.server.max_total_tokens;
    where SGLang is to decide, as many as rollout.server.max_running_requests of rollout.context_length need.
    """
    server = config.rollout.server
    tokens = server.max_total_tokens or server.max_running_requests * config.rollout.context_length
    heads = max(1, shape.kv_heads // server.tp)
    return 2 * shape.layers * heads * shape.head_dim * DTYPES[config.model.dtype].itemsize * tokens


def publish_buckets(config: Config, weights: float) -> float:
    """What new weights pass through on a server's GPU, of whose `weights` bytes it is no more: one bucket is written
    while the server reads the other; they are kept, since making them anew takes longer than filling them. On several
    nodes what is sent to others lies in a third, which is no larger.
    """
    return min(weights, (2 if config.launch.nodes == 1 else 3) * BUCKET_BYTES)
