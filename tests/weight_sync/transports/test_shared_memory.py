"""Memory that another process writes and that leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_collab.weight_sync.node_routing import Places
from megatron_collab.weight_sync.plan import Bucket
from megatron_collab.weight_sync.store_protocol import Peer, PlaceStore, SyncStore, connect, host
from megatron_collab.weight_sync.transports.base import TransportSetup
from megatron_collab.weight_sync.transports.shared_memory import Segment, SharedMemoryTransport, opened

WRITE = "import sys; file = open(sys.argv[1], 'r+b'); file.seek(7); file.write(bytes([5]))"


@pytest.mark.processes
def test_another_process_writes_the_segment() -> None:
    segment = Segment(100_000, torch.device("cpu"))
    path, size = segment.handle()
    assert size == len(segment.data) == 100_000
    reopened = opened((path, size))
    subprocess.run([sys.executable, "-c", WRITE, path], check=True)
    assert segment.data[7] == reopened[7] == 5
    segment.close()
    with pytest.raises(FileNotFoundError):
        opened((path, size))
    assert reopened[7] == 5  # an open mapping stays valid


def test_the_memory_has_no_name() -> None:
    segment = Segment(5000, torch.device("cpu"))
    path, _ = segment.handle()
    assert Path(path).readlink().name == "memfd:megatron-collab (deleted)"
    segment.close()


WRITE_ON_A_GPU = """
import sys, torch
from megatron_collab.weight_sync.transports.shared_memory import opened
opened((sys.argv[1], 0))[7] = 5
torch.cuda.synchronize(int(sys.argv[2]))
"""


@pytest.mark.processes
@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.gpu), pytest.param(1, marks=pytest.mark.gpu(2))])
def test_on_a_gpu_another_process_writes_the_segment(number: int) -> None:
    """Through CUDA IPC, in memory of the first device and of the second, as a server's ranks have."""
    segment = Segment(100_000, torch.device("cuda", number))
    text, _ = segment.handle()
    segment.data.zero_()
    torch.cuda.synchronize(number)
    subprocess.run([sys.executable, "-c", WRITE_ON_A_GPU, text, str(number)], check=True)
    assert segment.data[7] == 5 and segment.data.sum() == 5


@pytest.mark.processes
def test_an_abandoned_server_is_released_until_the_last_rank_has_written(one_rank: Any) -> None:
    """The rank that hosts the place's store is done; another rank of that place is not."""
    writer: Any = SimpleNamespace(parts=[{}], write=lambda *_: None)
    relay: Any = SimpleNamespace(receives=lambda _: set(), crossing=lambda *_: nullcontext())
    cpu = torch.device("cpu")
    setup = TransportSetup(
        options=None,
        plan=[[Bucket((), 1)]],
        places=Places(1, 1, 1, 1),
        writer=writer,
        make_sender=lambda *_: SimpleNamespace(largest=0),  # type: ignore[arg-type,return-value]
        device=cpu,
        server_devices=[cpu],
        address=("localhost", 1),
        prefix="",
        limit=60.0,
        idle_timeout=60.0,
        timeout=60.0,
    )
    transport = SharedMemoryTransport(setup)
    transport._relay, transport._places = relay, Places(1, 2, 1, 1)
    run = SyncStore(host("", 60.0)[1], 1)
    place = PlaceStore(connect(transport._address, "", 60.0), 1)
    with ThreadPoolExecutor(1) as threads:
        carried = threads.submit(transport.carry, run, [Peer(0, 1, False)], None, 0)
        place.wait_written(0, [0])
        run.abandon(0, [0])
        assert place.late(0, [(0, 0)], 30.0) == set() and not carried.done()
        place.set_written(0, 1)
        carried.result(30)
    transport.close()
