"""SGLang servers that cannot run on this machine, with this model or beside this trainer, refused in one line."""

from __future__ import annotations

from megatron_collab.config import Config, require
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.models.parallel_layout import servers_per_node
from megatron_collab.runtime import device
from megatron_collab.weight_sync import plan

# Before Ada SGLang repacks FP8 weights for a kernel without FP8 units; from Blackwell on it changes their scales.
_FP8_FIRST, _FP8_END = (8, 9), (10, 0)
_LAST_PORT = 65535


def validate_servers(config: Config) -> None:
    """What can be said without the model and without this machine."""
    server, publish = config.rollout.server, config.publish
    require(
        server.tp % server.ep == 0,
        f"rollout.server.ep={server.ep}: does not divide rollout.server.tp={server.tp}; choose a divisor",
    )
    last = server.port + server.replicas - 1
    require(
        server.port == 0 or last <= _LAST_PORT,
        f"rollout.server.port={server.port}: the last of rollout.server.replicas={server.replicas} servers would have "
        f"port {last}; choose a lower one",
    )
    nodes = config.launch.nodes
    require(
        server.replicas % nodes == 0,
        f"rollout.server.replicas={server.replicas}: is no multiple of launch.nodes={nodes}, and every node has as "
        "many servers; choose one",
    )
    here, trainer = servers_per_node(config) * server.tp, config.launch.nproc_per_node
    require(
        nodes == 1 or not server.colocated or here <= trainer,
        f"rollout.server.replicas={server.replicas} x rollout.server.tp={server.tp} / launch.nodes={nodes}: needs "
        f"{here} devices of a node, and rollout.server.colocated=true has servers share the trainer's "
        f"launch.nproc_per_node={trainer}; lower rollout.server.replicas or rollout.server.tp",
    )
    require(
        server.colocated or not config.parallel.offload,
        "parallel.offload=true: makes room for servers on the trainer's devices; set parallel.offload=false, or "
        "rollout.server.colocated=true",
    )
    require(
        publish.transport != "memory" or nodes == 1 or server.colocated,
        f"publish.transport=memory: on launch.nodes={nodes} it needs servers on the trainer's devices; "
        "set publish.transport=auto, or rollout.server.colocated=true",
    )
    if server.fp8:
        require(
            config.model.dtype == "bfloat16",
            f"rollout.server.fp8=true: needs model.dtype=bfloat16, not {config.model.dtype}; set it, or "
            "rollout.server.fp8=false",
        )
        require(
            publish.transport != "disk",
            "publish.transport=disk: carries the weights as they are trained, and rollout.server.fp8=true needs them "
            "in FP8; set publish.transport=auto, or rollout.server.fp8=false",
        )
    _check_staleness(config)


def _check_staleness(config: Config) -> None:
    """Sampling ahead needs devices of its own, and a loss that knows which weights have sampled."""
    stale = config.rollout.max_staleness
    if stale == 0:
        return
    require(
        not config.rollout.server.colocated,
        f"rollout.max_staleness={stale}: servers that sample while the trainer trains need devices of their own; set "
        "rollout.server.colocated=false, or rollout.max_staleness=0",
    )
    require(
        config.algo.correction != "none",
        f"rollout.max_staleness={stale}: samples of older weights need an importance correction; set "
        "algo.correction=truncated, or rollout.max_staleness=0",
    )


def check_machine(config: Config) -> None:
    """The devices and libraries that the servers need."""
    if config.train.stage != "rl":
        return
    on_gpus = device.select(config.launch.device).type == device.GPU
    if config.rollout.server.fp8:
        found = device.capability() if on_gpus else None
        require(
            found is not None and _FP8_FIRST <= found < _FP8_END,
            f"rollout.server.fp8=true: needs GPUs of compute capability {_number(_FP8_FIRST)} to below "
            f"{_number(_FP8_END)}, here is {'none' if found is None else f'one of {_number(found)}'}; "
            "set rollout.server.fp8=false",
        )
    if on_gpus:
        _check_gpus(config)


def _check_gpus(config: Config) -> None:
    server, trainer, found = config.rollout.server, config.launch.nproc_per_node, device.count()
    here = servers_per_node(config) * server.tp
    nodes = f" / launch.nodes={config.launch.nodes}" if config.launch.nodes > 1 else ""
    servers = f"rollout.server.replicas={server.replicas} x rollout.server.tp={server.tp}{nodes}"
    if server.colocated:
        require(
            here <= found,
            f"{servers}: needs more than the {found} GPUs of this node; lower rollout.server.replicas or "
            "rollout.server.tp",
        )
        transport = config.publish.transport
        require(
            transport == "disk" or plan.uses_memory(config),
            f"publish.transport={transport}: over the network NCCL joins no two ranks on one GPU, which "
            "rollout.server.colocated=true has trainer and server share; set publish.transport=auto, or "
            "rollout.server.colocated=false",
        )
        saver = device.probe("memory_saver")
        require(
            saver.found,
            f"rollout.server.colocated=true: needs torch-memory-saver ({saver.detail}) for servers to give their "
            "memory back; install it, or set rollout.server.colocated=false",
        )
        require(
            server.max_total_tokens is not None,
            "rollout.server.max_total_tokens: not set, and a colocated server would take the memory that "
            "the trainer's weights need; set what doctor.py --plan has room for, or rollout.server.colocated=false",
        )
    else:
        require(
            trainer + here <= found,
            f"{servers}: with rollout.server.colocated=false they need GPUs beside launch.nproc_per_node={trainer}, "
            f"more than the {found} of this node; lower one of them, or set rollout.server.colocated=true",
        )


def check_shape(config: Config, shape: ModelShape) -> None:
    """The sizes of the model against the layout of a server."""
    length = config.rollout.context_length
    require(
        length <= shape.max_positions,
        f"rollout.context_length={length}: the model has {shape.max_positions} positions; choose at most as many",
    )
    layout = plan.server_layout(config)
    require(
        layout.ep == 1 or shape.experts is not None, f"rollout.server.ep={layout.ep}: the model has no experts; set 1"
    )
    fault = plan.layout_fault(shape, plan.trainer_layout(config), layout)
    require(fault is None, fault or "")


def _number(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
