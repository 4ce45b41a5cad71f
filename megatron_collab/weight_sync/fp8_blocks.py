"""Sizes of weights in FP8 blocks, without torch: the planner of a weight sync imports this module."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

FP8_BLOCK = 128


def fp8_scales(shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of the scales of a weight [..., n, k]."""
    *leading, n, k = shape
    return (*leading, -(-n // FP8_BLOCK), -(-k // FP8_BLOCK))


def fp8_scales_at(shape: Sequence[int]) -> int:
    """Byte offset of the scales of a weight [..., n, k]: after its elements, at a multiple of 4."""
    return -(-prod(shape) // 4) * 4


def fp8_nbytes(shape: Sequence[int]) -> int:
    """Bytes of a weight [..., n, k] followed by its scales."""
    return fp8_scales_at(shape) + 4 * prod(fp8_scales(shape))
