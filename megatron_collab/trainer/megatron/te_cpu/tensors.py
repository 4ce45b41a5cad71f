"""What a tensor stands for that a kernel is given: of TransformerEngine's dtypes, perhaps quantised, perhaps fake."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def is_fake(x: Any) -> bool:
    """Whether x has a shape only: then kernels give the shapes and dtypes of their results, and allocate no more."""
    return isinstance(x, FakeTensor)


def wide(x: Tensor) -> Tensor:
    """x in float32, in which kernels compute."""
    return x if is_fake(x) else x.float()


def dtype_of(tag: int) -> torch.dtype:
    """torch's dtype for one of TransformerEngine's DType."""
    from transformer_engine.pytorch.constants import DType, TE_DType_To_Torch

    return TE_DType_To_Torch[DType.cast(tag)]


def value(x: Any, rowwise: bool) -> Tensor:
    """What x, which may be quantised, stands for: float32, in x's own shape, from its rows or its columns.

    RuntimeError where a product asks for numbers that x does not have: a GPU would fail there too.
    """
    if not hasattr(x, "_fp8_dtype"):
        return wide(x)
    blocked = hasattr(x, "_is_2D_scaled")
    if blocked:
        data, scale = (
            (x._rowwise_data, x._rowwise_scale_inv) if rowwise else (x._columnwise_data, x._columnwise_scale_inv)
        )
    else:
        data, scale = (x._data if rowwise else None if x._transpose_invalid else x._transpose), x._scale_inv
    if data is None:
        raise RuntimeError(f"a product reads the {'rows' if rowwise else 'columns'} of an FP8 tensor that lacks them")
    if is_fake(data):
        return data.new_empty(tuple(x.size()), dtype=x._dtype)
    found = data.view(dtype_of(x._fp8_dtype)).float()
    if blocked:
        flat = found.reshape(-1, found.shape[-1]) if rowwise else found.reshape(len(found), -1)
        found = (flat * _spread(scale, flat.shape, x._is_2D_scaled)).view(found.shape)
    else:
        found = found * scale
    return found if rowwise else found.movedim(0, -1)


def _spread(scale: Tensor, shape: torch.Size, squares: bool) -> Tensor:
    """The scale of each number [m, k] from `scale` as it is stored: [m / 128, k / 128] or [k / 128, m], padded."""
    rows, columns = shape
    by_block = scale.repeat_interleave(128, 0)[:rows] if squares else scale.t()[:rows]
    return by_block.repeat_interleave(128, 1)[:, :columns]
