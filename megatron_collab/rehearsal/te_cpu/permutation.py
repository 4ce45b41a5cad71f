"""TransformerEngine's Triton kernels for models with experts, in torch: sort tokens by expert, and back.

Rows are sorted by expert, and within an expert by token. The first e columns of a row map int32 [t, 2 * e + 1] have the
row of every token for every expert, -1 if the token is not routed to it; only the functions here read it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_collab.rehearsal.te_cpu.tensors import wide


def replace_kernels() -> None:
    """Replace the functions of `transformer_engine.pytorch.triton.permutation` by the public functions below."""
    from transformer_engine.pytorch.triton import permutation

    for name, function in globals().items():
        if getattr(function, "__module__", "") == __name__ and name != "replace_kernels" and not name.startswith("_"):
            assert hasattr(permutation, name), name
            setattr(permutation, name, function)


def make_row_id_map(routing_map: Tensor, num_tokens: int, num_experts: int) -> Tensor:
    """The row map of routing_map [t, e], which is true if a token goes to an expert."""
    chosen = routing_map.bool()
    rows = chosen.t().reshape(-1).int().cumsum(0, dtype=torch.int32).view(num_experts, num_tokens).t() - 1
    return F.pad(rows.masked_fill(~chosen, -1), (0, num_experts + 1))


def _rows(row_id_map: Tensor, pad_offsets: Tensor | None, experts: int, out_tokens: int) -> Tensor:
    """int64 [t, e]: rows, shifted by the padding of earlier experts, if any; `out_tokens` for unrouted tokens."""
    rows = row_id_map[:, :experts].long()
    moved = rows if pad_offsets is None else rows + pad_offsets
    return torch.where(rows < 0, out_tokens, moved)


def _token_of_row(rows: Tensor, out_tokens: int) -> Tensor:
    """int64 [out_tokens]: the token of every row; the number of tokens if a row has none."""
    tokens = torch.arange(len(rows), device=rows.device)[:, None].expand_as(rows)
    token_of_row = torch.full((out_tokens + 1,), len(rows), device=rows.device)
    return token_of_row.scatter_(0, rows.reshape(-1), tokens.reshape(-1))[:out_tokens]


def _of_row(values: Tensor, rows: Tensor, out_tokens: int) -> Tensor:
    """`values` [t, e] by row [out_tokens], 0 if a row has no token."""
    row_values = values.new_zeros(out_tokens + 1)
    return row_values.scatter_(0, rows.reshape(-1), values.reshape(-1))[:out_tokens]


def permute_with_mask_map(
    inp: Tensor,
    row_id_map: Tensor,
    probs: Tensor | None,
    scale: Tensor | None,
    pad_offsets: Tensor | None,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
    scale_hidden_dim: int,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(inp [t, h] as rows, `scale` likewise, probs [t, e] of the rows)."""
    rows = _rows(row_id_map, pad_offsets, num_experts, num_out_tokens)
    tokens = _token_of_row(rows, num_out_tokens)
    moved = [None if x is None else F.pad(x, (0, 0, 0, 1))[tokens] for x in (inp, scale)]
    assert moved[0] is not None
    return moved[0], moved[1], None if probs is None else _of_row(probs, rows, num_out_tokens)


def unpermute_with_mask_map(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None,
    permuted_probs: Tensor | None,
    pad_offsets: Tensor | None,
    num_tokens: int,
    num_experts: int,
    hidden_size: int,
) -> tuple[Tensor, Tensor | None]:
    """(for each token the sum of its rows [t, h], each times its probability if given; the rows' probs as [t, e])."""
    rows = _rows(row_id_map, pad_offsets, num_experts, len(inp))
    weighted = wide(inp)
    if merging_probs is not None:
        weighted = weighted * _of_row(wide(merging_probs), rows, len(inp))[:, None]
    out = weighted.new_zeros(num_tokens + 1, inp.shape[1]).index_add_(0, _token_of_row(rows, len(inp)), weighted)
    spread = None if permuted_probs is None else F.pad(permuted_probs, (0, 1))[rows]
    return out[:num_tokens].to(inp.dtype), spread


def unpermute_with_mask_map_bwd_with_merging_probs(
    fwd_output_grad: Tensor,
    row_id_map: Tensor,
    fwd_input: Tensor,
    merging_probs: Tensor,
    pad_offsets: Tensor | None,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
) -> tuple[Tensor, Tensor]:
    """(gradient of the rows, gradient of merging_probs [t, e]) from that of the sums [t, h]."""
    rows = _rows(row_id_map, pad_offsets, num_experts, num_out_tokens)
    upstream = F.pad(wide(fwd_output_grad), (0, 0, 0, 1))[_token_of_row(rows, num_out_tokens)]
    weights = _of_row(wide(merging_probs), rows, num_out_tokens)
    shares = F.pad((upstream * wide(fwd_input)).sum(-1), (0, 1))[rows]
    return (upstream * weights[:, None]).to(fwd_input.dtype), shares.to(merging_probs.dtype)


def make_chunk_sort_map(split_sizes: Tensor, sorted_indices: Tensor, num_tokens: int, num_splits: int) -> Tensor:
    """int32 [t]: the row that every row has once the chunks of `split_sizes` are in the order of `sorted_indices`."""
    sizes, order = split_sizes.long(), sorted_indices.long()
    ends = sizes.cumsum(0)
    begins = torch.zeros_like(ends).scatter_(0, order, sizes[order].cumsum(0) - sizes[order])
    row = torch.arange(num_tokens, device=sizes.device)
    chunk = torch.searchsorted(ends, row, right=True).clamp(max=num_splits - 1)
    return (row - (ends - sizes)[chunk] + begins[chunk]).int()


def sort_chunks_by_map(
    inp: Tensor, row_id_map: Tensor, probs: Tensor | None, num_tokens: int, hidden_size: int, is_forward: bool
) -> tuple[Tensor, Tensor | None]:
    """(inp [t, h], probs [t]) with the chunks in their new order, or back in the old one."""
    rows = row_id_map.long()
    if is_forward:
        rows = torch.empty_like(rows).scatter_(0, rows, torch.arange(num_tokens, device=rows.device))
    return inp[rows], None if probs is None else probs[rows]
