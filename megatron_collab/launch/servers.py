"""Checks of the servers before any start: their settings, this machine, the model."""

from __future__ import annotations

import os
import re
from functools import partial

from megatron_collab.config import Config, nearest, require
from megatron_collab.inference import server_args
from megatron_collab.inference.served import config_of, devices, first_device, gives_text, score_fault, server_entries
from megatron_collab.inference.server import Serves, refusal
from megatron_collab.llm.endpoint import SERVED
from megatron_collab.models import parallel_layout
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.reward import metrics
from megatron_collab.runtime import device
from megatron_collab.runtime.process import first_on_node
from megatron_collab.weight_sync import plan
from megatron_collab.weight_sync.transports.base import FolderTransport
from megatron_collab.weight_sync.transports.registry import transport_class, transport_options

# With it torch's allocator maps memory in pieces, which a plain CUDA IPC handle cannot share.
_EXPANDABLE = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)


def check_servers(config: Config) -> None:
    """Checks that need neither the model nor this machine. Raises ConfigError."""
    check = partial(require, config=config)
    server, nodes = config.rollout.server, config.launch.nodes
    check(server.tp % server.ep == 0, "<rollout.server.ep>: does not divide <rollout.server.tp>; choose a divisor")
    last = server.port + server.replicas - 1
    message = f"<rollout.server.port>: the last of <rollout.server.replicas> servers would have port {last}; lower it"
    check(server.port == 0 or last <= 65535, message)
    check(
        server.tp % server.nnodes == 0, "<rollout.server.nnodes>: does not divide <rollout.server.tp>; choose a divisor"
    )
    check(nodes % server.nnodes == 0, "<rollout.server.nnodes>: does not divide <launch.nodes>; choose a divisor")
    message = "<rollout.server.replicas>: is not a multiple of <launch.nodes>, and all nodes get as many; choose one"
    check(server.nnodes > 1 or server.replicas % nodes == 0, message)
    message = (
        "<rollout.server.replicas> x <rollout.server.nnodes>: is not a multiple of <launch.nodes>; change one of them"
    )
    check(server.replicas * server.nnodes % nodes == 0, message)
    count = parallel_layout.servers_per_node(config) * parallel_layout.server_ranks_per_node(config)
    check(
        nodes == 1 or not server.colocated or count <= config.launch.nproc_per_node,
        f"<rollout.server.replicas> x <rollout.server.tp> / <launch.nodes>: needs {count} devices per node, and with "
        "<rollout.server.colocated> there are <launch.nproc_per_node>; lower one of them",
    )
    message = "<parallel.offload>: only frees memory for colocated servers; set parallel.offload=false"
    check(server.colocated or not config.parallel.offload, message)
    message = f"<rollout.server.fp8>: needs model.dtype=bfloat16, not {config.model.dtype}; change one of them"
    check(not server.fp8 or config.model.dtype == "bfloat16", message)
    _check_transport(config)
    if config.model.lora.served:
        message = "<model.lora.serve>: is untested with an FP8 base, <rollout.server.fp8>; change one of them"
        check(not server.fp8, message)
        message = "<model.lora.serve>: with <rollout.server.nnodes> nodes disagree on an adapter's id; set it to merged"
        check(server.nnodes == 1, message)
    in_turn = config.rollout.max_staleness == 0
    _check_conflicts(config, on_cpu=config.launch.device == "cpu")
    _check_served_models(config)
    message = "<rollout.max_staleness>: servers need devices of their own; set rollout.server.colocated=false, or 0"
    check(in_turn or not server.colocated, message)
    message = "<rollout.max_staleness>: needs an importance correction; set algo.correction=truncated, or 0"
    check(in_turn or config.algo.correction != "none" or config.objective != "policy", message)


def _check_transport(config: Config) -> None:
    """Checks publish.transport, also against what is sent. Raises ConfigError."""
    check, lora = partial(require, config=config), config.model.lora
    server, spread = config.rollout.server, config.launch.nodes > 1 and not config.rollout.server.colocated
    if not (spread or server.fp8 or lora.served or ":" in config.publish.transport):
        return  # without importing torch: every shipped transport can do the rest
    transport = transport_class(config)
    transport_options(config)
    message = "<publish.transport>: with <launch.nodes> needs rollout.server.colocated=true; change one of them"
    check(not (spread and transport.needs_same_node), message)
    saves_folder = issubclass(transport, FolderTransport)
    message = "<publish.transport>: cannot carry FP8, which <rollout.server.fp8> needs; set publish.transport=auto"
    check(not (server.fp8 and saves_folder), message)
    message = "<publish.transport>: writes whole models, and <model.lora.serve> needs adapters; set it to auto"
    check(not (lora.served and saves_folder), message)


def check_servers_on_machine(config: Config) -> None:
    """Checks the devices and libraries that the servers need. Raises ConfigError."""
    check = partial(require, config=config)
    if config.train.stage != "rl":
        return
    on_gpus = device.select(config.launch.device).type == device.GPU
    if config.rollout.server.fp8:
        # Before Ada, SGLang repacks FP8 weights for a kernel without FP8 units; from Blackwell on it changes scales.
        capability = device.capability() if on_gpus else None
        present = "{}.{}".format(*capability) if capability else "none"
        check(
            capability is not None and (8, 9) <= capability < (10, 0),
            f"<rollout.server.fp8>: needs GPUs of compute capability 8.9 to below 10.0, found {present}; turn it off",
        )
    if not on_gpus:
        return
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        value = os.environ.get(name, "")
        require(
            not (_EXPANDABLE.search(value) and transport_class(config).opens_gpu_memory),
            f"{name}={value}: the servers open memory of the trainer, which this forbids; unset it",
        )
    server, gpus = config.rollout.server, device.count()
    _check_served_on_gpus(config, gpus)
    servers_here, ranks_here = parallel_layout.servers_per_node(config), parallel_layout.server_ranks_per_node(config)
    devices_needed = servers_here * ranks_here
    nodes = " / <launch.nodes>" if config.launch.nodes > 1 else ""
    servers = f"<rollout.server.replicas> x <rollout.server.tp>{nodes}"
    if not server.colocated:
        check(
            config.launch.nproc_per_node + devices_needed <= gpus,
            f"{servers}: with <rollout.server.colocated> they need GPUs besides <launch.nproc_per_node>, more than the "
            f"{gpus} of this node; lower one of them, or set rollout.server.colocated=true",
        )
        return
    check(devices_needed <= gpus, f"{servers}: needs more than the {gpus} GPUs of this node; lower one of them")
    single_server = servers_here <= 1  # a single server may use devices without ranks
    ranks_per_server, remainder = (0, 0) if single_server else divmod(config.launch.nproc_per_node, servers_here)
    message = "each colocated server needs an equal share of <launch.nproc_per_node>, at least <rollout.server.tp>"
    check(
        single_server or (remainder == 0 and ranks_here <= ranks_per_server),
        f"<rollout.server.replicas>: {message}; change one of them",
    )
    message = "<publish.transport>: NCCL cannot connect colocated ranks on one GPU; set publish.transport=auto"
    check(not transport_class(config).needs_separate_gpus, message)
    saver = device.probe("memory_saver")
    message = f"needs torch-memory-saver ({saver.detail}); install it, or set rollout.server.colocated=false"
    check(saver.available, f"<rollout.server.colocated>: {message}")
    message = "not set, and colocated servers would take the trainer's memory; set what fits by doctor --plan"
    check(server.max_total_tokens is not None, f"rollout.server.max_total_tokens: {message}")


def check_servers_of_model(config: Config, shape: ModelShape) -> None:
    """Checks the sizes of the model against the layout of a server. Raises ConfigError."""
    check = partial(require, config=config)
    message = f"<rollout.context_length>: the model has {shape.max_positions} positions; choose at most as many"
    check(config.rollout.context_length <= shape.max_positions, message)
    message = "<rollout.routing_replay>: the model has no experts; set it to false"
    check(shape.experts is not None or not config.rollout.routing_replay, message)
    layout = plan.server_layout(config)
    check(layout.ep == 1 or shape.experts is not None, "<rollout.server.ep>: the model has no experts; set 1")
    fault = plan.layout_fault(shape, plan.trainer_layout(config), layout)
    require(fault is None, fault or "")


def idle_gpus(config: Config) -> list[str]:
    """A line with a fix if GPUs of the trainer have no colocated server and idle while the run samples."""
    server, width = config.rollout.server, config.launch.nproc_per_node
    if config.train.stage != "rl" or not server.colocated or not server.replicas:
        return []
    busy = parallel_layout.serving(config)
    for model in server_entries(config).values():
        if model.colocated:
            busy |= parallel_layout.serving(config_of(config, model, 0))
    idle = len(set(range(width)) - busy)
    if not idle:
        return []
    fitting, uncovered = divmod(width, parallel_layout.server_ranks_per_node(config))
    replicas = fitting * config.launch.nodes // server.nnodes
    advice = f"set rollout.server.replicas={replicas}"
    if uncovered or replicas <= server.replicas:
        advice = f"choose a rollout.server.tp that divides launch.nproc_per_node={width}"
    settings = f"rollout.server.replicas={server.replicas} x rollout.server.tp={server.tp}"
    return [f"{settings}: {idle} of the {width} GPUs of a node have no server and idle while the run samples; {advice}"]


def check_arguments(config: Config) -> None:
    """Lets SGLang check its own arguments for each model on this machine; takes seconds. Raises ConfigError."""
    if config.train.stage != "rl" or not first_on_node():
        return
    on_cpu = device.select(config.launch.device).type == "cpu"
    _check_conflicts(config, on_cpu)
    fault = refusal(config) if config.rollout.server.args and config.rollout.server.replicas else None
    require(fault is None, f"rollout.server.args{fault}")
    for group, model in metrics.served_models(config).values():
        serves = Serves.TEXT if gives_text(model.model) else Serves.SCORES
        fault = refusal(config_of(config, model, 0), serves) if model.args else None
        require(fault is None, f"{group}.args{fault}")


def _check_conflicts(config: Config, on_cpu: bool) -> None:
    faults = [server_args.conflict(config.rollout.server.args, "rollout.server", on_cpu)]
    for group, model in metrics.served_models(config).values():
        faults.append(server_args.conflict(model.args, group, on_cpu, f"{group}.model"))
    fault = next(filter(None, faults), None)
    require(fault is None, fault or "")


def _check_served_models(config: Config) -> None:
    """Checks the served models beside the policy that do not need this machine. Raises ConfigError."""
    models = metrics.served_models(config)
    for group, model in models.values():
        message = f"{group}.ep={model.ep}: does not divide {group}.tp={model.tp}; choose a divisor"
        require(model.tp % model.ep == 0, message)
        message = f"{group}.colocated=true: <rollout.max_staleness> samples while the trainer trains; set it to false"
        require(not model.colocated or config.rollout.max_staleness == 0, message, config)
        count = model.replicas * model.tp
        message = f"{group}.replicas x {group}.tp: needs {count} devices, and the trainer has <launch.nproc_per_node>"
        fits = not model.colocated or count <= config.launch.nproc_per_node
        require(fits, f"{message}; lower one of them, or set {group}.colocated=false", config)
    scorers = {} if config.llm.offline else metrics.scorers(metrics.scored_metrics(config.reward))
    for metric, name in scorers.items():
        if name in models and models[name][0] == f"reward.metrics.{metric}":  # the metric's own server
            continue
        label = f"reward.metrics.{metric}.model={SERVED}{name}"
        out = f"give one of {', '.join(config.servers)}" if config.servers else f"set servers.{name}.model"
        require(name in config.servers, f"{label}: servers has no {name}; {out}{nearest(name, config.servers)}")
        fault = score_fault(str(config.servers[name]["model"]))
        require(fault is None, f"{label}: {fault}")


def _check_served_on_gpus(config: Config, gpus: int) -> None:
    served = dict(metrics.served_models(config).values())
    needed = first_device(config) + sum(map(devices, served.values()))
    message = f"with the trainer and the policy's servers they need {needed} GPUs of a node, which has {gpus}"
    names = ", ".join(f"{group}.replicas x tp" for group, model in served.items() if devices(model))
    out = "lower one of them, or set servers.NAME.colocated=true"
    require(not names or needed <= gpus, f"{names}: {message}; {out}")
    for group, model in served.items():
        if model.colocated:
            message = "not set, and colocated servers would take the trainer's memory; set what fits"
            require(model.max_total_tokens is not None, f"{group}.max_total_tokens: {message}")
            saver = device.probe("memory_saver")
            message = f"needs torch-memory-saver ({saver.detail}); install it, or set {group}.colocated=false"
            require(saver.available, f"{group}.colocated=true: {message}")
