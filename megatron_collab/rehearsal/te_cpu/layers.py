"""Reference kernels of the layers: RMS norm (arXiv 1910.07467) and matrix products, single or grouped by expert.

Kernels compute in float32 and round once, at the end. Quantized tensors are dequantized first.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_collab.rehearsal.te_cpu.quantize import quantize
from megatron_collab.rehearsal.te_cpu.tensors import dtype_of, value, wide


def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float,
    ln_out: Tensor | None,
    quantizer: Any,
    otype: int,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """[the normalized input [n, h], None, its reciprocal root mean squares float32 [n]]."""
    x = wide(input)
    rsigma = torch.rsqrt(x.square().mean(-1, dtype=torch.float32) + eps)
    normed = (x * rsigma[:, None] * _gain(weight, zero_centered_gamma)).to(dtype_of(otype))
    if quantizer is not None:
        return [quantize(normed, quantizer, ln_out), None, rsigma]
    return [normed if ln_out is None else ln_out.copy_(normed), None, rsigma]


def rmsnorm_bwd(
    dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> list[Tensor]:
    """[gradient of the input, gradient of the weight]."""
    normed, upstream = wide(x) * rsigma[:, None], wide(dz.reshape(x.shape))
    scaled = upstream * _gain(gamma, zero_centered_gamma)
    dx = rsigma[:, None] * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    return [dx.to(x.dtype), (upstream * normed).sum(0).to(gamma.dtype)]


def _gain(weight: Tensor, zero_centered: bool) -> Tensor:
    return wide(weight) + 1 if zero_centered else wide(weight)


def generic_gemm(
    A: Any,
    transA: bool,
    B: Any,
    transB: bool,
    D: Tensor | None,
    quantizer: Any,
    output_dtype: int | None,
    bias: Tensor | None,
    bias_type: int,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> tuple[Any, Tensor | None, None, None]:
    """op(B) op(A), in cuBLAS's order: (product, gradient of the bias, None, None).

    If B is not transposed, the product has its leading dimensions. With `grad` the bias is not added: its gradient is
    the sum over the rows of B. The product is written to D if given, and added to it with `accumulate`.
    """
    if gelu or comm_overlap is not None or extra_output is not None or alpha != 1.0:
        raise NotImplementedError("generic_gemm: fused GELU, overlapped communication, alpha have no reference kernel")
    b, a = value(B, rowwise=not transB), value(A, rowwise=transA)
    leading = () if transB else b.shape[:-1]
    b, a = b.reshape(-1, b.shape[-1]), a.reshape(-1, a.shape[-1])
    product = (b.t() if transB else b) @ (a.t() if transA else a)
    bias_gradient = b.sum(0).to(dtype_of(bias_type)) if bias is not None and grad else None
    if bias is not None and not grad:
        product = product + wide(bias)
    product = product.reshape(*leading, product.shape[-1]) if leading else product
    if D is not None:
        product = product.reshape(D.shape)
        return (D.add_(product) if accumulate else D.copy_(product)), bias_gradient, None, None
    assert output_dtype is not None
    product = product.to(dtype_of(output_dtype))
    return (product if quantizer is None else quantize(product, quantizer)), bias_gradient, None, None


def te_general_grouped_gemm(
    A: list[Any],
    transa: bool,
    B: list[Any],
    transb: bool,
    D: list[Tensor],
    D_type: int,
    m_splits: list[int],
    bias: list[Tensor],
    bias_type: int,
    single_output: bool,
    pre_gelu_out: list[Tensor],
    grad: bool,
    workspace: list[Tensor],
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> list[Tensor]:
    """op(B) op(A) of each pair, written to D, or with `single_output` to consecutive rows of its one tensor.

    Biases, or their gradients, are empty tensors if there are none.
    """
    if any(tensor.numel() for tensor in (*bias, *pre_gelu_out)):
        raise NotImplementedError("te_general_grouped_gemm: fused GELU and biases have no reference kernel")
    outputs = D[0].split(m_splits) if single_output else D
    for a_operand, b_operand, out in zip(A, B, outputs, strict=True):
        b, a = value(b_operand, rowwise=not transb), value(a_operand, rowwise=transa)
        product = (b.t() if transb else b) @ (a.t() if transa else a)
        if accumulate:
            out.add_(product.view(out.shape))
        else:
            out.copy_(product.view(out.shape))
    return bias


def fused_multi_row_padding(
    input: Tensor, output: Tensor, input_row_list: list[int], padded_input_row_list: list[int]
) -> None:
    """Copy consecutive parts of the rows of `input`, each zero-padded at its end, to `output`."""
    parts, places = input.split(input_row_list), output.split(padded_input_row_list)
    for part, place in zip(parts, places, strict=True):
        place.copy_(F.pad(part, (0, 0, 0, len(place) - len(part))))


def fused_multi_row_unpadding(
    input: Tensor, output: Tensor, input_row_list: list[int], unpadded_input_row_list: list[int]
) -> None:
    """Copy the first rows of each part of `input`, concatenated, to `output`."""
    parts, places = input.split(input_row_list), output.split(unpadded_input_row_list)
    for part, place in zip(parts, places, strict=True):
        place.copy_(part[: len(place)])


def get_num_cublas_streams() -> int:
    return 4


def swap_first_dims(tensor: Tensor, *, out: Tensor | None) -> Tensor:
    swapped = tensor.transpose(0, 1).contiguous()
    return swapped if out is None else out.copy_(swapped)
