"""CPUs of a rank: those of the NUMA domain that its GPU is attached to.

Pinned memory is allocated by the rank's threads, so it lies in that domain too, and copies do not cross sockets.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)


@cache
def _at_start() -> frozenset[int]:
    """CPUs that this process might use before it was bound."""
    return frozenset(os.sched_getaffinity(0))


def bind(device: str, system: Path = Path("/sys")) -> bool:
    """Bind all threads of this process to the domain of the PCI device `device`, as 0000:1b:00.0, if there are several.

    Threads and processes that they start later inherit it; see `unbound`. The value is whether they were bound: not if
    the kernel does not know the device's domain, or gives this process none of its CPUs.
    """
    domains = {file.parent.name: _cpus(file) for file in system.glob("devices/system/node/node[0-9]*/cpulist")}
    number = system / "bus/pci/devices" / device / "numa_node"
    domain = f"node{number.read_text().strip()}" if number.exists() else ""  # node-1 if the firmware does not say
    if sum(map(bool, domains.values())) < 2 or domain not in domains:
        return False
    cpus = _at_start() & domains[domain]
    if not cpus:
        logger.warning("%s: this process has no CPU of its NUMA domain %s; it is not bound", device, domain)
        return False
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it ended meanwhile
            os.sched_setaffinity(int(thread), cpus)
    return True


@contextmanager
def unbound() -> Iterator[None]:
    """Processes that this thread starts inside the block may use the CPUs from before `bind`: a server has its own."""
    bound = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _at_start())
    try:
        yield
    finally:
        os.sched_setaffinity(0, bound)


def _cpus(file: Path) -> frozenset[int]:
    """As 0-3,8 stands for 0, 1, 2, 3 and 8."""
    ranges = [part.partition("-") for part in file.read_text().strip().split(",") if part]
    return frozenset(cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1))
