"""The network that the nodes of a run talk over: launch.interface decides what is bound and what is announced."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING

import psutil

from megatron_collab.config import Config
from megatron_collab.runtime import heartbeat, preemption
from megatron_collab.runtime.process import RunStopped

if TYPE_CHECKING:  # the launcher, which checks the interface, does without
    import torch.distributed as dist

LOOPBACK = "lo"
_POLL = 0.1  # seconds between looks for the nodes


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

    Raises RunStopped where a node says none within rollout.server.start_timeout seconds, Preempted.
    """
    nodes = [f"fabric/{node}" for node in range(config.launch.nodes)]
    if os.environ["LOCAL_RANK"] == "0":
        store.set(nodes[int(os.environ["GROUP_RANK"])], address(config))
    if os.environ["RANK"] != "0":
        return []
    timeout = config.rollout.server.start_timeout
    deadline = time.monotonic() + timeout
    while not store.check(nodes):
        if time.monotonic() > deadline:
            silent = ", ".join(str(number) for number, node in enumerate(nodes) if not store.check([node]))
            raise RunStopped(
                f"launch.nodes={config.launch.nodes}: the ranks of node {silent} have not started after "
                f"rollout.server.start_timeout={timeout:g} s"
            )
        heartbeat.beat()
        preemption.check()
        time.sleep(_POLL)
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
