"""A rank is bound to the CPUs beside its GPU, and the servers that it starts are not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DEVICE = "0000:1b:00.0"
# Prints whether it was bound, then the CPUs of a thread of before, of the process, and of two children.
CODE = """
import json, os, subprocess, sys, threading
from pathlib import Path
from megatron_collab.runtime import affinity

def child():
    code = "import json, os; print(json.dumps(sorted(os.sched_getaffinity(0))))"
    return json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)

waits, result = threading.Event(), []
thread = threading.Thread(target=lambda: waits.wait() and result.append(sorted(os.sched_getaffinity(0))))
thread.start()
bound = affinity.bind(sys.argv[1], Path(sys.argv[2]))
waits.set()
thread.join()
inherited = child()
with affinity.unbound():
    free = child()
print(json.dumps([bound, result[0], sorted(os.sched_getaffinity(0)), inherited, free]))
"""


def bind(folder: Path, domain: str, domains: list[str], device: str = DEVICE) -> list[object]:
    for number, cpus in enumerate(domains):
        (node := folder / f"devices/system/node/node{number}").mkdir(parents=True, exist_ok=True)
        (node / "cpulist").write_text(f"{cpus}\n")
    (pci := folder / "bus/pci/devices" / DEVICE).mkdir(parents=True, exist_ok=True)
    (pci / "numa_node").write_text(f"{domain}\n")
    command = [sys.executable, "-c", CODE, device, str(folder)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.processes
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_a_rank_is_bound_and_its_servers_are_not(tmp_path: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    first, *second_domain = cpus
    domains = [f"{first},5000-5003", ",".join(map(str, second_domain))]
    assert bind(tmp_path, "0", domains) == [True, [first], [first], [first], cpus]
    free = [False, cpus, cpus, cpus, cpus]
    assert bind(tmp_path, "-1", domains) == free  # the firmware does not say
    assert bind(tmp_path, "0", domains, "0000:ff:00.0") == free
    assert bind(tmp_path, "0", [domains[0], ""]) == free  # a domain of memory alone: there is nothing to choose
    assert bind(tmp_path, "0", ["5000", domains[1]]) == free  # the job has no CPU there
