"""Reference kernels of parameters stored in FP8, which a rank quantizes from its part of the masters.

A part has consecutive elements of a parameter [h, w], in row-major order from `start_offset`. It may start and end
within a block, whose scale then depends on the parts of several ranks: they compute the largest absolute values,
exchange them, and round.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_collab.rehearsal.te_cpu.rounding import scale_of, to_fp8
from megatron_collab.rehearsal.te_cpu.tensors import dtype_of, is_fake


def compute_amax(input: Tensor, amax: Tensor) -> None:
    """Set `amax` float32 [1] to the largest absolute value."""
    amax.copy_(input.abs().amax())


def fp8_block_scaling_compute_partial_amax(
    tensor: Tensor, amax: Tensor, h: int, w: int, start_offset: int, block_len: int
) -> None:
    """Set zeroed `amax` float32 [h / block_len, w / block_len, padded] to a part's [n] largest absolute values."""
    if is_fake(tensor):
        return
    rows, columns = _blocks(tensor, w, start_offset, block_len)
    amax.view(-1).scatter_reduce_(0, rows * amax.shape[1] + columns, tensor.abs().float(), "amax")


def fp8_block_scaling_partial_cast(
    inp: Tensor, out: Tensor, scale: Tensor, h: int, w: int, start_offset: int, block_len: int, out_dtype: int
) -> None:
    """Write the part `inp` [n] to `out` uint8 [n] in FP8, with the scales of its blocks."""
    if is_fake(inp):
        return
    rows, columns = _blocks(inp, w, start_offset, block_len)
    out.copy_(to_fp8(inp.float() * scale[rows, columns], dtype_of(out_dtype)))


def _blocks(part: Tensor, width: int, start: int, size: int) -> tuple[Tensor, Tensor]:
    """(row, column) of the block of each element of a part, int64 [n] each."""
    number = torch.arange(start, start + part.numel(), device=part.device)
    return number // width // size, number % width // size


def multi_tensor_compute_scale_and_scale_inv(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    max_fp8: float,
    force_pow_2_scales: bool,
    epsilon: float,
) -> None:
    """Compute the scales (second list) and their inverses (third) from the largest absolute values (first)."""
    for largest, scale, scale_inv in zip(*tensor_lists, strict=True):
        scale.copy_(scale_of(largest, max_fp8, force_pow_2_scales, epsilon))
        scale_inv.copy_(1 / scale)
