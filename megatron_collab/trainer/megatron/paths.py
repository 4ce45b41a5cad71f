"""Attention in packed trees: a branch's queries see the keys of their path, from the root to themselves.

Keys and values of every path are gathered, so that there are fewer queries than keys and the last query sees the last
key: causal from the bottom right. In the backward pass of the gather, shared positions sum the branches' gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


@dataclass(frozen=True)
class Paths:
    """Paths of B branches: `queries` and `keys` int32 [B + 1] are the bounds of the branches and of the concatenated
    paths; `rows` int64 [keys[-1]] are the positions of the latter; `most_*` the largest numbers of any branch."""

    queries: Tensor
    keys: Tensor
    rows: Tensor
    most_queries: int
    most_keys: int


@dataclass
class PackedTrees(PackedSeqParams):
    """Packed trees. Everything but attention sees one sequence of T positions, each with its own rotation."""

    paths: Paths = field(kw_only=True)


def packing(cu_seqlens: np.ndarray, keys: Sequence[np.ndarray], device: torch.device) -> PackedSeqParams:
    """Packing of branches for the model: their bounds `cu_seqlens` int32 [B + 1], the positions `keys` of their paths.

    PackedTrees only if a path is longer than its branch.
    """

    def bounds(sizes: np.ndarray) -> Tensor:
        return torch.from_numpy(np.cumsum([0, *sizes]).astype(np.int32)).to(device)

    lengths, path_lengths = np.diff(cu_seqlens), np.array([len(path) for path in keys])
    longest = int(lengths.max())
    if (lengths == path_lengths).all():
        return PackedSeqParams("thd", bounds(lengths), bounds(lengths), max_seqlen_q=longest, max_seqlen_kv=longest)
    rows = torch.from_numpy(np.concatenate(keys)).to(device)
    paths = Paths(bounds(lengths), bounds(path_lengths), rows, longest, int(path_lengths.max()))
    total, length = bounds(np.array([lengths.sum()])), int(lengths.sum())
    return PackedTrees("thd", total, total, max_seqlen_q=length, max_seqlen_kv=length, paths=paths)


def attend(
    query: Tensor, key: Tensor, value: Tensor, rows: Tensor, attention: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """`attention` of `query` [T, n, d] to the `rows` int64 [K] of `key` and `value` [T, g, d].

    Autograd saves `key` and `value` instead of the gathered tensors, and gathers again in the backward pass.
    """
    gathered = [tensor.index_select(0, rows) for tensor in (key, value)]
    with _gathered_on_demand((key, value), gathered, rows):
        return attention(query, *gathered)


@contextmanager
def _gathered_on_demand(sources: Sequence[Tensor], gathered: Sequence[Tensor], rows: Tensor) -> Iterator[None]:
    """Inside the block autograd saves the `sources` and an index instead of (views of) `gathered`."""
    detached = [source.detach() for source in sources]
    names = {part.untyped_storage().data_ptr(): number for number, part in enumerate(gathered)}
    regathered: dict[int, Tensor] = {}

    def save(tensor: Tensor) -> Tensor | tuple[int, torch.Size, tuple[int, ...], int]:
        number = names.get(tensor.untyped_storage().data_ptr())
        return tensor if number is None else (number, tensor.size(), tensor.stride(), tensor.storage_offset())

    def restore(saved: Tensor | tuple[int, torch.Size, tuple[int, ...], int]) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        number, size, stride, offset = saved
        if number not in regathered:
            regathered[number] = detached[number].index_select(0, rows)
        return regathered[number].as_strided(size, stride, offset)

    def drop(number: int, gradient: Tensor) -> None:
        regathered.pop(number, None)

    for number, part in enumerate(gathered):
        if part.requires_grad:  # once its gradient is computed, it is no longer needed
            part.register_hook(partial(drop, number))
    with saved_tensors_hooks(save, restore):
        yield
