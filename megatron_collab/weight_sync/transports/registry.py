"""The transport of a run, by publish.transport; every question about it goes to its class."""

from __future__ import annotations

from functools import cache
from typing import Any

from megatron_collab.inference.spec import Placement
from megatron_collab.settings import PublishConfig, build, require
from megatron_collab.settings.extension import resolve
from megatron_collab.settings.schema import TRANSPORTS
from megatron_collab.weight_sync.node_routing import Places
from megatron_collab.weight_sync.plan import SyncSpec
from megatron_collab.weight_sync.transports.base import FolderTransport, Transport

SETTING = "publish.transport"


def transport_spec(publish: PublishConfig, placement: Placement) -> str:
    """The transport to servers at `placement` as module:Class or FILE.py:Class, by which servers find it too."""
    name = publish.transport
    if name == "auto":
        name = "memory" if placement.nodes == 1 or placement.colocated else "network"
    return TRANSPORTS.get(name, name)


def transport_class(publish: PublishConfig, placement: Placement) -> type[Transport]:
    """The class of the run's transport; imports torch. Raises ConfigError if the setting names no usable class."""
    return _class(transport_spec(publish, placement))


def transport_options(publish: PublishConfig, placement: Placement) -> Any:
    """publish.transport_options as an instance of the class's Options. Raises ConfigError."""
    return build(transport_class(publish, placement).Options, publish.transport_options, f"{SETTING}_options.")


@cache
def _class(spec: str) -> type[Transport]:
    transport: type[Transport] = resolve(spec, SETTING, Transport)
    receives = issubclass(transport, FolderTransport) or hasattr(transport, "receiver")
    require(receives, f"{SETTING}={spec}: the class has no receiver; define it")
    return transport


def places_of(sync: SyncSpec, servers: Placement, on_gpus: bool) -> Places:
    """The places of a run with `servers`; a single one if every trainer rank reaches every server."""
    ranks, nodes, count, width = sync.trainer.ranks, servers.nodes, servers.per_node, servers.ranks_per_node
    if not transport_class(sync.publish, servers).needs_same_node:
        return Places(1, ranks, servers.replicas, servers.tp)
    if on_gpus and servers.colocated:
        return Places(nodes * count, ranks // nodes // count, 1, width, True, servers.nnodes, count)
    return Places(nodes, ranks // nodes, count, width, servers.colocated, servers.nnodes)
