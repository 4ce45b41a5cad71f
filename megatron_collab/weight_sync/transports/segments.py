"""Memory that processes of one node share: a rank makes a segment, other ranks write into it, a server reads it.

On CPU a segment is a file without a name: it goes with its last user, however that ends. On CUDA it is memory of a
device, opened through CUDA IPC.
"""

from __future__ import annotations

import base64
import io
import mmap
import os
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing  # teaches the pickler to hand on CUDA memory
from torch import Tensor

# How another process opens a segment: a path with a size, or a pickle of torch's.
Handle = tuple[str, int]


class Segment:
    """`data`, uint8 [size], that other processes can open. Touched once when it is made: fresh pages are slow."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._file: int | None = None
        if device.type == "cpu":
            self._file = os.memfd_create("megatron-collab")
            os.ftruncate(self._file, size)
            self.data = _mapped(self._file, size)
        else:
            self.data = torch.empty(size, dtype=torch.uint8, device=device)

    def handle(self) -> Handle:
        """What one other process needs to open it; each needs one of its own."""
        if self._file is not None:
            return f"/proc/{os.getpid()}/fd/{self._file}", len(self.data)
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(self.data)
        return base64.b64encode(buffer.getvalue()).decode(), 0

    def close(self) -> None:
        """Nobody can open it any more; it goes with its last user."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def opened(handle: Handle) -> Tensor:
    """The uint8 [size] of a segment that another process made."""
    text, size = handle
    if not size:
        return ForkingPickler.loads(base64.b64decode(text))
    file = os.open(text, os.O_RDWR | os.O_CLOEXEC)
    try:
        return _mapped(file, size)
    finally:
        os.close(file)


def _mapped(file: int, size: int) -> Tensor:
    memory = mmap.mmap(file, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    return torch.frombuffer(memory, dtype=torch.uint8)
