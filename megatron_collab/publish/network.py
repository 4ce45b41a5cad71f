"""Weights to servers on other nodes, point to point: each rank sends its part of a bucket; both ends are here.

Every server has a process group of its own with the trainer's ranks, apart from torch's global state: one that dies
takes no other with it. A part is packed once, whatever the number of servers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_collab.publish.board import Address, Board, Peer, connect

if TYPE_CHECKING:  # the servers do without the trainer's libraries
    from megatron_collab.publish.writer import Writer

logger = logging.getLogger(__name__)

# Trainer rank, and [start, stop) of its bytes in a bucket.
SourcePart = tuple[int, int, int]


def _join(address: Address, name: str, rank: int, size: int, device: torch.device, timeout: float) -> dist.ProcessGroup:
    """Meet the other ranks of the group `name`; RuntimeError where they do not all come within `timeout` seconds."""
    store, limit = connect(address, name, timeout), timedelta(seconds=timeout)
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, rank, size, limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(store, rank, size, options)


class Network:
    """The trainer's end, on every rank."""

    def __init__(self, writer: Writer, address: Address, prefix: str, device: torch.device, timeout: float) -> None:
        self._writer, self._address, self._prefix = writer, address, prefix
        # Less than a server waits for us: one that hangs must not cost the others.
        self._device, self._timeout = device, timeout / 2
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        largest = max(sum(stop - start for start, stop in parts) for parts in writer.parts)
        count = min(2, len(writer.parts))
        self._buffers = [torch.zeros(largest, dtype=torch.uint8, device=device) for _ in range(count)]
        self._groups: dict[int, dist.ProcessGroup] = {}

    @property
    def scratch_bytes(self) -> int:
        """What this rank has allocated."""
        return sum(len(buffer) for buffer in self._buffers)

    def addresses(self, board: Board, peers: Sequence[Peer]) -> list[list[dict[str, Any]]]:
        """What is told to a Receiver, for each of `peers` and its ranks."""
        found = []
        for peer in peers:
            group = {"name": self._name(board, peer), "ranks": self._ranks, "tp": peer.tp}
            found.append([{"network": group} for _ in range(peer.tp)])
        return found

    def carry(self, board: Board, peers: Sequence[Peer], sums: list[list[int]] | None) -> None:
        """Send everything to `peers`, of which one that breaks off gets no more; for `sums` see Writer.write."""
        for peer in peers:
            if peer.new:
                self._meet(board, peer)
        under_way: list[dict[int, list[dist.Work]]] = [{}, {}]
        for number, parts in enumerate(self._writer.parts):
            self._settle(under_way[number % 2])
            ends = list(accumulate(stop - start for start, stop in parts))
            buffer = self._buffers[number % 2]
            into = {t: buffer[ends[t] - parts[t][1] + parts[t][0] : ends[t]] for t in self._writer.targets(number)}
            self._writer.write(number, into, sums)
            under_way[number % 2] = {
                peer.server: self._send(peer.server, into, number) for peer in peers if peer.server in self._groups
            }
        for works in under_way:
            self._settle(works)

    def drop(self, server: int) -> None:
        """That server failed; its group is of no use."""
        self._groups.pop(server, None)

    def close(self) -> None:
        self._groups.clear()
        self._buffers.clear()

    def _meet(self, board: Board, peer: Peer) -> None:
        """Make a group with a server; it has none where it does not come."""
        self.drop(peer.server)
        if not board.all_ready(peer.server, peer.tp):
            return
        name, size = self._name(board, peer), self._ranks + peer.tp
        try:
            group = _join(self._address, name, self._rank, size, self._device, self._timeout)
            self._groups[peer.server] = group
        except RuntimeError as error:
            logger.warning("server %d was not reached: %s", peer.server, error)

    def _name(self, board: Board, peer: Peer) -> str:
        return f"{self._prefix}/{board.number}/group/{peer.server}"

    def _send(self, server: int, parts: Mapping[int, Tensor], number: int) -> list[dist.Work]:
        try:
            return [self._groups[server].send([data], self._ranks + t, number) for t, data in parts.items()]
        except RuntimeError as error:
            self._lose(server, error)
            return []

    def _settle(self, works: Mapping[int, Sequence[dist.Work]]) -> None:
        for server, own in works.items():
            try:
                for work in own:
                    work.wait()
            except RuntimeError as error:
                self._lose(server, error)

    def _lose(self, server: int, error: RuntimeError) -> None:
        logger.warning("server %d broke off: %s", server, error)
        self.drop(server)


class NetworkBuckets:
    """A server rank's end: `parts[k]` make up its k-th bucket; the next one is received while one is used."""

    def __init__(
        self,
        address: Address,
        name: str,
        ranks: int,
        tp: int,
        rank: int,
        parts: Sequence[Sequence[SourcePart]],
        device: torch.device,
        timeout: float,
    ) -> None:
        """Meet the trainer's `ranks`; this is rank `rank` of `tp`."""
        self._group = _join(address, name, ranks + rank, ranks + tp, device, timeout)
        self._parts = parts
        largest = max((stop for own in parts for _, _, stop in own), default=0)
        self._buckets = [torch.zeros(largest, dtype=torch.uint8, device=device) for _ in range(min(2, len(parts)))]

    def each(self, board: Board) -> Iterator[Tensor]:
        """The buckets of a publish, uint8, as they become complete; each may change when the next one is asked for."""
        coming = self._receive(0)
        for number in range(len(self._parts)):
            for work in coming:
                work.wait()
            coming = self._receive(number + 1)
            yield self._buckets[number % 2]

    def _receive(self, number: int) -> list[dist.Work]:
        if number == len(self._parts):
            return []
        bucket = self._buckets[number % 2]
        return [self._group.recv([bucket[start:stop]], source, number) for source, start, stop in self._parts[number]]
