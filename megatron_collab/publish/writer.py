"""What one trainer rank writes: blocks of its shards, in the server's dtype, where the plan says."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

import torch
from megatron.core.fp8_utils import is_float8tensor
from torch import Tensor

from megatron_collab import watch
from megatron_collab.actor.weights import values
from megatron_collab.publish import fp8
from megatron_collab.publish.checksum import checksum
from megatron_collab.publish.plan import Plan, Slice

Part = tuple[int, int]
Item = tuple[int, Slice]  # with the server rank that it is for


class Writer:
    """This rank's share of a plan; `shards` are its parameters by global name."""

    def __init__(self, plan: Plan, rank: int, shards: Mapping[str, torch.nn.Parameter], dtype: torch.dtype) -> None:
        self._shards, self._dtype = shards, dtype
        # parts[k][t]: [start, stop) of what this rank writes into the k-th bucket of server rank t
        self.parts: list[list[Part]] = [[bucket.part(rank) for bucket in buckets] for buckets in plan.rounds]
        self._copied: list[list[Item]] = []
        self._converted: list[list[Item]] = []
        for buckets in plan.rounds:
            items = [(t, piece) for t, bucket in enumerate(buckets) for piece in bucket.slices if piece.source == rank]
            self._copied.append([item for item in items if not self._converts(item[1])])
            # sorted, so that each shard is taken out of FP8 once
            self._converted.append(sorted((item for item in items if self._converts(item[1])), key=_shard))
        self._copies: dict[int, tuple[list[int], list[Tensor], list[Tensor]]] = {}

    @property
    def bytes(self) -> int:
        """All that it writes in a publish."""
        return sum(stop - start for parts in self.parts for start, stop in parts)

    def targets(self, number: int) -> list[int]:
        """The server ranks that this rank has something for in a round."""
        return [t for t, (start, stop) in enumerate(self.parts[number]) if start < stop]

    def write(self, number: int, parts: Mapping[int, Tensor], sums: list[list[int]] | None = None) -> None:
        """Write round `number`: parts[t] uint8 is this rank's part of server rank t's bucket.

        Where they are asked for, the checksums of what was written for server rank t are added to sums[t].
        """
        watch.beat()
        places, blocks = self._planned(number, parts)
        if places:
            torch._foreach_copy_(places, blocks)
        for name, items in groupby(self._converted[number], key=_shard):
            shard = values(self._shards[name])
            for item in items:
                data, block = self._data(number, item, parts), shard[item[1].shard_index]
                if item[1].quantised:
                    fp8.write(data, block)
                else:
                    data.view(self._dtype).view(block.shape).copy_(block)
        if sums is not None:
            for item in self._copied[number] + self._converted[number]:
                sums[item[0]].append(_sum(self._data(number, item, parts), self._dtype, item[1]))

    def _converts(self, piece: Slice) -> bool:
        """Whether it is in FP8 at one end: not to be copied."""
        return piece.quantised or is_float8tensor(self._shards[piece.shard])

    def _planned(self, number: int, parts: Mapping[int, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Places in `parts` and what is copied there; made once, and anew where memory has moved."""
        items = self._copied[number]
        memory = [*parts.values(), *(self._shards[piece.shard] for _, piece in items)]
        pointers = [tensor.data_ptr() for tensor in memory]
        if number not in self._copies or self._copies[number][0] != pointers:
            blocks = [values(self._shards[piece.shard])[piece.shard_index] for _, piece in items]
            places = [
                self._data(number, item, parts).view(self._dtype).view(block.shape)
                for item, block in zip(items, blocks, strict=True)
            ]
            self._copies[number] = pointers, places, blocks
        return self._copies[number][1:]

    def _data(self, number: int, item: Item, parts: Mapping[int, Tensor]) -> Tensor:
        t, piece = item
        start = piece.offset - self.parts[number][t][0]
        return parts[t][start : start + piece.size]


def _shard(item: Item) -> str:
    return item[1].shard


def _sum(data: Tensor, dtype: torch.dtype, piece: Slice) -> int:
    """The checksum of a slice as it lies in a bucket; the receiver finds the same in the parameter."""
    start = [cut.start for cut in piece.target_index]
    shape = [cut.stop - cut.start for cut in piece.target_index]
    if not piece.quantised:
        return checksum(data.view(dtype).view(shape), piece.target, start)
    elements, scales = fp8.read(data, shape)
    begin = [cut.start for cut in piece.scale_index]
    return checksum(elements, piece.target, start) + checksum(scales, f"{piece.target}_scale_inv", begin)
