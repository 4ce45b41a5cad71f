"""Settles what a program serves: servers of the policy and of other models, and how turns are requested.

A check of a single value is here, a check that involves the trainer or this machine in servers.py.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from megatron_collab.config import CallConfig, Config, EvaluateConfig, PlayConfig
from megatron_collab.inference import adapters
from megatron_collab.inference.served import gives_text
from megatron_collab.inference.spec import (
    ClientSpec,
    Placement,
    ServerHost,
    ServerSpec,
    Serves,
    ServingSpec,
)
from megatron_collab.launch.play_specs import reward_spec
from megatron_collab.llm.endpoint import SERVED
from megatron_collab.models.lora import ServedAdapters
from megatron_collab.settings import ServedConfig, Shown, build, require


def training(config: Config) -> ServingSpec:
    """What a training run serves. Raises ConfigError."""
    trainer, server, lora = config.launch.nproc_per_node, config.rollout.server, config.model.lora
    policy = replace(
        _policy(config, trainer, shared=trainer if server.colocated else 0),
        fp8=server.fp8,
        adapters=ServedAdapters(lora.rank, lora.alpha, tuple(lora.targets)) if lora.rank and lora.served else None,
        returns_experts=config.rollout.routing_replay,
    )
    client = replace(_client(config), adapter=adapters.NAME if lora.served else None)
    return ServingSpec(policy, client, _served_by_name(config, trainer, policy.placement.end))


def evaluation(config: EvaluateConfig) -> ServingSpec:
    """What an evaluation serves: as there is no trainer, the servers have all devices. Raises ConfigError.

    The policy has no servers if assistant.model takes its place.
    """
    policy = _policy(config)
    if config.assistant.model:
        policy = replace(policy, placement=replace(policy.placement, replicas=0))
    return ServingSpec(policy, _client(config), _served_by_name(config, 0, policy.placement.end))


def server_entries(config: CallConfig) -> dict[str, ServedConfig]:
    """The entries of `servers`. Raises ConfigError naming the setting that is refused."""
    models = {}
    for name, settings in config.servers.items():
        group = f"servers.{name}"
        require(re.fullmatch(r"[\w-]+", name) is not None, f"{group}: name it with letters, digits, - and _")
        require(isinstance(settings, dict), f"{group}={settings}: give settings such as {{model: PATH}}")
        models[name] = build(ServedConfig, settings, f"{group}.")
        message = f"{group}.model: not set; give a Hugging Face folder, or OWNER/NAME[@REVISION] of the Hub"
        require(bool(models[name].model), message)
    return models


def served_entries(config: CallConfig) -> dict[str, tuple[str, ServedConfig]]:
    """The entries of `servers` to serve: by name, the group of its settings and the model.

    Empty if llm.offline: recorded calls answer everything. Raises ConfigError.
    """
    models = {name: (f"servers.{name}", model) for name, model in server_entries(config).items()}
    return {} if config.llm.offline else models


def served_models(config: PlayConfig) -> dict[str, tuple[str, ServedConfig]]:
    """As `served_entries`, with the models of metrics by the metric's name: all models besides the policy."""
    models = served_entries(config)
    for name, metric in () if config.llm.offline else reward_spec(config.reward).metrics.items():
        if (model := metric.served) and not model.model.startswith(SERVED):
            message = f"servers.{name}: the servers of metric {name} have this name; choose another name"
            require(name not in models, message)
            models[name] = f"reward.metrics.{name}", model
    return models


def served_alone(config: CallConfig, name: str, folder: Path) -> ServerSpec:
    """The servers of the entry `name` of `servers`, in a program that serves nothing else; `folder`: for their logs.

    Raises ConfigError.
    """
    model = server_entries(config)[name]
    placement = Placement(model.replicas, model.tp)
    return _other(config, name, f"servers.{name}", model, placement, _host(config, folder))


def _policy(config: PlayConfig, trainer: int = 0, shared: int = 0) -> ServerSpec:
    """The policy's servers; `trainer`: devices of a node that the trainer uses, `shared`: those that it shares."""
    server = config.rollout.server
    return ServerSpec(
        setting="rollout.server",
        model=config.model.path,
        dtype=config.model.dtype,
        placement=_policy_placement(config, trainer, shared),
        host=replace(_host(config, Path(config.run.dir)), port=server.port),
        max_running_requests=server.max_running_requests,
        context_length=config.rollout.context_length,
        max_total_tokens=server.max_total_tokens,
        memory_share=server.memory_share,
        ep=server.ep,
        seed=config.run.seed,
        args=server.args,
    )


def _policy_placement(config: PlayConfig, trainer: int, shared: int) -> Placement:
    shown = Shown(config)
    server, nodes = config.rollout.server, config.launch.nodes
    require(
        server.tp % server.ep == 0,
        f"{shown.rollout.server.ep}: does not divide {shown.rollout.server.tp}; choose a divisor",
    )
    last = server.port + server.replicas - 1
    message = f"{shown.rollout.server.port}: the last of {shown.rollout.server.replicas} servers would have port {last}"
    require(server.port == 0 or last <= 65535, f"{message}; lower it")
    require(
        server.tp % server.nnodes == 0,
        f"{shown.rollout.server.nnodes}: does not divide {shown.rollout.server.tp}; choose a divisor",
    )
    require(
        nodes % server.nnodes == 0,
        f"{shown.rollout.server.nnodes}: does not divide {shown.launch.nodes}; choose a divisor",
    )
    message = f"{shown.rollout.server.replicas}: is not a multiple of {shown.launch.nodes}, and all nodes get as many"
    require(server.nnodes > 1 or server.replicas % nodes == 0, f"{message}; choose one")
    message = (
        f"{shown.rollout.server.replicas} x {shown.rollout.server.nnodes}: is not a multiple of {shown.launch.nodes}"
    )
    require(server.replicas * server.nnodes % nodes == 0, f"{message}; change one of them")
    return Placement(server.replicas, server.tp, server.nnodes, nodes, shared, first=trainer)


def _served_by_name(config: PlayConfig, trainer: int, first: int) -> dict[str, ServerSpec]:
    """The servers of the models besides the policy, all on the first node; `first`: their first device."""
    specs: dict[str, ServerSpec] = {}
    for name, (setting, model) in served_models(config).items():
        placement = Placement(model.replicas, model.tp, shared=trainer if model.colocated else 0, first=first)
        specs[name] = _other(config, name, setting, model, placement, _host(config, Path(config.run.dir)))
        first = first if placement.colocated else placement.end
    return specs


def _other(
    config: CallConfig, name: str, setting: str, model: ServedConfig, placement: Placement, host: ServerHost
) -> ServerSpec:
    message = f"{setting}.ep={model.ep}: does not divide {setting}.tp={model.tp}; choose a divisor"
    require(model.tp % model.ep == 0, message)
    message = f"{setting}.memory_share={model.memory_share}: max_total_tokens={model.max_total_tokens} sets the same"
    require(None in (model.memory_share, model.max_total_tokens), f"{message}; give one of them")
    return ServerSpec(
        setting=setting,
        model=model.model,
        dtype=config.model.dtype,
        placement=placement,
        host=host,
        max_running_requests=model.max_running_requests,
        context_length=config.rollout.context_length,
        max_total_tokens=model.max_total_tokens,
        memory_share=model.memory_share,
        ep=model.ep,
        seed=config.run.seed,
        serves=Serves.TEXT if gives_text(model.model, f"{setting}.model") else Serves.SCORES,
        name=name,
        args=model.args,
    )


def _host(config: CallConfig, folder: Path) -> ServerHost:
    launch, start_timeout = config.launch, config.rollout.server.start_timeout
    return ServerHost(launch.device, launch.interface, folder, start_timeout, launch.timeout / 4)


def _client(config: PlayConfig) -> ClientSpec:
    rollout = config.rollout
    return ClientSpec(rollout.turn_timeout, rollout.tool_parser, bool(rollout.tools or rollout.mcp_servers))
