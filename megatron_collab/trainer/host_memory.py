"""Host memory for a rank's offloaded tensors: pieces of equal size, allocated on first use and kept.

torch rounds every pinned allocation up to a power of two and caches freed memory (ATen/core/CachingHostAllocator.h, the
same in 2.13 and 2.14.1). A single tensor could thus take twice its size, and that of the first offload, without AdamW's
moments, would stay allocated. The size of a piece is a power of two, so only a part of the last piece is unused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

# Bytes. One copy takes a millisecond over PCIe, which hides its launch; 8 ranks leave 256 MiB unused on average.
PIECE = 64 << 20


class PieceSlice(NamedTuple):
    """Bytes [start, end) of piece number `piece`."""

    piece: int
    start: int
    end: int


def piece_count(nbytes: float) -> int:
    """Number of pieces for `nbytes` bytes."""
    return math.ceil(nbytes / PIECE)


def spans(sizes: Iterable[int]) -> list[list[PieceSlice]]:
    """The spans of each storage, given its size in bytes (> 0); storages are laid out without gaps."""
    storages, begin = [], 0
    for size in sizes:
        end = begin + size
        cuts = [begin, *range((begin // PIECE + 1) * PIECE, end, PIECE), end]
        slices = [PieceSlice(start // PIECE, start % PIECE, (stop - 1) % PIECE + 1) for start, stop in pairwise(cuts)]
        storages.append(slices)
        begin = end
    return storages


class HostMemory:
    """The pieces of a rank, `pinned` or pageable; placing new storages overwrites the old ones."""

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self.pieces: list[Tensor] = []  # uint8 [PIECE]

    def place(self, sizes: Sequence[int]) -> list[list[Tensor]]:
        """For each storage, given its size in bytes, the uint8 views of pieces that hold it, in order."""
        for _ in range(piece_count(sum(sizes)) - len(self.pieces)):
            self.pieces.append(torch.empty(PIECE, dtype=torch.uint8, pin_memory=self.pinned))
        return [[self.pieces[piece][start:end] for piece, start, end in storage] for storage in spans(sizes)]
