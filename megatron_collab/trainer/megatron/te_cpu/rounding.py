"""How numbers become FP8: the scale that takes the largest of them to FP8's largest, and rounding.

They are rounded to the nearest, ties to even, and saturate, as on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

_EXPONENT = 0x7F800000  # bits of a float32


def scale_of(largest: Tensor, limit: float, power_of_2: bool, epsilon: float) -> Tensor:
    """The scales float32 that take `largest`, absolute values of at least `epsilon`, to `limit`; 1 where there is none.

    With `power_of_2` the largest of these that is no larger.
    """
    floored = largest.clamp(min=epsilon)
    scale = (limit / floored).clamp(max=torch.finfo(torch.float32).max)
    scale = torch.where(floored.isfinite() & (floored > 0), scale, torch.ones_like(scale))
    return scale.view(torch.int32).bitwise_and(_EXPONENT).view(torch.float32) if power_of_2 else scale


def to_fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8: x in FP8; what is larger than its largest number becomes that."""
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype).view(torch.uint8)
