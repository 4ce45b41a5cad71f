"""The transport of a run, by publish.transport; every question about it goes to its class."""

from __future__ import annotations

from functools import cache
from typing import Any

from megatron_collab.config import Config, build, require
from megatron_collab.config.extension import resolve
from megatron_collab.config.schema import TRANSPORTS
from megatron_collab.models.parallel_layout import ranks, server_ranks_per_node, servers_per_node
from megatron_collab.weight_sync.node_routing import Places
from megatron_collab.weight_sync.transports.base import FolderTransport, Transport

SETTING = "publish.transport"


def transport_spec(config: Config) -> str:
    """The transport as module:Class or FILE.py:Class, by which servers find it too."""
    name = config.publish.transport
    if name == "auto":
        near = config.launch.nodes == 1 or config.rollout.server.colocated
        name = "memory" if near else "network"
    return TRANSPORTS.get(name, name)


def transport_class(config: Config) -> type[Transport]:
    """The class of the run's transport; imports torch. Raises ConfigError if the setting names no usable class."""
    return _class(transport_spec(config))


def transport_options(config: Config) -> Any:
    """publish.transport_options as an instance of the class's Options. Raises ConfigError."""
    return build(transport_class(config).Options, config.publish.transport_options, f"{SETTING}_options.")


@cache
def _class(spec: str) -> type[Transport]:
    transport: type[Transport] = resolve(spec, SETTING, Transport)
    missing = sorted(transport.__abstractmethods__)
    if not issubclass(transport, FolderTransport) and not hasattr(transport, "receiver"):
        missing.append("receiver")
    require(not missing, f"{SETTING}={spec}: the class has no {', '.join(missing)}; define them, or set it to auto")
    return transport


def places_of(config: Config, on_gpus: bool) -> Places:
    """The places of a run; a single one if every trainer rank reaches every server."""
    launch, server = config.launch, config.rollout.server
    if not transport_class(config).needs_same_node:
        return Places(1, ranks(config), server.replicas, server.tp)
    count, width = servers_per_node(config), server_ranks_per_node(config)
    if on_gpus and server.colocated:
        return Places(launch.nodes * count, launch.nproc_per_node // count, 1, width, True, server.nnodes, count)
    return Places(launch.nodes, launch.nproc_per_node, count, width, server.colocated, server.nnodes)
