"""Batch-invariant attention on CPU: a token's result is the same whether it was decoded, prefilled or cached.

SGLang's torch_native backend uses kernels of different shapes for decoded tokens and prompt tokens. They round
differently, so the samples would depend on the contents of the prefix cache. Here every product of a token has the same
inner shape: keys are cut into blocks at fixed positions, a block that a token does not see adds exactly zero, and rows
and columns are padded if so few would take another code path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from megatron_collab.patches.sglang import MIN_ROWS

BLOCK = 64  # keys per product
QUERIES = 256  # of a call, with padding: bounds the memory of the scores
_SUM_COLUMNS = 8  # columns that sum the weights; they also keep products wide enough for the same summation order


class PromptPiece(NamedTuple):
    """Successive tokens of a prompt that one call reads; `request`: its place in the batch."""

    request: int
    position: int  # of the first token
    length: int


def calls_of(prefixes: Sequence[int], lengths: Sequence[int]) -> Iterator[list[PromptPiece]]:
    """The tokens to read, `lengths` after `prefixes` by request, as pieces for each call of `attend`, in order.

    A call pads its pieces to the longest. Many short ones in one call cost about as much as one.
    """
    pieces = list[PromptPiece]()
    for request, (prefix, length) in enumerate(zip(prefixes, lengths, strict=True)):
        for start in range(0, length, QUERIES):
            piece = PromptPiece(request, prefix + start, min(length - start, QUERIES))
            longest = max(other.length for other in [*pieces, piece])
            if longest * (len(pieces) + 1) > QUERIES:
                yield pieces
                pieces = []
            pieces.append(piece)
    if pieces:
        yield pieces


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first: torch.Tensor, scale: float
) -> torch.Tensor:
    """Causal attention of B requests: query [B, T, H, D], keys and values [B, N, K, D] to float32 [B, T, H, D].

    Query t of request b is at position `first`[b] + t and sees the keys up to that position; later keys only have to be
    finite. K divides H (grouped queries), BLOCK divides N.
    """
    batch, length, heads, width = query.shape
    groups = keys.shape[2]
    rows = heads // groups * length
    padding = max(MIN_ROWS - rows, 0)
    position = F.pad((first[:, None] + torch.arange(length)).repeat_interleave(heads // groups, 1), (0, padding))
    hidden = torch.arange(keys.shape[1]).view(-1, 1, BLOCK) > position[:, None, :, None]  # [B, N / BLOCK, rows, BLOCK]
    outputs = []
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
        for part in parts[1:]:  # in the order of positions: unseen blocks come last and add zero
            total = total + part
        outputs.append((total[:, :rows, :width] / total[:, :rows, width:][..., :1]).view_as(query_K))
    return torch.cat(outputs, 2)
