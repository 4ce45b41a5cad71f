"""Reference kernels of parameters that are kept in FP8, which a rank makes from its part of their masters.

A part has consecutive numbers of a parameter [h, w], counted by rows from `start_offset`. It may begin and end inside
a block, whose scale then follows from the parts of several ranks: they find the largest numbers, exchange them, and
round.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_collab.trainer.megatron.te_cpu.rounding import scale_of, to_fp8
from megatron_collab.trainer.megatron.te_cpu.tensors import dtype_of, is_fake


def compute_amax(input: Tensor, amax: Tensor) -> None:
    """`amax` float32 [1] becomes the largest absolute value."""
    amax.copy_(input.abs().amax())


def fp8_block_scaling_compute_partial_amax(
    tensor: Tensor, amax: Tensor, h: int, w: int, start_offset: int, block_len: int
) -> None:
    """`amax` float32 [h / block_len, w / block_len, padded], zeros, get the largest absolute values of a part [n]."""
    if is_fake(tensor):
        return
    rows, columns = _blocks(tensor, w, start_offset, block_len)
    amax.view(-1).scatter_reduce_(0, rows * amax.shape[1] + columns, tensor.abs().float(), "amax")


def fp8_block_scaling_partial_cast(
    inp: Tensor, out: Tensor, scale: Tensor, h: int, w: int, start_offset: int, block_len: int, out_dtype: int
) -> None:
    """`out` uint8 [n]: the part `inp` [n] in FP8, by the scales of its blocks."""
    if is_fake(inp):
        return
    rows, columns = _blocks(inp, w, start_offset, block_len)
    out.copy_(to_fp8(inp.float() * scale[rows, columns], dtype_of(out_dtype)))


def _blocks(part: Tensor, width: int, start: int, size: int) -> tuple[Tensor, Tensor]:
    """The block of each number of a part: its place by rows, and by columns, int64 [n]."""
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
    """From the largest absolute values, the first list, the scales, the second, and their inverses, the third."""
    for largest, scale, scale_inv in zip(*tensor_lists, strict=True):
        scale.copy_(scale_of(largest, max_fp8, force_pow_2_scales, epsilon))
        scale_inv.copy_(1 / scale)
