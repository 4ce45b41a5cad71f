"""Encoding of weights in a bucket: FP8 blocks, and checksums that verify the weights of a server.

The FP8 format is that of SGLang's block-fp8 linear layers: a matrix [n, k] becomes float8_e4m3fn of the same shape and
a float32 `scale_inv` per block of 128 x 128 (blocks at the edges may be smaller): w = q * scale_inv,
scale_inv = amax / 448 (DeepSeek-V3, arXiv:2412.19437, section 3.3; 448 is the largest e4m3 number).

Checksums are multilinear hashes (Carter and Wegman, 1979) modulo 2^64: each element, taken as an integer, times an odd
weight for its place in every dimension and for the parameter's name; the checksums of a parameter's blocks add up. One
bit changes the sum by 2^b times an odd number, which is never 0.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_collab.runtime import device
from megatron_collab.weight_sync.fp8_blocks import FP8_BLOCK, fp8_nbytes, fp8_scales, fp8_scales_at

if TYPE_CHECKING:  # servers do not have the trainer's libraries
    from megatron_collab.weight_sync.node_routing import Item

Index = tuple[slice, ...]

FP8_LARGEST = 448.0
# Elements by device type: the float32 copies fit a CPU's cache, and are small compared to a GPU's memory.
QUANTIZED_AT_ONCE = {"cpu": 1 << 18, device.GPU: 1 << 24}

# (place, server rank) -> sum of the checksums of everything written for that rank of the place's servers.
Sums = dict[tuple[int, int], Tensor]

MODULUS = 1 << 64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SUMMED_AT_ONCE = 1 << 21  # elements, so that their int64 copies stay small


def spans(slices: Iterable[tuple[int, int, int]]) -> dict[int, tuple[int, int]]:
    """[start, stop) of all slices of a key; `slices` are (key, offset, size) in bytes of a bucket."""
    bounds: dict[int, tuple[int, int]] = {}
    for key, offset, size in slices:
        start, stop = bounds.get(key, (offset, 0))
        bounds[key] = min(start, offset), max(stop, offset + size)
    return bounds


def round_spans(rounds: Iterable[Iterable[Item]]) -> list[dict[int, tuple[int, int]]]:
    """By round, the bytes [start, stop) of each server rank's bucket that the items span."""
    return [spans((t, piece.offset, piece.size) for t, piece in items) for items in rounds]


def largest_round(rounds: Iterable[Mapping[Any, tuple[int, int]]]) -> int:
    """Bytes of the largest round; a round has the spans [start, stop) that are packed one after the other."""
    return max(sum(stop - start for start, stop in parts.values()) for parts in rounds)


def placed(name: str, index: Index, quantized: bool) -> list[tuple[str, Index]]:
    """Target (parameter, index) of a slice of parameter `name`; in FP8 also of its scales (whole blocks per slice)."""
    if not quantized:
        return [(name, index)]
    *leading, rows, columns = index
    blocks = (slice(cut.start // FP8_BLOCK, -(-cut.stop // FP8_BLOCK)) for cut in (rows, columns))
    return [(name, index), (f"{name}_scale_inv", (*leading, *blocks))]


def views(data: Tensor, shape: Sequence[int], dtype: torch.dtype, quantized: bool) -> tuple[Tensor, ...]:
    """Typed views of a slice stored in the uint8 `data`: the elements and, in FP8, the scales."""
    return read_fp8(data, shape) if quantized else (data.view(dtype).view(shape),)


def quantize(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Floating [..., n, k] as float8_e4m3fn of that shape and float32 scale_inv [..., ceil(n / 128), ceil(k / 128)].

    An element is off by at most 2^-4 of itself (3 bits of mantissa) or 2^-10 of its block's scale_inv (half the
    distance of the smallest e4m3 numbers), whichever is more.
    """
    *leading, n, k = weights.shape
    *_, rows, columns = fp8_scales(weights.shape)
    blocks = torch.nn.functional.pad(weights.float(), (0, columns * FP8_BLOCK - k, 0, rows * FP8_BLOCK - n))
    blocks = blocks.view(*leading, rows, FP8_BLOCK, columns, FP8_BLOCK)
    largest = blocks.abs().amax(dim=(-3, -1))
    # By a tensor: on GPUs torch multiplies by the reciprocal of a number, which rounds twice, unlike a CPU.
    scale_inv = largest / torch.full_like(largest, FP8_LARGEST)
    scale_inv = scale_inv.clamp(min=torch.finfo(torch.float32).tiny)  # of a block of zeros: it is a divisor
    quantized = (blocks / scale_inv[..., :, None, :, None]).to(torch.float8_e4m3fn)
    return quantized.view(*leading, rows * FP8_BLOCK, columns * FP8_BLOCK)[..., :n, :k], scale_inv


def write_fp8(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Quantize weights into buffers: pairs of uint8 [fp8_nbytes], aligned to 4 bytes, and a weight [n, k].

    A buffer holds the elements, then the scales. Small weights of the same shape are quantized together: a GPU
    launches a dozen kernels per lot, and a model may have ten thousand expert matrices.
    """
    by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
    for data, weight in pairs:
        by_shape.setdefault(weight.shape, []).append((data, weight))
    for (n, k), same in by_shape.items():
        at_once = QUANTIZED_AT_ONCE[device.kind(same[0][0])]
        count, step = max(1, at_once // (n * k)), max(1, at_once // (FP8_BLOCK * k)) * FP8_BLOCK
        for first, row in product(range(0, len(same), count), range(0, n, step)):
            lot = same[first : first + count]
            parts = [weight[row : row + step] for _, weight in lot]
            quantized, scales = quantize(parts[0][None] if len(parts) == 1 else torch.stack(parts))
            targets = [read_fp8(data, (n, k)) for data, _ in lot]
            down = slice(row // FP8_BLOCK, row // FP8_BLOCK + scales.shape[1])
            # Copied as bytes: torch copies a list of FP8 tensors one by one.
            rows = [elements[row : row + step].view(torch.uint8) for elements, _ in targets]
            torch._foreach_copy_(rows, list(quantized.view(torch.uint8)))
            torch._foreach_copy_([scale_inv[down] for _, scale_inv in targets], list(scales))


def read_fp8(data: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Views of the output of `write_fp8` in `data`: float8_e4m3fn [..., n, k] and float32 scale_inv."""
    elements, start = prod(shape), fp8_scales_at(shape)
    quantized = data[:elements].view(torch.float8_e4m3fn).view(*shape)
    return quantized, data[start : fp8_nbytes(shape)].view(torch.float32).view(fp8_scales(shape))


def alike(places: Sequence[Tensor], slices: Sequence[Tensor]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Copies from `slices` to `places`, grouped so that a GPU needs a few launches per group.

    torch._foreach_copy_ launches a kernel per pair if a tensor of its list has another dtype or is not dense.
    """
    groups: dict[tuple[object, ...], tuple[list[Tensor], list[Tensor]]] = {}
    for place, piece in zip(places, slices, strict=True):
        dense = place.is_contiguous() and piece.is_contiguous()
        into, out_of = groups.setdefault((place.dtype, piece.dtype, dense), ([], []))
        into.append(place)
        out_of.append(piece)
    return list(groups.values())


def checksum(block: Tensor, name: str, index: Index) -> Tensor:
    """Checksum of the block at `index` of parameter `name`: int64 [] modulo MODULUS on its device; checksums add up."""
    total = torch.zeros((), dtype=torch.int64, device=block.device)
    step = max(1, _SUMMED_AT_ONCE // max(1, block[:1].numel()))
    for row in range(0, len(block), step):
        part = block[row : row + step]
        products = part.contiguous().view(_INTEGERS[block.element_size()]).to(torch.int64)
        for dimension in reversed(range(part.dim())):
            first = index[dimension].start + (row if dimension == 0 else 0)
            products = (products * _weights(dimension, first, part.shape[dimension], block.device)).sum(-1)
        total += products
    return total * (2 * zlib.crc32(name.encode()) + 1)


def read(sums: Iterable[Tensor | int]) -> int:
    """The sum of checksums, from 0 to MODULUS - 1; synchronizes with the GPU once for all of them."""
    return int(sum(sums)) % MODULUS


def _weights(dimension: int, start: int, count: int, device: torch.device) -> Tensor:
    """Odd numbers for `count` places from `start`, int64 [count], scattered by SplitMix64's mixing step."""
    places = torch.arange(start + 1, start + 1 + count, dtype=torch.int64, device=device)
    mixed = (places + (dimension << 40)) * 0x1E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 30)) * 0x3F58476D1CE4E5B9
    return (mixed ^ (mixed >> 27)) | 1
