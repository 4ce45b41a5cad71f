"""GPU memory of a run, estimated from its settings and the model's shape alone; nothing is allocated.

Counted is what the program allocates and keeps; not CUDA contexts, NCCL's buffers, CUDA graphs and workspaces of
SGLang, fragmentation, and temporaries within a pass: about half of what a layer keeps, measured on a CPU. A rehearsal
(planning/rehearsal/) counts the same from tensors, and those temporaries too.

Activations are what autograd saves of the layers of trainer/megatron/layers.py, each tensor once, with the fused SwiGLU
that GPUs use. TransformerEngine's layers keep the same or less.

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

Selective recompute keeps nothing of the feed-forward, or the experts and their router, but their input. Full recompute
keeps only the input of a layer, i h / s (in float32 the first norm's). Both recompute one layer at a time.
Korthikanti et al. 2022 (arXiv:2205.05198), section 4, count the same way for a layer with dropout and without a gate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from megatron_collab.config import CONF, Config, ConfigError, compose
from megatron_collab.inference import served
from megatron_collab.launch import validate
from megatron_collab.models import hf_config, hf_to_megatron, hf_to_sglang
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.models.parallel_layout import ranks, serving, stage_layers, stages
from megatron_collab.runtime import device, hub
from megatron_collab.trainer import logprobs
from megatron_collab.trainer.megatron.config import DTYPES
from megatron_collab.weight_sync.encoding import fp8_nbytes
from megatron_collab.weight_sync.node_routing import Item, places_of, sent, written
from megatron_collab.weight_sync.plan import SyncPlan, plan_sync, server_layout, trainer_layout, uses_memory
from megatron_collab.weight_sync.transports.shared_memory import segment_sizes

GIB = float(1 << 30)


@dataclass(frozen=True)
class MemoryPart:
    """Bytes on the device while the run trains, and while it samples; `host`: bytes in host memory instead."""

    name: str
    training: float
    sampling: float
    host: float = 0.0


def peak(parts: Sequence[MemoryPart]) -> float:
    """Bytes of these parts in whichever phase, training or sampling, needs more."""
    return max(sum(part.training for part in parts), sum(part.sampling for part in parts))


def read_run(overrides: Sequence[str]) -> tuple[Config, ModelShape]:
    """The checked settings and the model's shape: from model.path, conf/shapes or, of a name in neither, the Hub.

    Neither devices nor data nor weights are needed. ConfigError for settings that cannot work.
    """
    config = compose(overrides)
    validate.check_settings(config)
    return config, validate.check_model(config, described(config.model.path))


def described(path: str, setting: str = "model.path") -> Path:
    """The config.json of a model: in its folder, in conf/shapes or, of a name in neither, from the Hub. ConfigError."""
    name = Path(path).name.partition("@")[0]
    for file in (hub.folder(path) / "config.json", CONF / "shapes" / f"{name}.json"):
        if file.is_file():
            return file
    if hub.named(path):
        return hub.download(path, setting, patterns=["config.json"]) / "config.json"
    raise ConfigError(
        f"{setting}={path}: neither {path}/config.json nor conf/shapes/{name}.json exists; give the folder of a "
        "Hugging Face model or a name of the Hub, or save its config.json in conf/shapes"
    )


def _beside(config: Config) -> Iterator[tuple[str, Config, ModelShape]]:
    """Models of `servers` on the trainer's devices: name, settings as if it were the policy, shape. ConfigError."""
    for name, model in served.named(config).items():
        if not model.colocated:
            continue
        try:
            shape = hf_config.read(described(model.model, f"servers.{name}.model"))
        except ValueError as error:
            setting = f"servers.{name}.model={model.model}"
            raise ConfigError(f"{setting}: cannot be counted: {error}; plan without servers.{name}") from error
        yield name, served.config_of(config, model, 0), shape


def plan_memory(config: Config, shape: ModelShape) -> list[list[MemoryPart]]:
    """For each pipeline stage the parts of its fullest rank; the settings must have been validated.

    The optimizer works on the policy and the critic in turn, so activations are counted once.
    """
    parallel = config.parallel
    gpus, sampling = ranks(config), config.train.stage == "rl"
    beside = list(_beside(config)) if sampling else []
    tokens = micro_batch_tokens(config)
    publishes: SyncPlan = ()
    if sampling and config.publish.transport != "disk":
        item = DTYPES[config.model.dtype].itemsize
        publishes = plan_sync(shape, trainer_layout(config), server_layout(config), item)
    found = []
    for rank in range(parallel.pp):
        parts = network_parts(config, shape, rank)
        if sampling and config.algo.kl_coef > 0:
            parts.append(replace(parts[0], name="reference"))
        if sampling and config.algo.advantage == "gae":
            parts += network_parts(config, shape, rank, critic=True)
        parts.append(MemoryPart("activations", activations(config, shape, rank, tokens), 0.0))
        if rank == parallel.pp - 1:
            parts.append(MemoryPart("head", head(config, shape, tokens), 0.0))
        # Pipeline stages take a node's devices in order: all ranks of the first, then the second.
        launch, server = config.launch, config.rollout.server
        own_ranks = range(rank * gpus // parallel.pp, (rank + 1) * gpus // parallel.pp)
        taken = {own % launch.nproc_per_node for own in own_ranks}
        if sampling and server.colocated and taken & serving(config):
            parts += [
                MemoryPart("server: weights", 0.0, server_weights(config, shape)),
                MemoryPart("server: KV cache", 0.0, kv_cache(config, shape)),
            ]
        for name, theirs, its in beside if own_ranks[0] < launch.nproc_per_node else ():  # on the first node
            if taken & serving(theirs):
                parts.append(MemoryPart(f"{name}: weights", 0.0, server_weights(theirs, its)))
                parts.append(MemoryPart(f"{name}: KV cache", 0.0, kv_cache(theirs, its)))
        if publishes:
            buckets = max(sync_buckets(config, publishes, own) for own in own_ranks)
            parts.append(MemoryPart("weight sync buckets", buckets, buckets))
        found.append(parts)
    return found


def micro_batch_tokens(config: Config) -> int:
    """Tokens of the largest micro-batch on a rank; a sequence above the budget is one of its own."""
    longest = -(-config.rollout.context_length // config.parallel.cp) if config.train.stage == "rl" else 0
    return max(config.train.tokens_per_micro_batch, longest)


def network_parts(config: Config, shape: ModelShape, rank: int, critic: bool = False) -> list[MemoryPart]:
    """Parameters, gradients and optimizer of a trained network on a rank of pipeline stage `rank`.

    A parameter takes the i bytes of the dtype, 4 for its gradient and 12 / d for float32 master and two moments, or
    8 / d where it is float32 itself, over d data (times context) parallel ranks (Rajbhandari et al. 2020,
    arXiv:1910.02054, stage 1); experts have tp cp dp / ep replicas instead. With FP8 (not measured) the linear layers
    hold data and transpose, 2 bytes a weight: with model.fp8_params instead of their parameters, else in addition. A
    `critic` has a value head of width h on the last stage, and does not train its output layer.
    """
    parallel, model = config.parallel, config.model
    item = DTYPES[model.dtype].itemsize
    state = 8 if item == 4 else 12
    stage_ranks = ranks(config) // parallel.pp
    dense, experts, eight_bit, frozen = _counts(config, shape, rank, critic)
    trained = dense + experts
    copies = (2 - item if model.fp8_params else 2) * eight_bit
    optimizer = state * (dense / (stage_ranks // parallel.tp) + experts / (stage_ranks // parallel.ep))
    kept, prefix = not parallel.offload, "critic: " if critic else ""  # while rollouts are sampled
    parameters = item * (trained + frozen) + copies
    return [
        MemoryPart(f"{prefix}parameters", parameters, parameters),
        MemoryPart(f"{prefix}gradients", 4 * trained, 4 * trained if kept else 0.0),
        MemoryPart(f"{prefix}optimizer", optimizer, optimizer if kept else 0.0, 0.0 if kept else optimizer),
    ]


def _counts(config: Config, shape: ModelShape, rank: int, critic: bool) -> tuple[float, float, float, float]:
    """Elements on a rank: trained dense ones, trained experts, those with FP8 data, frozen ones."""
    parallel, model = config.parallel, config.model
    stage_of = stages(shape, trainer_layout(config))
    found: Counter[str] = Counter()
    for entry in hf_to_megatron.table(shape):
        layer = hf_to_megatron.LAYER.fullmatch(entry.megatron)
        number = int(layer[1]) if layer else -1
        stage = stage_of[number] if layer else 0 if entry.megatron.startswith("embedding") else parallel.pp - 1
        copy = not entry.exported and parallel.pp == 1  # of a tied embedding, which the same rank has
        if stage != rank or copy:
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


def head(config: Config, shape: ModelShape, tokens: int) -> float:
    """Bytes of the log-probs (trainer/logprobs.py) on the last stage, where every one of `tokens` is trained.

    Two float32 tiles of logits, and the gradient of one in the dtype; hidden states of the trained tokens, and their
    gradient in float32 and the dtype.
    """
    item, tile = DTYPES[config.model.dtype].itemsize, logprobs.TILE[device.GPU]
    narrow = item if item < 4 else 0
    logits = min(tile, tokens * -(-shape.vocab // config.parallel.tp))
    return 2 * 4 * tile + narrow * logits + tokens * shape.hidden * (item + 4 + narrow)


def server_weights(config: Config, shape: ModelShape) -> float:
    """Bytes of the parameters on the first rank of a server; in FP8 one each, and float32 scales of the blocks."""
    item = DTYPES[config.model.dtype].itemsize
    return sum(
        fp8_nbytes(parameter.shape)
        if parameter.quantised
        else (item if parameter.constant is None else 4) * prod(parameter.shape)
        for parameter in hf_to_sglang.table(shape, server_layout(config), 0)
    )


def kv_cache(config: Config, shape: ModelShape) -> float:
    """Bytes of SGLang's KV cache on a GPU, which has at least one head; where SGLang chooses the tokens, the most."""
    server = config.rollout.server
    tokens = server.max_total_tokens or server.max_running_requests * config.rollout.context_length
    heads = max(1, shape.kv_heads // server.tp)
    return 2 * shape.layers * heads * shape.head_dim * DTYPES[config.model.dtype].itemsize * tokens


def sync_buckets(config: Config, plan: SyncPlan, rank: int) -> float:
    """Bytes on the device of trainer rank `rank` through which weights go to servers, and which stay allocated.

    Through memory two buckets for the server's rank on the same device, one of which is written while the server reads
    the other, and what is sent to other places in a round; over the network what is sent in two rounds.
    """
    places = places_of(config, on_gpus=True)
    if not uses_memory(config):
        return min(2, len(plan)) * _largest(written(plan, places, rank))
    kept = segment_sizes(plan, places, rank).values() if config.rollout.server.colocated else ()
    return sum(map(sum, kept)) + _largest(sent(plan, places, rank))


def _largest(rounds: Sequence[Sequence[Item]]) -> int:
    """Bytes of the largest round."""
    return max(sum(piece.size for _, piece in items) for items in rounds)


def layer_activations(config: Config, shape: ModelShape, number: int, tokens: int) -> tuple[float, float]:
    """Bytes that layer `number` (from 0) keeps from the forward to the backward pass, and that are made again in that.

    With a micro-batch of `tokens` on a context parallel rank.
    """
    item, tp = DTYPES[config.model.dtype].itemsize, config.parallel.tp
    rows = _rows(config, tokens)
    queries, keys = (tokens * heads * shape.head_dim / tp for heads in (shape.heads, shape.kv_heads))
    rest = 2 * rows * (_norm(shape.hidden, item) + item * shape.hidden)
    rest += item * (queries + 2 * keys) + item * queries
    views = keys + (queries if shape.heads == shape.kv_heads else 0)
    if shape.qk_norm:
        rest += (4 + item) * (queries + keys) + 4 * tokens * (shape.heads + shape.kv_heads) / tp
        rest -= 4 * views if item == 4 else 0
    rest += item * (2 * queries + keys) + 4 * tokens * shape.heads / tp
    experts = shape.experts
    if experts is None or number not in experts.layers:
        feed_forward = item * 3 * shape.ffn * tokens / tp
    else:
        feed_forward = rows * experts.per_token * item * (shape.hidden + 3 * experts.ffn)
        feed_forward += rows * (experts.per_token * (20 + item) + experts.count * (1 + item))
    own_input = rows * item * shape.hidden
    again = {"none": 0.0, "selective": feed_forward, "full": rest + feed_forward - (own_input if item == 4 else 0)}
    kept = {"none": rest + feed_forward, "selective": rest, "full": own_input}
    return kept[config.parallel.recompute], again[config.parallel.recompute]


def activations(config: Config, shape: ModelShape, rank: int, tokens: int) -> float:
    """The most bytes that pipeline rank `rank` holds at once, in a step of many micro-batches of `tokens`.

    Beside the layers a micro-batch keeps its token ids and rotary embedding, the final norm on the last stage, and what
    a stage received from the previous and sent to the next one.
    """
    pp, vpp = config.parallel.pp, config.parallel.vpp
    counts = stage_layers(shape.layers, pp * vpp)
    item, rows = DTYPES[config.model.dtype].itemsize, _rows(config, tokens)
    full = config.parallel.recompute == "full"
    chunks, recomputed = [], 0.0
    for stage in range(rank, pp * vpp, pp):
        first = sum(counts[:stage])
        layers = [layer_activations(config, shape, number, tokens) for number in range(first, first + counts[stage])]
        kept = sum(layer for layer, _ in layers) + tokens * (8 + 2 * item * shape.head_dim)
        last = stage == pp * vpp - 1
        kept += rows * _norm(shape.hidden, item) if last and not full else 0
        kept += rows * item * shape.hidden * ((stage > 0) + (not last))
        chunks.append(kept)
        recomputed = max(recomputed, *(again for _, again in layers))
    return in_flight(chunks, pp, rank) + recomputed


def in_flight(chunks: Sequence[float], pp: int, rank: int) -> float:
    """The most that is held at once if a micro-batch keeps `chunks[c]` in the rank's virtual stage c.

    Megatron's schedules (Narayanan et al. 2021, arXiv:2104.04473, section 2.2): groups of pp micro-batches go forward
    through one virtual stage and then the next, and backward in the opposite order. After the warm-up of pp - rank - 1
    passes, or 2 (pp - rank - 1) + (v - 1) pp with v > 1 virtual stages, a backward pass follows each forward pass.
    """
    count = len(chunks)
    order = [chunk for _ in range(3) for chunk in range(count) for _ in range(pp)]  # long enough to repeat
    warm_up = pp - rank - 1 if count == 1 else 2 * (pp - rank - 1) + (count - 1) * pp
    held = most = sum(chunks[chunk] for chunk in order[:warm_up])
    for forward, backward in zip(order[warm_up:], order, strict=False):
        held += chunks[forward]
        most = max(most, held)
        held -= chunks[count - 1 - backward]
    return most


def _rows(config: Config, tokens: int) -> float:
    """Tokens of a micro-batch on a rank, outside of attention and feed-forward layer."""
    return tokens / config.parallel.tp if config.parallel.sequence_parallel else tokens


def _norm(width: int, item: int) -> float:
    """Bytes a token that an RMS norm keeps; its output is counted with the consumer."""
    return (4 + item) * width + 4
