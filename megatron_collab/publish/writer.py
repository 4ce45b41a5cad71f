"""What one trainer rank writes: blocks of its shards, in the server's dtype, where the plan says."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

import torch
from torch import Tensor

from megatron_collab.actor.weights import values
from megatron_collab.publish import fp8
from megatron_collab.publish.checksum import checksum
from megatron_collab.publish.plan import Plan, Slice

Part = tuple[int, int]


class Writer:
    """This rank's share of a plan; `shards` are its parameters by global name."""

    def __init__(self, plan: Plan, rank: int, shards: Mapping[str, torch.nn.Parameter], dtype: torch.dtype) -> None:
        self._shards, self._dtype = shards, dtype
        # parts[k][t]: [start, stop) of what this rank writes into the k-th bucket of server rank t
        self.parts: list[list[Part]] = [[bucket.part(rank) for bucket in buckets] for buckets in plan.rounds]
        self._rounds = [
            sorted(
                ((t, piece) for t, bucket in enumerate(buckets) for piece in bucket.slices if piece.source == rank),
                key=lambda item: item[1].shard,  # so that a shard kept in FP8 is converted once
            )
            for buckets in plan.rounds
        ]

    def targets(self, number: int) -> list[int]:
        """The server ranks that this rank has something for in a round."""
        return [t for t, (start, stop) in enumerate(self.parts[number]) if start < stop]

    def write(self, number: int, parts: Mapping[int, Tensor], sums: list[list[int]] | None = None) -> None:
        """Write round `number`: parts[t] uint8 is this rank's part of server rank t's bucket.

        Where they are asked for, the checksums of what was written for server rank t are added to sums[t].
        """
        for shard, items in groupby(self._rounds[number], lambda item: item[1].shard):
            source = values(self._shards[shard])
            for t, piece in items:
                start = piece.offset - self.parts[number][t][0]
                data = parts[t][start : start + piece.size]
                block = source[piece.shard_index]
                if piece.quantised:
                    fp8.write(data, block)
                else:
                    data.view(self._dtype).view(block.shape).copy_(block)
                if sums is not None:
                    sums[t].append(slice_sum(data, self._dtype, piece))


def slice_sum(data: Tensor, dtype: torch.dtype, piece: Slice) -> int:
    """The checksum of a slice as it lies in a bucket; the receiver finds the same in the parameter."""
    start = [cut.start for cut in piece.target_index]
    shape = [cut.stop - cut.start for cut in piece.target_index]
    if not piece.quantised:
        return checksum(data.view(dtype).view(shape), piece.target, start)
    elements, scales = fp8.read(data, shape)
    begin = [cut.start for cut in piece.scale_index]
    return checksum(elements, piece.target, start) + checksum(scales, f"{piece.target}_scale_inv", begin)
