"""GPU memory of a run, estimated from its settings and the model's shape without allocating anything.

Counts memory that the program allocates and keeps, but not CUDA contexts, NCCL's buffers, CUDA graphs and workspaces of
SGLang, workspaces of TransformerEngine, fragmentation, and temporaries within a pass. A rehearsal (rehearsal/run.py)
counts the same from tensors, plus these temporaries and TransformerEngine's workspaces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from megatron_collab.algo.advantages import advantage_class
from megatron_collab.config import CONF, Config
from megatron_collab.inference.adapters import SLOTS
from megatron_collab.inference.spec import Placement, ServerSpec
from megatron_collab.launch import server_specs, validate
from megatron_collab.launch.teacher import SETTING
from megatron_collab.launch.teacher import read_shape as read_teacher
from megatron_collab.launch.trainer_specs import sync_spec, teacher_model, trainer_layout
from megatron_collab.models import hf_config, hf_to_megatron, hf_to_sglang
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.models.lora import adapters
from megatron_collab.models.parallel_layout import stages
from megatron_collab.planning import GPU_GIB
from megatron_collab.planning.activations import activations, head, micro_batch_tokens
from megatron_collab.runtime import hub
from megatron_collab.settings import ConfigError, require
from megatron_collab.trainer.host_memory import PIECE, piece_count
from megatron_collab.trainer.megatron.config import DTYPES
from megatron_collab.weight_sync.fp8_blocks import fp8_nbytes
from megatron_collab.weight_sync.plan import SyncPlan, plan_sync
from megatron_collab.weight_sync.transports.base import FolderTransport
from megatron_collab.weight_sync.transports.registry import places_of, transport_class

GIB = float(1 << 30)


@dataclass(frozen=True)
class MemoryPart:
    """Bytes on the device in training, and in sampling; `host`: pinned host memory for offloading while sampling."""

    name: str
    training: float
    sampling: float
    host: float = 0.0


def peak(parts: Sequence[MemoryPart]) -> float:
    """Bytes of these parts in the phase, training or sampling, that needs more."""
    return max(sum(part.training for part in parts), sum(part.sampling for part in parts))


def host_memory(config: Config, stages: Sequence[Sequence[MemoryPart]]) -> float:
    """Bytes that the ranks of the fullest node pin for offloading; they stay pinned until the run ends.

    `stages`: the parts of each pipeline stage; a node may have several stages.
    """
    count = config.launch.ranks
    pinned = [sum(part.host for part in stages[rank * len(stages) // count]) for rank in range(count)]
    width = config.launch.nproc_per_node
    return max(sum(pinned[first : first + width]) for first in range(0, count, width))


def read_run(overrides: Sequence[str]) -> tuple[Config, ModelShape]:
    """The validated settings and the model's shape, from model.path, conf/shapes or, if in neither, the Hub.

    Needs no devices, data or weights. Raises ConfigError for settings that cannot work.
    """
    config = validate.composed(overrides)
    spec = validate.check_settings(config)
    shape = validate.check_model(config, spec, model_config_file(config.model.path))
    if model := teacher_model(config):
        validate.check_teacher(config, model_config_file(model.path, SETTING))
    return config, shape


def model_config_file(path: str, setting: str = "model.path") -> Path:
    """The config.json of a model: from its folder, conf/shapes or, if in neither, the Hub. Raises ConfigError."""
    name = Path(path).name.partition("@")[0]
    for file in (hub.folder(path) / "config.json", CONF / "shapes" / f"{name}.json"):
        if file.is_file():
            return file
    if hub.parse(path):
        return hub.download(path, setting, patterns=["config.json"]) / "config.json"
    raise ConfigError(
        f"{setting}={path}: neither {path}/config.json nor conf/shapes/{name}.json exists; give the folder of a "
        "Hugging Face model or a name of the Hub, or save its config.json in conf/shapes"
    )


def _colocated_models(specs: Iterable[ServerSpec]) -> Iterator[tuple[ServerSpec, ModelShape]]:
    """The models besides the policy that are on the trainer's devices, with their shapes. Raises ConfigError."""
    for spec in specs:
        if not spec.placement.colocated:
            continue
        try:
            shape = hf_config.read(model_config_file(spec.model, f"{spec.setting}.model"))
        except ValueError as error:
            setting = f"{spec.setting}.model={spec.model}"
            raise ConfigError(f"{setting}: cannot be counted: {error}; plan without {spec.setting}") from error
        yield spec, shape


def plan_memory(config: Config, shape: ModelShape, gpu: float = GPU_GIB * GIB) -> list[list[MemoryPart]]:
    """The parts of the fullest rank of each pipeline stage, on GPUs of `gpu` bytes; the settings have been validated.

    Raises ConfigError if a server's memory_share leaves no KV cache.
    """
    parallel = config.parallel
    gpus = config.launch.ranks
    serving = server_specs.training(config) if config.train.stage == "rl" else None
    models = list(_colocated_models(serving.by_name.values())) if serving else []
    publishes: SyncPlan = ()
    if serving and not issubclass(transport_class(config.publish, serving.policy.placement), FolderTransport):
        item = DTYPES[config.model.dtype].itemsize
        publishes = plan_sync(shape, trainer_layout(config), serving.policy.layout, item)
    stages_parts = []
    for rank in range(parallel.pp):
        parts = trainer_parts(config, shape, rank)
        # Pipeline stages use a node's devices in order: all ranks of the first, then of the second.
        width = config.launch.nproc_per_node
        members = range(rank * gpus // parallel.pp, (rank + 1) * gpus // parallel.pp)
        devices = {global_rank % width for global_rank in members}
        if serving and serving.policy.placement.colocated and devices & serving.policy.placement.occupied:
            parts += server_parts(serving.policy, shape, gpu)
        for spec, model_shape in models if members[0] < width else ():  # on the first node
            if devices & spec.placement.occupied:
                parts += server_parts(spec, model_shape, gpu)
        if serving and publishes:
            placement = serving.policy.placement
            buckets = max(sync_buckets(config, placement, publishes, global_rank) for global_rank in members)
            parts.append(MemoryPart("weight sync buckets", buckets, buckets))
        stages_parts.append(parts)
    return stages_parts


def trainer_parts(config: Config, shape: ModelShape, rank: int) -> list[MemoryPart]:
    """What the trainer takes on a rank of pipeline stage `rank`, without servers and buckets of weight syncs.

    Policy and critic are updated one after the other, so activations are counted once.
    """
    tokens, parts = micro_batch_tokens(config), network_parts(config, shape, rank)
    if config.reference == "copy":
        parts.append(frozen_part("reference", config, shape, rank))
    teacher = shape
    if model := teacher_model(config):
        teacher = read_teacher(config, model_config_file(model.path, SETTING))
        parts.append(frozen_part("teacher", replace(config, model=model), teacher, rank))
    if config.objective == "policy" and advantage_class(config.algo.advantage).critic:
        parts += network_parts(config, shape, rank, critic=True)
    parts.append(MemoryPart("activations", activations(config, shape, rank, tokens), 0.0))
    if rank == config.parallel.pp - 1:
        parts.append(MemoryPart("head", head(config, shape, tokens), 0.0))
        if config.algo.teacher.full:
            parts.append(MemoryPart("teacher states", teacher_states(config, teacher), 0.0))
            if rows := teacher_head(config, shape, teacher):
                parts.append(MemoryPart("teacher head", rows, rows))
    return parts


def server_parts(spec: ServerSpec, shape: ModelShape, gpu: float) -> list[MemoryPart]:
    """What the rank of a colocated server takes while it samples; adapters stay allocated.

    With memory_share the KV cache takes what weights and adapters leave of that share of a GPU of `gpu` bytes, all of
    which is free when the server starts. Raises ConfigError if they leave nothing.
    """
    name, adapters_size = spec.name or "server", server_adapters(spec, shape)
    weights = server_weights(spec, shape) + rotary_table(shape)
    cache = kv_cache(spec, shape) if spec.memory_share is None else spec.memory_share * gpu - weights - adapters_size
    message = f"{spec.setting}.memory_share={spec.memory_share}: {(weights + adapters_size) / GIB:.1f} GiB of weights"
    require(cache > 0, f"{message} leave no KV cache of a GPU of {gpu / GIB:g} GiB; raise it, or {spec.setting}.tp")
    return [
        MemoryPart(f"{name}: weights", 0.0, weights),
        *([MemoryPart(f"{name}: adapters", adapters_size, adapters_size)] if adapters_size else []),
        MemoryPart(f"{name}: KV cache", 0.0, cache),
    ]


def network_parts(config: Config, shape: ModelShape, rank: int, critic: bool = False) -> list[MemoryPart]:
    """Parameters, gradients and optimizer of a trained network on a rank of pipeline stage `rank`.

    A parameter takes the i bytes of the dtype, 4 for its gradient and 12 / d for float32 master and two moments, or
    8 / d if it is float32 itself, over d data (times context) parallel ranks (Rajbhandari et al. 2020,
    arXiv:1910.02054, stage 1); experts have tp cp dp / ep replicas instead. With FP8 the linear layers hold data and
    transpose, 2 bytes per weight: with model.fp8_params instead of their parameters, else in addition. A `critic` has
    a value head of width h on the last stage, and does not train its output layer. With model.lora.rank only adapters
    are trained.
    """
    parallel = config.parallel
    item = DTYPES[config.model.dtype].itemsize
    state = 8 if item == 4 else 12
    stage_ranks = config.launch.ranks // parallel.pp
    dense, experts, eight_bit, frozen = _counts(config, shape, rank, critic)
    trained = dense + experts
    optimizer = state * (dense / (stage_ranks // parallel.tp) + experts / (stage_ranks // parallel.ep))
    resident = not (parallel.offload and config.train.stage == "rl")  # on the device while rollouts are sampled
    prefix = "critic: " if critic else ""
    parameters, pinned = _weights(config, trained + frozen, eight_bit, 2), PIECE * piece_count(optimizer)
    return [
        MemoryPart(f"{prefix}parameters", parameters, parameters),
        MemoryPart(f"{prefix}gradients", 4 * trained, 4 * trained if resident else 0.0),
        MemoryPart(f"{prefix}optimizer", optimizer, optimizer if resident else 0.0, 0.0 if resident else pinned),
    ]


def frozen_part(name: str, config: Config, shape: ModelShape, rank: int) -> MemoryPart:
    """A frozen network on a rank of pipeline stage `rank`; without gradients it needs no FP8 transpose."""
    dense, experts, eight_bit, _ = _counts(config, shape, rank, critic=False)
    size = _weights(config, dense + experts, eight_bit, 2 if config.model.fp8_params else 1)
    return MemoryPart(name, size, size)


def teacher_states(config: Config, shape: ModelShape) -> float:
    """Bytes of the states of a teacher of `shape` for the trained tokens of an optimizer step; an upper bound.

    They are spread over the data and context parallel ranks, where they wait for the policy's passes.
    """
    rollout, parallel = config.rollout, config.parallel
    turns = rollout.max_assistant_turns if rollout.futures == 0 else 1
    tokens = turns * rollout.turn.longest
    if rollout.train_turns == "all":
        tokens += rollout.futures * (rollout.max_assistant_turns - 1) * rollout.future.longest
    samples = config.train.prompts_per_step * config.train.rollouts_per_prompt / config.algo.mini_batches
    ranks = config.launch.ranks // (parallel.tp * parallel.pp)
    return DTYPES[config.model.dtype].itemsize * shape.hidden * tokens * samples / ranks


def teacher_head(config: Config, shape: ModelShape, teacher: ModelShape) -> float:
    """Bytes of the copy of the teacher's head, with the policy's rows, if the vocabularies are padded differently.

    While it is made at the start, the ranks' parts of the whole head are there too; but no states or activations yet.
    """
    rows = -(-shape.vocab // config.parallel.tp) if shape.vocab != teacher.vocab else 0
    return DTYPES[config.model.dtype].itemsize * rows * teacher.hidden


def _weights(config: Config, elements: float, eight_bit: float, fp8_bytes: int) -> float:
    """Bytes of parameters; those in FP8 take `fp8_bytes` per element in addition, or instead."""
    item = DTYPES[config.model.dtype].itemsize
    return item * elements + (fp8_bytes - item if config.model.fp8_params else fp8_bytes) * eight_bit


def _counts(config: Config, shape: ModelShape, rank: int, critic: bool) -> tuple[float, float, float, float]:
    """Elements on a rank: (trained dense, trained experts, with FP8 data, frozen)."""
    parallel, model, lora = config.parallel, config.model, config.model.lora
    stage_of = stages(shape, trainer_layout(config))
    elements: Counter[str] = Counter()
    for entry in hf_to_megatron.table(shape):
        layer = hf_to_megatron.LAYER.fullmatch(entry.megatron)
        number = int(layer[1]) if layer else -1
        stage = stage_of[number] if layer else 0 if entry.megatron.startswith("embedding") else parallel.pp - 1
        copy = not entry.exported and parallel.pp == 1  # of a tied embedding on the same rank
        if stage != rank or copy:
            continue
        size = prod(hf_to_megatron.shard_shape(entry, parallel.tp))
        output = entry.megatron.startswith("output_layer") and entry.exported
        prefix = "frozen " if lora.rank or (critic and output) else ""
        elements[prefix + ("expert" if entry.expert else "dense")] += size
        for _, *factors in adapters(entry, lora):
            elements["dense"] += sum(prod(factor.local(parallel.tp)) for factor in factors)
        fp8 = model.fp8 and model.fp8_skip_first <= number < shape.layers - model.fp8_skip_last
        if fp8 and ".linear_" in entry.megatron:
            elements["fp8 expert" if entry.expert else "fp8"] += size
    if critic and rank == parallel.pp - 1:
        elements["dense"] += shape.hidden
    ep = parallel.ep
    frozen = elements["frozen dense"] + elements["frozen expert"] / ep
    return elements["dense"], elements["expert"] / ep, elements["fp8"] + elements["fp8 expert"] / ep, frozen


def server_weights(spec: ServerSpec, shape: ModelShape) -> float:
    """Bytes of the parameters on the first rank of a server; in FP8 one per element plus float32 block scales."""
    item = DTYPES[spec.dtype].itemsize
    return sum(
        fp8_nbytes(parameter.shape)
        if parameter.quantized
        else (item if parameter.constant is None else 4) * prod(parameter.shape)
        for parameter in hf_to_sglang.table(shape, spec.layout, 0)
    )


def rotary_table(shape: ModelShape) -> float:
    """Bytes of SGLang's sines and cosines of all positions, which its layers share: in float32, as on GPUs.

    If the positions are stretched, the table has the stretched ones.
    """
    scaling = shape.rope.scaling or {}
    positions: float = shape.max_positions
    if scaling.get("rope_type") == "yarn":
        positions = scaling["original_max_position_embeddings"]
    if scaling.get("rope_type") in ("linear", "yarn"):
        positions *= scaling["factor"]
    return 4 * positions * shape.head_dim


def server_adapters(spec: ServerSpec, shape: ModelShape) -> float:
    """Bytes of the adapters, in all slots; SGLang does not release them when it releases the weights."""
    parameters = hf_to_sglang.adapters(shape, spec.layout, 0)
    return SLOTS * DTYPES[spec.dtype].itemsize * sum(prod(parameter.shape) for parameter in parameters)


def kv_cache(spec: ServerSpec, shape: ModelShape) -> float:
    """Bytes of SGLang's KV cache on a GPU, with at least one head; an upper bound if SGLang chooses its tokens."""
    heads = max(1, shape.kv_heads // spec.placement.tp)
    return 2 * shape.layers * heads * shape.head_dim * DTYPES[spec.dtype].itemsize * spec.cache_tokens


def sync_buckets(config: Config, placement: Placement, plan: SyncPlan, rank: int) -> float:
    """Bytes of the transport's buffers on the device of trainer rank `rank`, which stay allocated.

    If servers have devices of their own, their segments are on those.
    """
    places = places_of(sync_spec(config), placement, on_gpus=True)
    allocated = transport_class(config.publish, placement).bytes_held(plan, places, rank)
    return sum(allocated.buffers) + (sum(allocated.segments) if placement.colocated else 0)
