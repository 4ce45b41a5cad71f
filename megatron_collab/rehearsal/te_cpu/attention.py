"""Reference kernels of attention over packed sequences ("thd"): rotary embedding, scaled dot products, gradients.

The gradient is computed from the log of the softmax's denominator, as in FlashAttention (arXiv 2205.14135): with
context parallelism TransformerEngine passes the denominator over all keys with a part of the keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_collab.rehearsal.te_cpu.tensors import is_fake

_BOTTOM_RIGHT = "NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK"
_CAUSAL = ("NVTE_CAUSAL_MASK", "NVTE_PADDING_CAUSAL_MASK", _BOTTOM_RIGHT)
_MASKS = (*_CAUSAL, "NVTE_NO_MASK", "NVTE_PADDING_MASK")


def fused_rope_forward(
    input: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: Any,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """input [t, n, d], each token rotated by its position's angles, `freqs` float32 [s, 1, 1, d]."""
    return _rotate(input, freqs, start_positions, qkv_format, interleaved, cu_seqlens, cp_size, cp_rank, 1)


def fused_rope_backward(
    output_grads: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: Any,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    return _rotate(output_grads, freqs, start_positions, qkv_format, interleaved, cu_seqlens, cp_size, cp_rank, -1)


def _rotate(
    x: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: Any,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
    sign: int,
) -> Tensor:
    if qkv_format.name != "NVTE_THD" or interleaved or start_positions is not None or freqs.shape[-1] != x.shape[-1]:
        raise NotImplementedError(f"fused_rope: {qkv_format.name}, interleaved or partial, has no reference kernel")
    assert cu_seqlens is not None
    angles = freqs[_positions(len(x), cu_seqlens, cp_size, cp_rank)][:, 0]  # [t, 1, d]
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (wide * angles.cos() + sign * turned * angles.sin()).to(x.dtype)


def _positions(tokens: int, cu_seqlens: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """Position int64 [tokens] of every token of this rank within its sequence.

    With context parallelism a rank has two of the 2 * cp_size chunks of a sequence: chunk `cp_rank` counted from the
    front and from the back.
    """
    bounds = cu_seqlens.long() // cp_size
    token = torch.arange(tokens, device=cu_seqlens.device)
    sequence = (torch.searchsorted(bounds, token, right=True) - 1).clamp(max=len(bounds) - 2)
    index, length = token - bounds[sequence], (bounds[1:] - bounds[:-1])[sequence]
    if cp_size == 1:
        return index
    half = length // 2
    behind = index >= half
    return index + torch.where(behind, (2 * cp_size - cp_rank - 2) * half, cp_rank * half)


def get_fused_attn_backend(fused_attn_params: Any) -> tuple[Any, str]:
    """(backend, reason): the 16-bit kernel if `fused_attn_fwd` supports the arguments, else no backend."""
    import transformer_engine_torch as tex

    backends, params = tex.NVTE_Fused_Attn_Backend, fused_attn_params
    if params.qkv_layout.name != "NVTE_THD_THD_THD" or params.attn_mask_type.name not in _MASKS:
        return backends.NVTE_No_Backend, f"no reference kernel for {params.qkv_layout!r}, {params.attn_mask_type!r}"
    return backends.NVTE_F16_arbitrary_seqlen, ""


def fused_attn_fwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    is_training: bool,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: Any,
    o_format: Any,
    qkv_scale_inv_format: Any,
    bias_type: Any,
    attn_mask_type: Any,
    softmax_type: Any,
    window_size: Any,
    bottom_right_diagonal: bool,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    fake_dtype: torch.dtype,
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    page_table_k: Tensor | None,
    page_table_v: Tensor | None,
    s_quantizer: Any,
    o_quantizer: Any,
    Bias: Tensor | None,
    SoftmaxOffset: Tensor | None,
    rng_gen: Any,
    rng_elts_per_thread: int,
    return_max_logit: bool,
    cuda_graph: bool,
) -> list[Tensor]:
    """Q [t, n, d], K and V [t, g, d] -> [output [t, n, d], log of the denominators float32 [t, n, 1], random state]."""
    _refuse(p_dropout, attn_mask_type, window_size, softmax_type, bias_type, return_max_logit)
    out, lse = torch.zeros_like(Q), Q.new_zeros((*Q.shape[:2], 1), dtype=torch.float32)
    if not is_fake(Q):
        for q_rows, kv_rows in _sequences(cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded):
            scores = _scores(Q[q_rows], K[kv_rows], attn_scale, attn_mask_type)
            log_sums = scores.logsumexp(-1)
            values = _per_head(V[kv_rows], Q.shape[1])
            out[q_rows] = torch.einsum("nst,tnd->snd", (scores - log_sums[..., None]).exp(), values).to(Q.dtype)
            lse[q_rows] = log_sums.t()[..., None]
    return [out, lse, torch.zeros(2, dtype=torch.int64, device=Q.device)]


def fused_attn_bwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: Any,
    o_format: Any,
    do_format: Any,
    dqkv_layout: Any,
    qkv_scale_inv_format: Any,
    do_scale_inv_format: Any,
    bias_type: Any,
    attn_mask_type: Any,
    softmax_type: Any,
    window_size: Any,
    bottom_right_diagonal: bool,
    deterministic: bool,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    O: Tensor,  # noqa: E741
    dO: Tensor,
    fake_dtype: torch.dtype,
    Aux_CTX_Tensors: list[Tensor],
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    s_quantizer: Any,
    dp_quantizer: Any,
    dqkv_quantizer: Any,
    cuda_graph: bool,
) -> list[Tensor | None]:
    """[gradient of Q, of K, of V, None for the bias, None for the softmax's offset].

    The first of `Aux_CTX_Tensors` is the second output of the forward kernel.
    """
    _refuse(p_dropout, attn_mask_type, window_size, softmax_type, bias_type)
    dq, dk, dv = (torch.zeros_like(x) for x in (Q, K, V))
    if is_fake(Q):
        return [dq, dk, dv, None, None]
    lse, heads, groups = Aux_CTX_Tensors[0], Q.shape[1], K.shape[1]
    for q_rows, kv_rows in _sequences(cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded):
        weights = (_scores(Q[q_rows], K[kv_rows], attn_scale, attn_mask_type) - lse[q_rows].permute(1, 0, 2)).exp()
        q, o, upstream = (x[q_rows].float() for x in (Q, O, dO.reshape(O.shape)))
        k, v = (_per_head(x[kv_rows], heads) for x in (K, V))
        inner = torch.einsum("snd,tnd->nst", upstream, v) - (upstream * o).sum(-1).t()[..., None]
        scored = weights * inner * attn_scale
        dq[q_rows] = torch.einsum("nst,tnd->snd", scored, k).to(Q.dtype)
        for gradient, pairs, vectors in ((dk, scored, q), (dv, weights, upstream)):
            per_head = torch.einsum("nst,snd->tnd", pairs, vectors)
            gradient[kv_rows] = per_head.unflatten(1, (groups, -1)).sum(2).to(gradient.dtype)
    return [dq, dk, dv, None, None]


def _refuse(dropout: float, mask: Any, window: Any, softmax: Any, bias: Any, return_max_logit: bool = False) -> None:
    if (
        dropout
        or return_max_logit
        or mask.name not in _MASKS
        or tuple(window) not in ((-1, -1), (-1, 0))
        or softmax.name != "NVTE_VANILLA_SOFTMAX"
        or bias.name != "NVTE_NO_BIAS"
    ):
        raise NotImplementedError(
            f"fused_attn: no reference kernel for dropout {dropout}, {mask!r}, window {window}, {softmax!r}, {bias!r}"
        )


def _sequences(
    q: Tensor, kv: Tensor, q_padded: Tensor | None, kv_padded: Tensor | None
) -> Iterator[tuple[slice, slice]]:
    """Rows of queries and keys of each sequence: starts from the padded bounds, lengths from the unpadded ones."""
    bounds = (q.tolist(), kv.tolist(), (q if q_padded is None else q_padded).tolist())
    starts = (kv if kv_padded is None else kv_padded).tolist()
    for number in range(len(starts) - 1):
        queries, keys = (limits[number + 1] - limits[number] for limits in bounds[:2])
        if queries and keys:
            first, key = bounds[2][number], starts[number]
            yield slice(first, first + queries), slice(key, key + keys)


def _per_head(x: Tensor, heads: int) -> Tensor:
    """x [t, g, d] of grouped keys or values (arXiv 2305.13245) -> float32 [t, heads, d]."""
    return x.float().repeat_interleave(heads // x.shape[1], dim=1)


def _scores(q: Tensor, k: Tensor, scale: float, mask: Any) -> Tensor:
    """float32 [n, s, t], -inf for keys hidden by a causal mask: a query sees keys up to its own index.

    With the bottom right mask, both indices are counted from the end.
    """
    scores = torch.einsum("snd,tnd->nst", q.float(), _per_head(k, q.shape[1])) * scale
    if mask.name in _CAUSAL:
        first = 1 + (len(k) - len(q) if mask.name == _BOTTOM_RIGHT else 0)
        scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(first), float("-inf"))
    return scores
