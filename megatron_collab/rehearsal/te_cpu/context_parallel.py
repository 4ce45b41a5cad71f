"""Reference kernels of context parallelism over packed sequences, whose keys are passed around the ranks.

A sequence is cut into 2 * cp chunks. Rank r has two of them, number r and its mirror image, one after the other: the
"halves" of a sequence on a rank. `cu_seqlens` int32 [b + 1] are the bounds of the sequences on this rank, tensors are
[t, n, d], the logs of softmax denominators float32 [n, t].
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_collab.rehearsal.te_cpu.tensors import wide


def _half(cu_seqlens: Tensor, tokens: int, number: int) -> Tensor:
    """Rows int64 [tokens / 2] of the first (0) or second (1) halves of all sequences."""
    bounds = cu_seqlens.long() // 2
    row = torch.arange(tokens // 2, device=cu_seqlens.device)
    sequence = (torch.searchsorted(bounds, row, right=True) - 1).clamp(max=len(bounds) - 2)
    return row + bounds[sequence + number]


def thd_read_half_tensor(tensor: Tensor, cu_seqlens: Tensor, half_idx: int) -> Tensor:
    """The first or second halves of the sequences of [t, n, d]."""
    return tensor[_half(cu_seqlens, len(tensor), half_idx)]


def thd_second_half_lse_correction(lse: Tensor, lse_per_step: Tensor, cu_seqlens: Tensor, lse_packed: bool) -> None:
    """Add the denominators `lse_per_step` [n, t / 2] to those of the second halves in `lse`."""
    _refuse_unpacked(lse_packed)
    rows = _half(cu_seqlens, lse.shape[1], 1)
    lse[:, rows] = torch.logaddexp(lse[:, rows], lse_per_step)


def thd_read_second_half_lse(lse: Tensor, cu_seqlens: Tensor, lse_packed: bool, second_half_lse_seqlen: int) -> Tensor:
    """The denominators [n, t / 2] of the second halves."""
    _refuse_unpacked(lse_packed)
    return lse[:, _half(cu_seqlens, lse.shape[1], 1)]


def thd_out_correction(
    out: Tensor,
    out_per_step: Tensor,
    old_lse: Tensor,
    lse: Tensor,
    lse_per_step: Tensor,
    cu_seqlens: Tensor,
    only_second_half: bool,
    lse_packed: bool,
) -> None:
    """Merge attention to this step's keys into `out`, that to earlier keys (`old_lse`); `lse` covers both."""
    _refuse_unpacked(lse_packed)
    rows = _half(cu_seqlens, len(out), 1) if only_second_half else torch.arange(len(out), device=out.device)
    before, now = ((part - lse[:, rows]).exp().t()[..., None] for part in (old_lse[:, rows], lse_per_step))
    earlier = out[rows]
    out[rows] = (wide(earlier) * before + wide(out_per_step.view(earlier.shape)) * now).to(out.dtype)


def thd_grad_correction(
    grad: Tensor, grad_per_step: Tensor, cu_seqlens: Tensor, first_half: str, second_half: str
) -> None:
    """Merge `grad_per_step` into `grad`, each half by "add", "copy", "zero" or "none".

    It has the rows of both halves if both are added or copied, else only of that half.
    """
    actions = (first_half, second_half)
    both_halves = all(action in ("add", "copy") for action in actions)
    for number, action in enumerate(actions):
        rows = _half(cu_seqlens, len(grad), number)
        if action == "zero":
            grad[rows] = 0
        elif action in ("add", "copy"):
            part = grad_per_step[rows] if both_halves else grad_per_step
            grad[rows] = grad[rows] + part if action == "add" else part


def _refuse_unpacked(lse_packed: bool) -> None:
    if not lse_packed:
        raise NotImplementedError("context parallelism over unpacked softmax denominators has no reference kernel")
