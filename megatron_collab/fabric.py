"""The network that the nodes of a run talk over: launch.interface decides what is bound and what is announced."""

from __future__ import annotations

import socket

import psutil

from megatron_collab.config import Config

LOOPBACK = "lo"


def address(config: Config) -> str:
    """The IPv4 address of launch.interface on this node; the loopback's where none is set.

    Raises ValueError where there is no such interface, or it has no address.
    """
    name = config.launch.interface or LOOPBACK
    found = psutil.net_if_addrs()
    for entry in found.get(name, []):
        if entry.family == socket.AF_INET:
            return str(entry.address)
    raise ValueError(f"launch.interface={name}: no interface with an IPv4 address; there are {', '.join(found)}")
