"""Checks of the servers before any start: their settings, this machine, the model."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec

from megatron_collab.config import Config, PlayConfig
from megatron_collab.inference import server_args
from megatron_collab.inference.served import score_fault
from megatron_collab.inference.server import refusal
from megatron_collab.inference.spec import Placement, ServerSpec, ServingSpec
from megatron_collab.launch import server_specs
from megatron_collab.llm.endpoint import SERVED
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.models.parallel_layout import TrainerLayout
from megatron_collab.reward import metrics
from megatron_collab.reward.spec import RewardSpec
from megatron_collab.runtime import device, driver
from megatron_collab.runtime.process import first_on_node
from megatron_collab.settings import Shown, nearest, require
from megatron_collab.weight_sync import plan
from megatron_collab.weight_sync.transports.base import FolderTransport
from megatron_collab.weight_sync.transports.registry import transport_class, transport_options

# With it torch's allocator maps memory in pieces, which a plain CUDA IPC handle cannot share.
_EXPANDABLE = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)


def check_servers(config: Config, serving: ServingSpec) -> None:
    """Checks of servers and trainer that need neither the model nor this machine. Raises ConfigError."""
    shown = Shown(config)
    policy, placement, colocated = serving.policy, serving.policy.placement, serving.policy.placement.colocated
    lacks = f"needs {placement.node_ranks} devices per node, and with {shown.rollout.server.colocated} there are"
    require(
        placement.nodes == 1 or not colocated or placement.node_ranks <= placement.shared,
        f"{_ranks_of(shown, placement)}: {lacks} {shown.launch.nproc_per_node}; lower one of them",
    )
    message = f"{shown.parallel.offload}: only frees memory for colocated servers; set parallel.offload=false"
    require(colocated or not config.parallel.offload, message)
    message = f"{shown.rollout.server.fp8}: needs model.dtype=bfloat16, not {policy.dtype}; change one of them"
    require(not policy.fp8 or policy.dtype == "bfloat16", message)
    _check_transport(config, policy)
    if policy.adapters:
        message = f"{shown.model.lora.serve}: is untested with an FP8 base, {shown.rollout.server.fp8}"
        require(not policy.fp8, f"{message}; change one of them")
        message = f"{shown.model.lora.serve}: with {shown.rollout.server.nnodes} nodes disagree on an adapter's id"
        require(placement.nnodes == 1, f"{message}; set it to merged")
    in_turn = config.rollout.max_staleness == 0
    for spec in serving.by_name.values():
        message = f"{spec.setting}.colocated=true: {shown.rollout.max_staleness} samples while the trainer trains"
        require(not spec.placement.colocated or in_turn, f"{message}; set it to false")
        count = spec.placement.node_ranks
        message = f"{spec.setting}.replicas x {spec.setting}.tp: needs {count} devices, and the trainer has "
        out = f"{shown.launch.nproc_per_node}; lower one of them, or set {spec.setting}.colocated=false"
        require(not spec.placement.colocated or count <= spec.placement.shared, message + out)
    message = f"{shown.rollout.max_staleness}: needs an importance correction; set algo.correction=truncated, or 0"
    require(in_turn or config.algo.correction != "none" or config.objective != "policy", message)


def _check_transport(config: Config, policy: ServerSpec) -> None:
    """Checks publish.transport, also against what is sent. Raises ConfigError."""
    shown, publish, placement = Shown(config), config.publish, policy.placement
    spread = placement.nodes > 1 and not placement.colocated
    if not (spread or policy.fp8 or policy.adapters or ":" in publish.transport):
        return  # without importing torch: every shipped transport can do the rest
    transport = transport_class(publish, placement)
    transport_options(publish, placement)
    message = f"{shown.publish.transport}: with {shown.launch.nodes} needs rollout.server.colocated=true"
    require(not (spread and transport.needs_same_node), f"{message}; change one of them")
    saves_folder = issubclass(transport, FolderTransport)
    message = f"{shown.publish.transport}: cannot carry FP8, which {shown.rollout.server.fp8} needs"
    require(not (policy.fp8 and saves_folder), f"{message}; set publish.transport=auto")
    message = f"{shown.publish.transport}: writes whole models, and {shown.model.lora.serve} needs adapters"
    require(not (policy.adapters and saves_folder), f"{message}; set it to auto")


def check_servers_on_machine(config: Config, serving: ServingSpec) -> None:
    """As `check_gpus`, for servers beside a trainer. Raises ConfigError."""
    shown = Shown(config)
    policy, placement = serving.policy, serving.policy.placement
    on_gpus = device.select(config.launch.device).type == device.GPU
    if policy.fp8:
        # Before Ada, SGLang repacks FP8 weights for a kernel without FP8 units; from Blackwell on it changes scales.
        capability = device.capability() if on_gpus else None
        present = "{}.{}".format(*capability) if capability else "none"
        require(
            capability is not None and (8, 9) <= capability < (10, 0),
            f"{shown.rollout.server.fp8}: needs GPUs of compute capability 8.9 to below 10.0, found {present}; "
            "turn it off",
        )
    if not on_gpus:
        return
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        value = os.environ.get(name, "")
        require(
            not (_EXPANDABLE.search(value) and transport_class(config.publish, placement).opens_gpu_memory),
            f"{name}={value}: the servers open memory of the trainer, which this forbids; unset it",
        )
    gpus = device.count()
    require(
        placement.colocated or placement.end <= gpus,
        f"{_ranks_of(shown, placement)}: with {shown.rollout.server.colocated} they need GPUs besides "
        f"{shown.launch.nproc_per_node}, more than the {gpus} of this node; lower one of them, or set "
        "rollout.server.colocated=true",
    )
    check_gpus(config, serving)
    if not placement.colocated:
        return
    reason = driver.refused_processes(2)  # a rank and a server
    message = f"{shown.rollout.server.colocated}: {reason}; or set it to false"
    require(reason is None, message)
    single_server = placement.per_node <= 1  # a single server may use devices without ranks
    ranks_per_server, remainder = (0, 0) if single_server else divmod(placement.shared, placement.per_node)
    share = f"{shown.launch.nproc_per_node}, at least {shown.rollout.server.tp}"
    require(
        single_server or (remainder == 0 and placement.ranks_per_node <= ranks_per_server),
        f"{shown.rollout.server.replicas}: each colocated server needs an equal share of {share}; change one of them",
    )
    message = f"{shown.publish.transport}: NCCL cannot connect colocated ranks on one GPU; set publish.transport=auto"
    require(not transport_class(config.publish, placement).needs_separate_gpus, message)
    saver = device.probe("memory_saver")
    message = f"needs torch-memory-saver ({saver.detail}); install it, or set rollout.server.colocated=false"
    require(saver.available, f"{shown.rollout.server.colocated}: {message}")
    message = "not set, and colocated servers would take the trainer's memory; set what fits by doctor --plan"
    require(policy.bounded, f"rollout.server.max_total_tokens: {message}, or memory_share")


def check_gpus(config: PlayConfig, serving: ServingSpec) -> None:
    """Checks the GPUs and libraries that the servers need, unless they run on the CPU. Raises ConfigError."""
    if device.select(config.launch.device).type != device.GPU:
        return
    gpus, placement = device.count(), serving.policy.placement
    _check_served_on_gpus(serving, gpus)
    message = f"{_ranks_of(Shown(config), placement)}: needs more than the {gpus} GPUs of this node; lower one of them"
    require(placement.node_ranks <= gpus, message)


def _ranks_of(shown: Shown, placement: Placement) -> str:
    nodes = f" / {shown.launch.nodes}" if placement.nodes > 1 else ""
    return f"{shown.rollout.server.replicas} x {shown.rollout.server.tp}{nodes}"


def check_servers_of_model(
    config: PlayConfig, policy: ServerSpec, shape: ModelShape, trainer: TrainerLayout | None
) -> None:
    """Checks the sizes of the model against the layout of a server and of the trainer, if any. Raises ConfigError."""
    shown = Shown(config)
    message = f"{shown.rollout.context_length}: the model has {shape.max_positions} positions; choose at most as many"
    require(policy.context_length <= shape.max_positions, message)
    message = "rollout.routing_replay=true: the model has no experts; set it to false"
    require(shape.experts is not None or not policy.returns_experts, message)
    layout = policy.layout
    require(layout.ep == 1 or shape.experts is not None, f"{shown.rollout.server.ep}: the model has no experts; set 1")
    fault = plan.layout_fault(shape, trainer, layout)
    require(fault is None, fault or "")


def idle_gpus(config: Config) -> list[str]:
    """A line with a fix if GPUs of the trainer have no colocated server and idle while the run samples."""
    server, width = config.rollout.server, config.launch.nproc_per_node
    if config.train.stage != "rl" or not server.colocated or not server.replicas:
        return []
    serving = server_specs.training(config)
    colocated = [spec.placement for spec in serving.models if spec.placement.colocated]
    idle = len(set(range(width)).difference(*(placement.occupied for placement in colocated)))
    if not idle:
        return []
    fitting, uncovered = divmod(width, serving.policy.placement.ranks_per_node)
    replicas = fitting * config.launch.nodes // server.nnodes
    advice = f"set rollout.server.replicas={replicas}"
    if uncovered or replicas <= server.replicas:
        advice = f"choose a rollout.server.tp that divides launch.nproc_per_node={width}"
    settings = f"rollout.server.replicas={server.replicas} x rollout.server.tp={server.tp}"
    return [f"{settings}: {idle} of the {width} GPUs of a node have no server and idle while the run samples; {advice}"]


def check_arguments(serving: ServingSpec) -> None:
    """Lets SGLang check its own arguments for each model on this machine; takes seconds. Raises ConfigError.

    Raises it too if SGLang is to serve a model and is not installed.
    """
    if not first_on_node():
        return
    if served := next((spec for spec in serving.models if spec.placement.replicas), None):
        message = "SGLang serves the model and is not installed; `make setup` in a checkout installs it"
        require(find_spec("sglang") is not None, f"{served.setting}: {message}")
    on_cpu = device.select(serving.policy.host.device).type == "cpu"
    _check_conflicts(serving, on_cpu)
    for spec in serving.models:
        fault = refusal(spec) if spec.args and spec.placement.replicas else None
        require(fault is None, f"{spec.setting}.args{fault}")


def _check_conflicts(serving: ServingSpec, on_cpu: bool) -> None:
    for spec in serving.models:
        model = f"{spec.setting}.model" if spec.name else ""
        fault = server_args.conflict(spec.args, spec.setting, on_cpu, model)
        require(fault is None, fault or "")


def check_served(config: PlayConfig, reward: RewardSpec, serving: ServingSpec) -> None:
    """Checks of what is served that need neither a trainer nor this machine. Raises ConfigError."""
    _check_conflicts(serving, on_cpu=config.launch.device == "cpu")
    # Without a policy, the context length is that of no server.
    for spec in serving.models if serving.policy.placement.replicas else ():
        message = f"{spec.setting}.max_total_tokens={spec.max_total_tokens}: must hold a conversation of"
        fits = spec.max_total_tokens is None or spec.max_total_tokens >= spec.context_length
        require(fits, f"{message} {Shown(config).rollout.context_length}; raise it, or lower that")
    scorers = {} if config.llm.offline else metrics.scorers(reward.metrics)
    for metric, name in scorers.items():
        if name in serving.by_name and serving.by_name[name].setting == f"reward.metrics.{metric}":  # its own server
            continue
        label = f"reward.metrics.{metric}.model={SERVED}{name}"
        out = f"give one of {', '.join(config.servers)}" if config.servers else f"set servers.{name}.model"
        require(name in config.servers, f"{label}: servers has no {name}; {out}{nearest(name, config.servers)}")
        fault = score_fault(str(config.servers[name]["model"]))
        require(fault is None, f"{label}: {fault}")


def _check_served_on_gpus(serving: ServingSpec, gpus: int) -> None:
    models = serving.by_name.values()
    separate = [spec for spec in models if not spec.placement.colocated]
    needed = max(spec.placement.end for spec in serving.models)
    message = f"with the trainer and the policy's servers they need {needed} GPUs of a node, which has {gpus}"
    names = ", ".join(f"{spec.setting}.replicas x tp" for spec in separate)
    out = "lower one of them, or set servers.NAME.colocated=true"
    require(not names or needed <= gpus, f"{names}: {message}; {out}")
    for spec in models:
        if spec.placement.colocated:
            message = "not set, and colocated servers would take the trainer's memory; set what fits"
            require(spec.bounded, f"{spec.setting}.max_total_tokens: {message}, or memory_share")
            saver = device.probe("memory_saver")
            message = f"needs torch-memory-saver ({saver.detail}); install it, or set {spec.setting}.colocated=false"
            require(saver.available, f"{spec.setting}.colocated=true: {message}")
