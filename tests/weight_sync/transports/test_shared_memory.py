"""Memory that another process writes, and that nothing is left of."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_collab.weight_sync.transports.shared_memory import Segment, opened

WRITE = "import sys; file = open(sys.argv[1], 'r+b'); file.seek(7); file.write(bytes([5]))"


@pytest.mark.processes
def test_another_process_writes_what_we_read() -> None:
    segment = Segment(100_000, torch.device("cpu"))
    path, size = segment.handle()
    assert size == len(segment.data) == 100_000
    again = opened((path, size))
    subprocess.run([sys.executable, "-c", WRITE, path], check=True)
    assert segment.data[7] == again[7] == 5
    segment.close()
    with pytest.raises(FileNotFoundError):
        opened((path, size))
    assert again[7] == 5  # who has it, keeps it


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
def test_on_a_gpu_another_process_writes_what_we_read(number: int) -> None:
    """Through CUDA IPC, in memory of the first device and of the second, as a server's ranks have."""
    segment = Segment(100_000, torch.device("cuda", number))
    text, _ = segment.handle()
    segment.data.zero_()
    torch.cuda.synchronize(number)
    subprocess.run([sys.executable, "-c", WRITE_ON_A_GPU, text, str(number)], check=True)
    assert segment.data[7] == 5 and segment.data.sum() == 5
