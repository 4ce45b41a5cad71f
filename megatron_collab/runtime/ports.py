"""Ports that a server of ours can have."""

from __future__ import annotations

import random
import socket
from pathlib import Path

HOST = "127.0.0.1"
_FIRST = 20_000
_TRIES = 100
_KERNEL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def bindable(setting: str, port: int, host: str = HOST, part: int = 0, parts: int = 1) -> int:
    """`port` of `host`, an address of this machine, or a free one for 0; ValueError naming `setting` where it is taken.

    A server binds only after it has loaded, so a free port must be one that nobody is given meanwhile: below
    those that the kernel hands out, above those of Ray's workers, and for each of `parts` servers of a machine
    from a `part` of its own.
    """
    for candidate in [port] if port else _unassigned(setting, part, parts):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, candidate))
            except OSError as error:
                reason = (error.strerror or str(error)).lower()
            else:
                return candidate
    raise ValueError(f"{setting}={port}: {reason}; choose another, or 0 for a free one")


def _unassigned(setting: str, part: int, parts: int) -> list[int]:
    """Some ports at random that nobody hands out."""
    kernel = int(_KERNEL.read_text().split()[0])
    there = range(_FIRST + part, kernel, parts)
    if not there:
        raise ValueError(
            f"{setting}=0: the kernel hands out ports from {kernel} on by itself (net.ipv4.ip_local_port_range), and "
            f"free ones are taken from {_FIRST} to there; choose one, or have the kernel begin higher"
        )
    return random.SystemRandom().sample(there, min(_TRIES, len(there)))
