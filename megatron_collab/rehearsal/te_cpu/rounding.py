"""Conversion to FP8: the scale that maps the largest number to FP8's largest, and rounding.

Numbers are rounded to the nearest, ties to even, and saturate, as on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

_EXPONENT = 0x7F800000  # bits of a float32


def scale_of(largest: Tensor, limit: float, power_of_2: bool, epsilon: float) -> Tensor:
    """Float32 scales that map `largest`, absolute values raised to at least `epsilon`, to `limit`; 1 if undefined.

    With `power_of_2` rounded down to a power of 2.
    """
    floored = largest.clamp(min=epsilon)
    scale = (limit / floored).clamp(max=torch.finfo(torch.float32).max)
    scale = torch.where(floored.isfinite() & (floored > 0), scale, torch.ones_like(scale))
    return scale.view(torch.int32).bitwise_and(_EXPONENT).view(torch.float32) if power_of_2 else scale


def to_fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in FP8, as uint8; values beyond the largest FP8 number saturate."""
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype).view(torch.uint8)
