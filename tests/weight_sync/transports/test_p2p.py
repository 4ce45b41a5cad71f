"""Process groups with servers over NCCL. Without a GPU: the tests check the calls to torch.

Over gloo the real thing is in test_receiver.py, test_killed.py and test_hung.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_collab.weight_sync.store_protocol import Peer
from megatron_collab.weight_sync.transports import p2p

GPU = torch.device("cuda", 0)


class FakeNCCL:
    """torch's group, which reads the environment when it is made."""

    def __init__(self, store: str, rank: int, size: int, options: Any) -> None:
        self.place, self.options = (store, rank, size), options
        self.on_error = os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"]
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True

    @staticmethod
    def Options() -> Any:
        return SimpleNamespace(config=SimpleNamespace())


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNCCL, raising=False)
    monkeypatch.setattr(p2p, "connect", lambda address, name, timeout: name)
    monkeypatch.setenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", "")  # put back afterwards


@pytest.mark.parametrize("before", [None, "3"])
def test_a_group_that_fails_does_not_end_the_process(
    nccl: None, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.delenv(name, raising=False) if before is None else monkeypatch.setenv(name, before)
    group: Any = p2p._join(("localhost", 1), "group", 2, 4, GPU, 2.5)
    assert group.place == ("group", 2, 4) and group.on_error == "2"
    assert os.environ.get(name) == before, "the other groups keep theirs"
    assert group.options.config.blocking == 0 and os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "3"
    assert group.options._timeout > timedelta(seconds=2.5), "torch's watchdog waits longer than we do"


def test_what_a_lost_server_was_sent_is_aborted(nccl: None, one_rank: Any, caplog: pytest.LogCaptureFixture) -> None:
    writer: Any = SimpleNamespace(parts=[{0: (0, 4)}], largest=4)
    setup: Any = SimpleNamespace(
        writer=writer, address=("localhost", 1), prefix="prefix", device=torch.device("cpu"), idle_timeout=1.0
    )
    transport = p2p.NetworkTransport(setup)
    transport._device = GPU
    abandoned = []
    store: Any = SimpleNamespace(
        number=1,
        all_ready=lambda *_: True,
        abandoned=lambda server: False,
        abandon=lambda server, ranks: abandoned.append((server, *ranks)),
    )
    peer = Peer(7, 1, True)
    transport._meet(store, peer, 0.0)
    group: Any = transport._groups[7]
    with transport._losing(store, peer):
        raise RuntimeError("it has died")
    assert group.aborted and abandoned == [(7, 0)] and not transport._groups
    assert "server 7 is abandoned: it has died" in caplog.text


RANK = """
import os, sys, time, torch
from megatron_collab.weight_sync.transports import p2p
rank, port = int(sys.argv[1]), int(sys.argv[2])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
data = torch.full([4], rank, dtype=torch.uint8, device=device)
group = p2p._join(("127.0.0.1", port), "group", rank, 2, device, 30.0)
p2p.finish(group.recv([data], 0, 0) if rank else group.send([data], 1, 0), time.monotonic() + 60, device)
if rank:
    assert data.sum() == 0
    os.kill(os.getpid(), 9)
try:
    p2p.finish(group.recv([data], 1, 1), time.monotonic() + 10, device)
except RuntimeError:
    group.abort()
    time.sleep(5)  # for a watchdog to end the process
    print((torch.ones(3, device=device) * 2).sum().item())
"""


@pytest.mark.gpu(2)
@pytest.mark.processes
def test_on_two_gpus_a_dying_peer_does_not_end_the_trainer() -> None:
    """A server is killed in the middle of an NCCL transfer, and the trainer keeps computing."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(store.port)], stdout=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    outputs = [rank.communicate(timeout=180)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, -9] and outputs[0] == "6.0\n"
