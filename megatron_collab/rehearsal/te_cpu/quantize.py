"""Reference kernels of FP8: tensors with one scale (delayed or current scaling) or a scale per block of 128.

A quantized tensor has row-wise data, column-wise (transposed) data or both, for the products that read them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_collab.rehearsal.te_cpu.rounding import scale_of, to_fp8
from megatron_collab.rehearsal.te_cpu.tensors import dtype_of, is_fake, value, wide


def create_empty_quantized_tensor(
    quantizer: Any, shape: list[int], dtype: torch.dtype, device: torch.device, pin_memory: bool
) -> Any:
    """An uninitialized quantized tensor of `quantizer`'s type, for values of `shape` and `dtype`."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    buffers = {
        name: torch.empty(size, dtype=kind, device=device) for name, (size, kind) in _buffers(quantizer, shape).items()
    }
    options: dict[str, Any]
    if hasattr(quantizer, "block_len"):
        names = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
        options = {name: buffers.get(f"_{name}") for name in names}
        cls = quantizer.storage_metadata(dtype)["cls"]
        options |= {"fp8_dtype": quantizer.dtype, "quantizer": quantizer}
        options["is_2D_scaled"] = quantizer.block_scaling_dim == 2
    elif hasattr(quantizer, "amax_epsilon") or hasattr(quantizer, "scale"):
        options = {"data": buffers.get("_data"), "data_transpose": buffers.get("_transpose")}
        cls = Float8TensorStorage if quantizer.internal else Float8Tensor
        options |= {"fp8_scale_inv": buffers["_scale_inv"], "fp8_dtype": quantizer.dtype, "quantizer": quantizer}
    else:
        raise NotImplementedError(f"{type(quantizer).__name__}: no reference kernel")
    if quantizer.internal:
        return cls(**options, fake_dtype=dtype)
    return cls(shape=list(shape), dtype=dtype, requires_grad=False, device=device, **options)


def _buffers(quantizer: Any, shape: list[int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Attribute name -> (shape, dtype) of each part of a quantized tensor."""
    if hasattr(quantizer, "block_len"):
        specs = quantizer.inner_tensor_specs(tuple(shape))
        assert isinstance(specs, dict)
        return specs
    specs = {"_scale_inv": ((1,), torch.float32)}
    if quantizer.rowwise_usage:
        specs["_data"] = (tuple(shape), torch.uint8)
    if quantizer.columnwise_usage:
        specs["_transpose"] = ((shape[-1], *shape[:-1]), torch.uint8)
    return specs


def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """Quantize `tensor` to FP8, into `output` if given; if `noop` is 1, nothing is written."""
    if output is None:
        output = create_empty_quantized_tensor(quantizer, list(tensor.shape), tensor.dtype, tensor.device, False)
    else:
        _complete(output, quantizer, list(tensor.shape), tensor.device)
    if is_fake(tensor) or not tensor.numel() or (noop is not None and bool(noop)):
        return output
    x = tensor.detach().float()
    if hasattr(quantizer, "block_len"):
        _fill_blocks(x.reshape(-1, x.shape[-1]), quantizer, output)
        return output
    scale = _scale(x, quantizer)
    data = to_fp8(x * scale, dtype_of(quantizer.dtype))
    if output._data is not None:
        output._data.copy_(data)
    if output._transpose is not None:
        output._transpose.copy_(data.movedim(-1, 0))
        output._transpose_invalid = False
    output._scale_inv.copy_(1 / scale)
    return output


def _complete(output: Any, quantizer: Any, shape: list[int], device: torch.device) -> None:
    """Allocate the parts of `output` that `quantizer` requires now, and drop all others."""
    specs = _buffers(quantizer, shape)
    names = ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")
    for name in names if hasattr(quantizer, "block_len") else ("_data", "_transpose"):
        if name not in specs:
            setattr(output, name, None)
        elif getattr(output, name) is None:
            size, kind = specs[name]
            setattr(output, name, torch.empty(size, dtype=kind, device=device))
    if hasattr(output, "_transpose"):
        output._transpose_invalid = output._transpose is None


def _scale(x: Tensor, quantizer: Any) -> Tensor:
    """The scale of x, a float32 scalar: from the history (delayed scaling) or from x itself (current scaling)."""
    if hasattr(quantizer, "scale") and hasattr(quantizer, "amax"):
        quantizer.amax.copy_(torch.maximum(quantizer.amax, x.abs().amax()))
        return quantizer.scale.reshape(())
    largest = x.abs().amax()
    if quantizer.with_amax_reduction:
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, quantizer.amax_reduction_group)
    return _scale_of(largest, quantizer)


def _scale_of(largest: Tensor, quantizer: Any) -> Tensor:
    limit = torch.finfo(dtype_of(quantizer.dtype)).max
    return scale_of(largest, limit, quantizer.force_pow_2_scales, quantizer.amax_epsilon)


def _fill_blocks(x: Tensor, quantizer: Any, output: Any) -> None:
    for columns, matrix in ((False, x), (True, x.t())):
        data = output._columnwise_data if columns else output._rowwise_data
        if data is None:
            continue
        quantized, scale_inv = _blocks(matrix, quantizer)
        data.copy_(quantized.view(data.shape))
        stored = output._columnwise_scale_inv if columns else output._rowwise_scale_inv
        stored.zero_()
        stored[: len(scale_inv), : scale_inv.shape[1]] = scale_inv


def _blocks(x: Tensor, quantizer: Any) -> tuple[Tensor, Tensor]:
    """x float32 [m, k] -> FP8 as uint8 [m, k], and the inverse scales of its blocks, in storage layout."""
    size, squares = quantizer.block_len, quantizer.block_scaling_dim == 2
    rows, columns = x.shape
    height = size if squares else 1
    tiles = F.pad(x, (0, -columns % size, 0, -rows % height))
    tiles = tiles.view(math.ceil(rows / height), height, math.ceil(columns / size), size)
    scale = _scale_of(tiles.abs().amax((1, 3)), quantizer)
    data = to_fp8(tiles * scale[:, None, :, None], dtype_of(quantizer.dtype))
    data = data.view(tiles.shape[0] * height, -1)[:rows, :columns]
    return data, (1 / scale if squares else 1 / scale.t())


def dequantize(input: Any, otype: int) -> Tensor:
    """Dequantize a tensor with one scale, from its row-wise data."""
    return value(input, rowwise=True).to(dtype_of(otype))


def fp8_transpose(input: Tensor, dtype: int, *, out: Tensor | None) -> Tensor:
    """uint8 [..., k] -> [k, ...]."""
    transposed = input.movedim(-1, 0)
    return transposed.contiguous() if out is None else out.copy_(transposed)


def split_quantize(
    tensor: Tensor, split_sections: list[int], quantizer_list: list[Any], disable_bulk_allocation: bool = False
) -> list[Any]:
    """Quantize consecutive rows of `tensor`, each part with its own quantizer."""
    parts = tensor.split(split_sections)
    return [quantize(part, quantizer) for part, quantizer in zip(parts, quantizer_list, strict=True)]


def bgrad_quantize(input: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    """(the sum over the rows, which is the gradient of a bias, the quantized tensor)."""
    return wide(input).reshape(-1, input.shape[-1]).sum(0).to(input.dtype), quantize(input, quantizer)


def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: Tensor,
    amax_histories: list[Tensor],
    scales: list[Tensor],
    amax_compute_algo: str,
    fp8_dtype: int,
    margin: float,
) -> None:
    """Step of delayed scaling: append the newest values to histories [steps, n], compute scales [n] from them."""
    limit = torch.finfo(dtype_of(fp8_dtype)).max * 2.0**-margin
    newest = amax_reduction_buffer.split([history.shape[1] for history in amax_histories])
    for history, scale, last in zip(amax_histories, scales, newest, strict=True):
        history[0] = last
        history.copy_(history.roll(-1, 0))
        largest = history.amax(0) if amax_compute_algo == "max" else last
        new_scale = (limit / largest).clamp(max=torch.finfo(torch.float32).max)
        scale.copy_(torch.where(largest.isfinite() & (largest > 0), new_scale, scale))
        history[0] = 0
