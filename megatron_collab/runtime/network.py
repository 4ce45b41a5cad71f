"""Addresses and ports of a run, by launch.interface."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from megatron_collab.config import Config
from megatron_collab.runtime.process import RunStopped, wait_for

if TYPE_CHECKING:  # the launcher, which checks the interface, does without
    import torch.distributed as dist

LOOPBACK = "lo"
HOST = "127.0.0.1"
FIRST_PORT = 20_000
_TRIES = 100
_KERNEL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def address(config: Config) -> str:
    """The first IPv4 address of launch.interface on this node, or of loopback; ValueError where it has none."""
    found = {
        name: own[0].address
        for name, entries in psutil.net_if_addrs().items()
        if (own := [entry for entry in entries if entry.family == socket.AF_INET])
    }
    name = config.launch.interface or LOOPBACK
    if name not in found:
        known = ", ".join(f"{interface} ({own})" for interface, own in found.items())
        raise ValueError(
            f"launch.interface={name}: no interface with an IPv4 address on {socket.gethostname()}; it has {known}"
        )
    return found[name]


def meet(config: Config, store: dist.Store) -> list[str]:
    """The address of every node, in order, on rank 0; an empty list on other ranks. All ranks call it.

    RunStopped if a node announces none within rollout.server.start_timeout seconds; Preempted.
    """
    nodes = [f"fabric/{node}" for node in range(config.launch.nodes)]
    if os.environ["LOCAL_RANK"] == "0":
        store.set(nodes[int(os.environ["GROUP_RANK"])], address(config))
    if os.environ["RANK"] != "0":
        return []
    timeout = config.rollout.server.start_timeout
    if not wait_for(lambda: store.check(nodes), timeout):
        silent = ", ".join(str(number) for number, node in enumerate(nodes) if not store.check([node]))
        raise RunStopped(
            f"launch.nodes={config.launch.nodes}: the ranks of node {silent} have not started after "
            f"rollout.server.start_timeout={timeout:g} s"
        )
    return [store.get(node).decode() for node in nodes]


def bindable(setting: str, port: int, host: str = HOST, part: int = 0, parts: int = 1) -> int:
    """`port` of `host`, an address of this machine, or a free one for 0; ValueError naming `setting` where it is taken.

    A server binds only after it has loaded, so a free port must be one that no other process gets meanwhile: below
    the kernel's ephemeral range, above the ports of Ray's workers, and in the `part` of this one of `parts` servers.
    """
    candidates = [port]
    if not port:
        kernel = int(_KERNEL_PORTS.read_text().split()[0])
        unassigned = range(FIRST_PORT + part, kernel, parts)
        if not unassigned:
            raise ValueError(
                f"{setting}=0: the kernel's ephemeral ports begin at {kernel} (net.ipv4.ip_local_port_range), and free "
                f"ports are taken from {FIRST_PORT} up to there; set a port, or raise the beginning of that range"
            )
        candidates = random.SystemRandom().sample(unassigned, min(_TRIES, len(unassigned)))
    for candidate in candidates:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, candidate))
            except OSError as error:
                reason = (error.strerror or str(error)).lower()
            else:
                return candidate
    raise ValueError(f"{setting}={port}: {reason}; choose another, or 0 for a free one")


def alone(setting: str) -> dict[str, str]:
    """The variables of torchrun's for a process that is the only rank. ValueError naming `setting` without a port."""
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": HOST}
    return rank | {"MASTER_PORT": str(bindable(setting, 0))}


def variables(config: Config) -> dict[str, str]:
    """Environment variables that bind gloo and NCCL to launch.interface; read with a process's first group."""
    name = config.launch.interface or LOOPBACK
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}  # NCCL takes a prefix without =
