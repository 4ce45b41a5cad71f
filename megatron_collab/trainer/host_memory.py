"""Host memory for what a rank offloads: pieces of one size, allocated when first used and kept.

torch rounds every pinned allocation up to a power of two and keeps what is freed (ATen/core/CachingHostAllocator.h, the
same in 2.13 and 2.14.1): one tensor for all could take twice its size, and the one of the first offload, which has no
moments of AdamW yet, would stay beside it. A piece is a power of two, so no more is unused than a part of the last one.
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
    """Pieces for so many bytes."""
    return math.ceil(nbytes / PIECE)


def spans(sizes: Iterable[int]) -> list[list[PieceSlice]]:
    """For each storage of so many bytes (above 0), its spans: storages follow one another without gaps."""
    placed, begin = [], 0
    for size in sizes:
        end = begin + size
        cuts = [begin, *range((begin // PIECE + 1) * PIECE, end, PIECE), end]
        slices = [PieceSlice(start // PIECE, start % PIECE, (stop - 1) % PIECE + 1) for start, stop in pairwise(cuts)]
        placed.append(slices)
        begin = end
    return placed


class HostMemory:
    """The pieces of a rank, `pinned` or pageable; what is placed in them replaces what they held before."""

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self.pieces: list[Tensor] = []  # uint8 [PIECE]

    def place(self, sizes: Sequence[int]) -> list[list[Tensor]]:
        """For each storage of so many bytes, uint8 views of pieces that hold it, in order."""
        for _ in range(piece_count(sum(sizes)) - len(self.pieces)):
            self.pieces.append(torch.empty(PIECE, dtype=torch.uint8, pin_memory=self.pinned))
        return [[self.pieces[piece][start:end] for piece, start, end in storage] for storage in spans(sizes)]
