"""A number for a block of a parameter that depends on every bit and its place; those of all its blocks add up.

Multilinear hashing (Carter and Wegman, 1979) modulo 2^64: each element, taken as an integer, times an odd weight for
its place in every dimension and for the name. One bit changes the sum by 2^b times an odd number, which is never 0.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

# By node and server rank, the checksums of all that was written for that rank of the node's servers.
Sums = dict[tuple[int, int], list[int]]

MODULUS = 1 << 64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_STEP = 1 << 21  # elements at once, so that their int64 copies stay small


def checksum(block: Tensor, name: str, start: Sequence[int]) -> int:
    """Of parameter `name`'s block that begins at `start` (an index in every dimension); from 0 to MODULUS - 1."""
    total = 0
    step = max(1, _STEP // max(1, block[:1].numel()))
    for row in range(0, len(block), step):
        part = block[row : row + step]
        found = part.contiguous().view(_INTEGERS[block.element_size()]).to(torch.int64)
        for dimension in reversed(range(part.dim())):
            first = start[dimension] + (row if dimension == 0 else 0)
            found = (found * _weights(dimension, first, part.shape[dimension], block.device)).sum(-1)
        total += int(found)
    return total * (2 * zlib.crc32(name.encode()) + 1) % MODULUS


def combined(sums: Sequence[int]) -> int:
    """The sum of several blocks'."""
    return reduce(lambda a, b: (a + b) % MODULUS, sums, 0)


def _weights(dimension: int, start: int, count: int, device: torch.device) -> Tensor:
    """Odd numbers for `count` places from `start`, int64 [count], scattered as by SplitMix64's mixing step."""
    places = torch.arange(start + 1, start + 1 + count, dtype=torch.int64, device=device)
    mixed = (places + (dimension << 40)) * 0x1E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 30)) * 0x3F58476D1CE4E5B9
    return (mixed ^ (mixed >> 27)) | 1
