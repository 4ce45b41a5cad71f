"""Ports that a server of ours can have."""

from __future__ import annotations

import random
import socket
from pathlib import Path

HOST = "127.0.0.1"


def bindable(setting: str, port: int, host: str = HOST) -> int:
    """`port` of `host`, an address of this machine, or a free one for 0; ValueError naming `setting` where it is taken.

    A server binds only after it has loaded, so a free port must be one that nobody is given meanwhile: below
    those that the kernel hands out and above those of Ray's workers.
    """
    kernel = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    unassigned = range(20_000, max(kernel, 20_001))
    for candidate in [port] if port else random.SystemRandom().sample(unassigned, min(100, len(unassigned))):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, candidate))
            except OSError as error:
                reason = (error.strerror or str(error)).lower()
            else:
                return candidate
    raise ValueError(f"{setting}={port}: {reason}; choose another, or 0 for a free one")
