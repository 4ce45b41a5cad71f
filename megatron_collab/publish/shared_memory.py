"""Weights on one node: every rank writes its slices into memory that the servers' ranks read; both ends are here.

Each server rank has two segments. One is written while the other is read; all servers read the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_collab.publish.board import Board, Peer
from megatron_collab.publish.segments import Handle, Segment, opened

if TYPE_CHECKING:  # the servers do without the trainer's libraries
    from megatron_collab.publish.plan import Plan
    from megatron_collab.publish.writer import Writer


class Memory:
    """The trainer's end, on every rank."""

    def __init__(self, plan: Plan, writer: Writer, devices: Sequence[torch.device], patience: float) -> None:
        """Collective. `devices[t]`: where rank t of the first server computes.

        A server that has not read a bucket `patience` seconds after it was written is abandoned.
        """
        self._writer, self._patience = writer, patience
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        count = min(2, len(plan.rounds))
        self._own = {
            t: [Segment(max(buckets[t].size for buckets in plan.rounds), device) for _ in range(count)]
            for t, device in enumerate(devices)
            if t % self._ranks == self._rank
        }
        others = [rank for rank in range(self._ranks) if rank != self._rank]
        offers = _gathered({t: {rank: self._handles(t) for rank in others} for t in self._own})
        self._segments = [
            [segment.data for segment in self._own[t]]
            if t in self._own
            else [opened(handle) for handle in offers[t][self._rank]]
            for t in range(len(devices))
        ]

    @property
    def scratch_bytes(self) -> int:
        """What this rank has allocated."""
        return sum(len(segment.data) for segment in chain(*self._own.values()))

    def addresses(self, board: Board, peers: Sequence[Peer]) -> list[list[dict[str, Any]]]:
        """What is told to a Receiver, for each of `peers` and its ranks; collective."""
        if not peers:
            return []
        offers = _gathered({t: [self._handles(t) for _ in peers] for t in self._own})
        return [[{"memory": offers[t][number]} for t in range(len(self._segments))] for number in range(len(peers))]

    def carry(self, board: Board, peers: Sequence[Peer], sums: list[list[int]] | None) -> None:
        """Write all, each segment as soon as all `peers` have read what it held; for `sums` see Writer.write."""
        for number, parts in enumerate(self._writer.parts):
            targets = self._writer.targets(number)
            if number >= 2:
                self._wait_read(board, number - 2, peers, targets)
            into = {t: self._segments[t][number % 2][slice(*parts[t])] for t in targets}
            self._writer.write(number, into, sums)
            if any(data.is_cuda for data in into.values()):
                torch.cuda.synchronize()  # what is copied to another device is ordered by this one's stream
            board.set_written(number, self._rank)

    def drop(self, server: int) -> None:
        """That server failed; it has nothing of ours."""

    def close(self) -> None:
        for segment in chain(*self._own.values()):
            segment.close()
        self._segments.clear()

    def _wait_read(self, board: Board, number: int, peers: Sequence[Peer], targets: Sequence[int]) -> None:
        """Until a bucket has been read by all, but for servers that are abandoned."""
        board.wait_written(number, range(self._ranks))  # until then a server may be held up by one of us
        late = board.late(number, [(peer.server, t) for peer in peers for t in targets], self._patience)
        for peer in peers:
            if peer.server in late:
                board.abandon(peer.server, peer.tp, len(self._writer.parts))

    def _handles(self, t: int) -> list[Handle]:
        return [segment.handle() for segment in self._own[t]]


class SharedBuckets:
    """A server rank's end. `sources[k]`: the ranks that write its k-th bucket."""

    def __init__(self, handles: Sequence[Handle], sources: Sequence[Sequence[int]], server: int, rank: int) -> None:
        self._segments = [opened(handle) for handle in handles]
        self._sources, self._server, self._rank = sources, server, rank

    def each(self, board: Board) -> Iterator[Tensor]:
        """The buckets of a publish, uint8, as they become complete; each may change when the next one is asked for."""
        for number, sources in enumerate(self._sources):
            board.wait_written(number, sources)
            yield self._segments[number % 2]
            board.set_loaded(number, self._server, self._rank)


def _gathered(own: dict[int, Any]) -> dict[int, Any]:
    """What all ranks have, together."""
    found: list[dict[int, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return {t: value for part in found for t, value in part.items()}
