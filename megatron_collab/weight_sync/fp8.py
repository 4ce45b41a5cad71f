"""Weights in blocks of FP8, as SGLang's block-fp8 linear layers hold them.

A matrix [n, k] becomes float8_e4m3fn of the same shape and a float32 `scale_inv` for each block of 128 x 128, the last
ones cut at the edges: w = q * scale_inv, scale_inv = amax / 448 (DeepSeek-V3, arXiv:2412.19437, section 3.3; 448 is the
largest e4m3 number).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

BLOCK = 128
LARGEST = 448.0
_STEP = 1 << 24  # elements quantised at once, so that their float32 copies stay small


def scales(shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of the scales of a weight [..., n, k]."""
    *leading, n, k = shape
    return (*leading, -(-n // BLOCK), -(-k // BLOCK))


def nbytes(shape: Sequence[int]) -> int:
    """Bytes of a weight [..., n, k] and of its scales, one after the other."""
    return _scales_at(shape) + 4 * prod(scales(shape))


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A floating [n, k] as float8_e4m3fn [n, k] and float32 scale_inv [ceil(n / 128), ceil(k / 128)].

    An element is off by at most 2^-4 of itself (3 bits of mantissa) or 2^-10 of its block's scale_inv (half the
    distance of the smallest e4m3 numbers), whichever is more.
    """
    n, k = weight.shape
    rows, columns = scales(weight.shape)
    blocks = torch.nn.functional.pad(weight.float(), (0, columns * BLOCK - k, 0, rows * BLOCK - n))
    blocks = blocks.view(rows, BLOCK, columns, BLOCK)
    # A block of zeros needs a scale that can be divided by.
    scale_inv = (blocks.abs().amax(dim=(1, 3)) / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    quantised = (blocks / scale_inv[:, None, :, None]).to(torch.float8_e4m3fn)
    return quantised.view(rows * BLOCK, columns * BLOCK)[:n, :k], scale_inv


def dequantise(quantised: Tensor, scale_inv: Tensor) -> Tensor:
    """What `quantise` stands for, in float32 [n, k]."""
    n, k = quantised.shape
    spread = scale_inv.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
    return quantised.float() * spread


def write(data: Tensor, weight: Tensor) -> None:
    """Quantise `weight` [n, k] into the uint8 `data` of `nbytes` bytes: the float8 elements, then the scales.

    `data` must lie at a multiple of 4 bytes.
    """
    n, k = weight.shape
    quantised, scale_inv = read(data, weight.shape)
    step = max(1, _STEP // (BLOCK * k)) * BLOCK
    for row in range(0, n, step):
        part, own = quantise(weight[row : row + step])
        quantised[row : row + step].copy_(part)
        scale_inv[row // BLOCK : row // BLOCK + len(own)].copy_(own)


def read(data: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Views of what `write` left in `data`: float8_e4m3fn [..., n, k] and float32 scale_inv."""
    elements, start = prod(shape), _scales_at(shape)
    quantised = data[:elements].view(torch.float8_e4m3fn).view(*shape)
    return quantised, data[start : nbytes(shape)].view(torch.float32).view(scales(shape))


def _scales_at(shape: Sequence[int]) -> int:
    return -(-prod(shape) // 4) * 4
