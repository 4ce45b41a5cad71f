"""Writes one trainer rank's part of the buckets: blocks of its shards in the server's dtype, as planned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor

from megatron_collab.checkpoint.hf import is_computed, values
from megatron_collab.runtime import device
from megatron_collab.runtime.process import beat
from megatron_collab.weight_sync.encoding import (
    QUANTIZED_AT_ONCE,
    Sums,
    alike,
    checksum,
    largest_round,
    placed,
    round_spans,
    views,
    write_fp8,
)
from megatron_collab.weight_sync.node_routing import Item
from megatron_collab.weight_sync.plan import Slice


class Sender:
    """Writes some slices of each round of a plan; `shards` are this rank's parameters by global name."""

    def __init__(
        self,
        rounds: Sequence[Sequence[Item]],
        receivers: Callable[[int, Slice], Iterable[int]],
        shards: Mapping[str, torch.nn.Parameter],
        dtype: torch.dtype,
        merge: bool = True,
    ) -> None:
        """`receivers`: the places that receive a slice for a server rank from this trainer rank.

        `merge`: send shards that have adapters with these merged in.
        """
        self._receivers, self._shards, self._dtype, self._merge = receivers, shards, dtype, merge
        # parts[k][t]: the bytes [start, stop) of server rank t's k-th bucket that the slices span
        self.parts = round_spans(rounds)
        self._copied = [[item for item in items if not self._converts(item)] for items in rounds]
        # sorted, so that each shard is dequantized or merged once
        self._converted = [sorted(filter(self._converts, items), key=_shard) for items in rounds]
        self._copies: dict[int, tuple[list[int], list[tuple[list[Tensor], list[Tensor]]]]] = {}

    @property
    def largest(self) -> int:
        """Bytes of the largest round."""
        return largest_round(self.parts)

    def packed(self, number: int, buffer: Tensor) -> dict[int, Tensor]:
        """Consecutive views of a buffer for the parts of a round."""
        sizes = [stop - start for start, stop in self.parts[number].values()]
        return dict(zip(self.parts[number], buffer[: sum(sizes)].split(sizes), strict=True))

    def write(self, number: int, parts: Mapping[int, Tensor], sums: Sums | None = None) -> None:
        """Write round `number`: parts[t] uint8 is the part of server rank t's bucket.

        `sums`, if not None: adds the checksum of each slice for the places that receive it.
        """
        beat()
        for places, blocks in self._planned(number, parts):
            torch._foreach_copy_(places, blocks)
        waiting: list[tuple[Tensor, Tensor]] = []  # (buffer, weight still to be quantized into it)
        for name, items in groupby(self._converted[number], key=_shard):
            shard = values(self._shards[name], self._merge)
            for item in items:
                data, block = self._data(number, item, parts), shard[item[1].shard_index]
                if item[1].quantized:
                    waiting.append((data, block))
                else:
                    data.view(self._dtype).view(block.shape).copy_(block)
            if sum(block.numel() for _, block in waiting) >= QUANTIZED_AT_ONCE[device.kind(shard)]:
                write_fp8(waiting)
                waiting.clear()
        write_fp8(waiting)
        if sums is not None:
            for target, piece in self._copied[number] + self._converted[number]:
                shape = [cut.stop - cut.start for cut in piece.target_index]
                contents = views(self._data(number, (target, piece), parts), shape, self._dtype, piece.quantized)
                targets = placed(piece.target, piece.target_index, piece.quantized)
                hashes = [checksum(block, *place) for block, place in zip(contents, targets, strict=True)]
                for receiver in self._receivers(target, piece):
                    sums[receiver, target] = sum(hashes, sums.get((receiver, target), torch.zeros_like(hashes[0])))

    def _converts(self, item: Item) -> bool:
        """Whether a slice needs more than a plain copy: FP8 at one end, or adapters to merge."""
        _, piece = item
        return piece.quantized or is_computed(self._shards[piece.shard], self._merge)

    def _planned(self, number: int, parts: Mapping[int, Tensor]) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Views of `parts` and of the shards to copy into them; cached until an address changes."""
        items = self._copied[number]
        memory = [*parts.values(), *(self._shards[piece.shard] for _, piece in items)]
        pointers = [tensor.data_ptr() for tensor in memory]
        if number not in self._copies or self._copies[number][0] != pointers:
            blocks = [values(self._shards[piece.shard], self._merge)[piece.shard_index] for _, piece in items]
            places = [
                self._data(number, item, parts).view(self._dtype).view(block.shape)
                for item, block in zip(items, blocks, strict=True)
            ]
            self._copies[number] = pointers, alike(places, blocks)
        return self._copies[number][1]

    def _data(self, number: int, item: Item, parts: Mapping[int, Tensor]) -> Tensor:
        t, piece = item
        start = piece.offset - self.parts[number][t][0]
        return parts[t][start : start + piece.size]


def _shard(item: Item) -> str:
    return item[1].shard
