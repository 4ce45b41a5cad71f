"""Attention in packed trees: a branch's queries see the keys of their own path, from the root to themselves.

For attention the keys and values of every path are gathered, so that queries are fewer than keys and the last query
sees the last key: causal from the bottom right. What branches share gets the sum of their gradients by the gathering.
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
    """Of B branches: `queries` and `keys` int32 [B + 1], bounds of their own positions and of their paths' laid end to
    end, of which `rows` int64 [keys[-1]] says where each is; and the largest number of queries and keys of any."""

    queries: Tensor
    keys: Tensor
    rows: Tensor
    most_queries: int
    most_keys: int


@dataclass
class PackedTrees(PackedSeqParams):
    """Packed trees. To all but attention one sequence of T positions, with a rotation of its own for each."""

    paths: Paths = field(kw_only=True)


def packing(cu_seqlens: np.ndarray, keys: Sequence[np.ndarray], device: torch.device) -> PackedSeqParams:
    """What the model is told of branches: their bounds `cu_seqlens` int32 [B + 1], the positions `keys` of their paths.

    PackedTrees only where a path is longer than its branch.
    """

    def bounds(sizes: np.ndarray) -> Tensor:
        return torch.from_numpy(np.cumsum([0, *sizes]).astype(np.int32)).to(device)

    own, seen = np.diff(cu_seqlens), np.array([len(path) for path in keys])
    longest = int(own.max())
    if (own == seen).all():
        return PackedSeqParams("thd", bounds(own), bounds(own), max_seqlen_q=longest, max_seqlen_kv=longest)
    rows = torch.from_numpy(np.concatenate(keys)).to(device)
    paths = Paths(bounds(own), bounds(seen), rows, longest, int(seen.max()))
    whole, length = bounds(np.array([own.sum()])), int(own.sum())
    return PackedTrees("thd", whole, whole, max_seqlen_q=length, max_seqlen_kv=length, paths=paths)


def attend(
    query: Tensor, key: Tensor, value: Tensor, rows: Tensor, attention: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """`attention` of `query` [T, n, d] to the `rows` int64 [K] of `key` and `value` [T, g, d].

    Autograd keeps `key` and `value` instead of what is gathered from them, which is gathered again when it goes back.
    """
    gathered = [one.index_select(0, rows) for one in (key, value)]
    with _gathered_again((key, value), gathered, rows):
        return attention(query, *gathered)


@contextmanager
def _gathered_again(sources: Sequence[Tensor], gathered: Sequence[Tensor], rows: Tensor) -> Iterator[None]:
    """Within it autograd, told to keep (a view of) `gathered`, keeps the name of it and the `sources`."""
    kept = [source.detach() for source in sources]
    names = {one.untyped_storage().data_ptr(): number for number, one in enumerate(gathered)}
    again: dict[int, Tensor] = {}

    def save(tensor: Tensor) -> Tensor | tuple[int, torch.Size, tuple[int, ...], int]:
        number = names.get(tensor.untyped_storage().data_ptr())
        return tensor if number is None else (number, tensor.size(), tensor.stride(), tensor.storage_offset())

    def restore(saved: Tensor | tuple[int, torch.Size, tuple[int, ...], int]) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        number, size, stride, offset = saved
        if number not in again:
            again[number] = kept[number].index_select(0, rows)
        return again[number].as_strided(size, stride, offset)

    def drop(number: int, gradient: Tensor) -> None:
        again.pop(number, None)

    for number, one in enumerate(gathered):
        if one.requires_grad:  # its gradient is there once nobody needs it any more
            one.register_hook(partial(drop, number))
    with saved_tensors_hooks(save, restore):
        yield
