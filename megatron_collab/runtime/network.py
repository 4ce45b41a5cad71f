"""Addresses and ports of a run, by launch.interface, the hosts that bypass the HTTP proxy, and when to ask again."""

from __future__ import annotations

import os
import random
import re
import socket
from collections.abc import Iterable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import psutil

from megatron_collab.runtime.process import RunStopped, wait_for

if TYPE_CHECKING:  # slow imports that commands and the launcher do not need
    import torch.distributed as dist

LOOPBACK = "lo"
HOST = "127.0.0.1"
_LOOPBACK_HOSTS = ("localhost", HOST, "::1")
FIRST_PORT = 20_000
_TRIES = 100
_KERNEL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def address(interface: str | None) -> str:
    """The first IPv4 address of launch.interface (None: loopback) on this node. Raises ValueError if it has none."""
    addresses = {
        name: ipv4[0].address
        for name, entries in psutil.net_if_addrs().items()
        if (ipv4 := [entry for entry in entries if entry.family == socket.AF_INET])
    }
    name = interface or LOOPBACK
    if name not in addresses:
        known = ", ".join(f"{other} ({address})" for other, address in addresses.items())
        raise ValueError(
            f"launch.interface={name}: no interface with an IPv4 address on {socket.gethostname()}; it has "
            f"{known or 'none'}"
        )
    return addresses[name]


def meet(nodes: int, interface: str | None, timeout: float, store: dist.Store) -> list[str]:
    """On rank 0, the address of every node in order; an empty list on other ranks. Every rank calls it.

    `timeout`: seconds, rollout.server.start_timeout. Raises RunStopped if a node announces no address in time, and
    Preempted.
    """
    keys = [f"fabric/{node}" for node in range(nodes)]
    if os.environ["LOCAL_RANK"] == "0":
        store.set(keys[int(os.environ["GROUP_RANK"])], address(interface))
    if os.environ["RANK"] != "0":
        return []
    if not wait_for(lambda: store.check(keys), timeout):
        silent = ", ".join(str(number) for number, key in enumerate(keys) if not store.check([key]))
        raise RunStopped(
            f"launch.nodes={nodes}: the ranks of node {silent} have not started after "
            f"rollout.server.start_timeout={timeout:g} s"
        )
    return [store.get(key).decode() for key in keys]


def bindable(setting: str, port: int, host: str = HOST, part: int = 0, parts: int = 1) -> int:
    """`port` of the local address `host`, or a free port if it is 0. Raises ValueError naming `setting` if that fails.

    A server binds only after it has loaded, so no other process may get the free port meanwhile. It is therefore below
    the kernel's ephemeral range, above the ports of Ray's workers, and in this server's `part` of the `parts` servers.
    """
    if not 0 <= port < 1 << 16:
        raise ValueError(f"{setting}={port}: must be from 0 to 65535; choose another, or 0 for a free one")
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


def single_rank(setting: str) -> dict[str, str]:
    """torchrun's variables for a process that is the only rank. Raises ValueError naming `setting` without a port."""
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": HOST}
    return rank | {"MASTER_PORT": str(bindable(setting, 0))}


def variables(interface: str | None) -> dict[str, str]:
    """Environment variables of a process of the run on this node: it reaches the node without a proxy.

    They also bind gloo and NCCL to launch.interface (None: loopback), which both read when a process creates its first
    group.
    """
    name = interface or LOOPBACK
    bound = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}  # NCCL takes a prefix without =
    return bound | without_proxy([f"http://{address(interface)}"])


def without_proxy(urls: Iterable[str] = ()) -> dict[str, str]:
    """no_proxy and NO_PROXY that make HTTP clients connect directly to loopback and the hosts of `urls`.

    The user's entries stay. Every host is a separate entry: httpx (LiteLLM, MCP) and urllib do not support networks
    such as 10.0.0.0/8. Most clients read the lower-case name first, and the upper-case one if that is not set. httpx
    reads both when a client is created, so a process must set them before.
    """
    hosts = [*_LOOPBACK_HOSTS, *(host for url in urls if (host := urlsplit(url).hostname))]
    upper, lower = os.environ.get("NO_PROXY"), os.environ.get("no_proxy")
    return {
        "no_proxy": _with_hosts(upper if lower is None else lower, hosts),
        "NO_PROXY": _with_hosts(lower if upper is None else upper, hosts),
    }


def _with_hosts(entries: str | None, hosts: Iterable[str]) -> str:
    listed = [entry.strip() for entry in (entries or "").split(",") if entry.strip()]
    if "*" in listed:  # all hosts; urllib accepts it only as the single entry
        return "*"
    return ",".join(dict.fromkeys([*listed, *hosts]))


def retry_after(header: str) -> float:
    """Seconds of the header Retry-After (RFC 9110 section 10.2.3: seconds or a date); 0 if it is neither.

    The value may exceed any deadline, or be infinite.
    """
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", header):
        return float(header)
    try:
        date = parsedate_to_datetime(header).replace(tzinfo=UTC)  # HTTP knows no other zone
    except (ValueError, OverflowError, TypeError, LookupError):  # the e-mail parser raises all of these
        return 0.0
    return max(0.0, (date - datetime.now(UTC)).total_seconds())
