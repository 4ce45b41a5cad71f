"""Values of a kernel's tensor arguments, which may be quantized or fake; TransformerEngine's dtypes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def is_fake(x: Any) -> bool:
    """Whether x has only a shape: then kernels return results with shape and dtype, and allocate nothing else."""
    return isinstance(x, FakeTensor)


def wide(x: Tensor) -> Tensor:
    """x in float32, in which kernels compute."""
    return x if is_fake(x) else x.float()


def dtype_of(tag: int) -> torch.dtype:
    """The torch dtype of a TransformerEngine DType."""
    from transformer_engine.pytorch.constants import DType, TE_DType_To_Torch

    return TE_DType_To_Torch[DType.cast(tag)]


def value(x: Any, rowwise: bool) -> Tensor:
    """The values of x, dequantized if necessary: float32, in x's shape, from its row-wise or column-wise data.

    Raises RuntimeError if a product needs data that x lacks: a GPU would fail too.
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
    values = data.view(dtype_of(x._fp8_dtype)).float()
    if blocked:
        flat = values.reshape(-1, values.shape[-1]) if rowwise else values.reshape(len(values), -1)
        values = (flat * _spread(scale, flat.shape, x._is_2D_scaled)).view(values.shape)
    else:
        values = values * scale
    return values if rowwise else values.movedim(0, -1)


def _spread(scale: Tensor, shape: torch.Size, squares: bool) -> Tensor:
    """The scale of each element [m, k] from the stored `scale`: [m / 128, k / 128] or [k / 128, m], padded."""
    rows, columns = shape
    by_block = scale.repeat_interleave(128, 0)[:rows] if squares else scale.t()[:rows]
    return by_block.repeat_interleave(128, 1)[:, :columns]
