"""Batch-invariant attention on CPU: a token's result is the same whether it was decoded, prefilled or cached.

SGLang's torch_native backend uses kernels of other shapes for a decoded token than for one of a prompt, which round
differently: what the prefix cache holds would show in the samples. Here every product of a token has the same inner
shape: keys are cut into blocks that begin at fixed positions, a block that a token does not see adds exactly zero, and
rows and columns are padded where few of them would take another path.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron_collab.patches.sglang import MIN_ROWS

BLOCK = 64  # keys that are multiplied at once
_SUM_COLUMNS = 8  # columns that sum the weights; with them a product is never so narrow that it is summed otherwise


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first: torch.Tensor, scale: float
) -> torch.Tensor:
    """Causal attention of B requests: query [B, T, H, D], keys and values [B, N, K, D] give float32 [B, T, H, D].

    Query t of request b stands at position `first`[b] + t and sees the keys up to there; what lies beyond only has
    to be finite. K divides H (grouped queries), BLOCK divides N.
    """
    batch, length, heads, width = query.shape
    groups = keys.shape[2]
    rows = heads // groups * length
    padding = max(MIN_ROWS - rows, 0)
    position = F.pad((first[:, None] + torch.arange(length)).repeat_interleave(heads // groups, 1), (0, padding))
    hidden = torch.arange(keys.shape[1]).view(-1, 1, BLOCK) > position[:, None, :, None]  # [B, N / BLOCK, rows, BLOCK]
    found = []
    for query_K, key_K, value_K in zip(
        query.float().unflatten(2, (groups, -1)).unbind(2),
        keys.float().unflatten(1, (-1, BLOCK)).unbind(3),
        values.float().unflatten(1, (-1, BLOCK)).unbind(3),
        strict=True,
    ):
        rows_K = F.pad(query_K.reshape(batch, 1, rows, width) * scale, (0, 0, 0, padding))
        scores = torch.matmul(rows_K, key_K.transpose(-1, -2)).masked_fill_(hidden, float("-inf"))
        weights = (scores - scores.amax((1, 3), keepdim=True)).exp_()
        parts = torch.matmul(weights, F.pad(value_K, (0, _SUM_COLUMNS), value=1.0)).unbind(1)
        total = parts[0]
        for part in parts[1:]:  # in the order of the positions, so that what is not seen comes last and adds zero
            total = total + part
        found.append((total[:, :rows, :width] / total[:, :rows, width:][..., :1]).view_as(query_K))
    return torch.cat(found, 2)
