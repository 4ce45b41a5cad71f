"""The network that the nodes of a run talk over: launch.interface decides what is bound and what is announced."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

import psutil

from megatron_collab.config import Config
from megatron_collab.processes import RunStopped

if TYPE_CHECKING:  # the launcher, which checks the interface, does without
    import torch.distributed as dist

LOOPBACK = "lo"


def address(config: Config) -> str:
    """The IPv4 address of launch.interface on this node; the loopback's where none is set.

    Raises ValueError where there is no such interface, or it has no address.
    """
    found = _addresses()
    name = config.launch.interface or LOOPBACK
    if name not in found:
        there = ", ".join(f"{interface} ({own})" for interface, own in found.items())
        raise ValueError(
            f"launch.interface={name}: no interface with an IPv4 address on {socket.gethostname()}; it has {there}"
        )
    return found[name]


def meet(config: Config, store: dist.Store) -> list[str]:
    """On rank 0 the address of every node, in their order; on other ranks nothing. All ranks call it.

    Raises RunStopped where a node says none within launch.timeout seconds.
    """
    nodes = [f"fabric/{node}" for node in range(config.launch.nodes)]
    if os.environ["LOCAL_RANK"] == "0":
        store.set(nodes[int(os.environ["GROUP_RANK"])], address(config))
    if os.environ["RANK"] != "0":
        return []
    try:
        store.wait(nodes, timedelta(seconds=config.launch.timeout))
    except RuntimeError as error:
        silent = ", ".join(str(number) for number, node in enumerate(nodes) if not store.check([node]))
        raise RunStopped(
            f"launch.nodes={config.launch.nodes}: the ranks of node {silent} have not started after "
            f"launch.timeout={config.launch.timeout:g} s"
        ) from error
    return [store.get(node).decode() for node in nodes]


def variables(config: Config) -> dict[str, str]:
    """What tells gloo and NCCL to keep to launch.interface; read when a process makes its first group."""
    name = config.launch.interface or LOOPBACK
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}  # NCCL takes a prefix without =


def _addresses() -> dict[str, str]:
    """By interface, its first IPv4 address."""
    found: dict[str, str] = {}
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == socket.AF_INET:
                found.setdefault(name, entry.address)
    return found
