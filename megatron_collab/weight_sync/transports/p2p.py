"""Transport over the network, point to point: each rank sends its part of a bucket. Both ends are in this module.

Each server has a process group with the trainer's ranks, outside torch's global state: a dead server does not affect
the others. A part is packed once for any number of servers. CPUs use gloo, GPUs NCCL; NCCL was never run here.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_collab.weight_sync.encoding import Sums, largest_round, round_spans
from megatron_collab.weight_sync.node_routing import Places, written
from megatron_collab.weight_sync.store_protocol import Address, Peer, SyncStore, connect
from megatron_collab.weight_sync.transports.base import (
    Allocated,
    ReceiverSetup,
    Transport,
    TransportReceiver,
    TransportSetup,
)

if TYPE_CHECKING:  # servers do not have the trainer's libraries
    from megatron_collab.weight_sync.plan import SyncPlan

logger = logging.getLogger(__name__)

_ON_ERROR = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def _join(address: Address, name: str, rank: int, size: int, device: torch.device, timeout: float) -> dist.ProcessGroup:
    """Join the process group `name`; raises RuntimeError if not all ranks join within `timeout` seconds."""
    store, limit = connect(address, name, timeout), timedelta(seconds=timeout)
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, rank, size, limit)
    options = dist.ProcessGroupNCCL.Options()
    # `finish` has its own deadline and aborts the group: torch's watchdog must not fire before it.
    options._timeout = 10 * limit
    # A dead peer would block a blocking join forever.
    options.config.blocking = 0
    os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] = str(math.ceil(timeout))
    # Read in the constructor: 2 aborts a failed operation; other groups end the process.
    before = os.environ.get(_ON_ERROR)
    os.environ[_ON_ERROR] = "2"
    try:
        return dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        del os.environ[_ON_ERROR]
        os.environ |= {} if before is None else {_ON_ERROR: before}


def finish(work: dist.Work, deadline: float, device: torch.device) -> None:
    """Wait for `work` until `deadline` (monotonic); raises RuntimeError if it fails or times out."""
    if device.type != "cpu":  # NCCL's wait neither blocks nor fails; for gloo, wait() is enough
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError("the other side did not answer")
            time.sleep(1e-4)
    work.wait(timedelta(seconds=_remaining(deadline)))


def _remaining(deadline: float) -> float:
    """Seconds until `deadline`, at least 0.1: work that is already complete must not time out."""
    return max(0.1, deadline - time.monotonic())


class NetworkReceiver(TransportReceiver):
    """A server rank's side. Trainer rank r sends bytes parts[k][r] = [start, stop) of bucket k. One bucket ahead."""

    def __init__(self, setup: ReceiverSetup, *, name: str, ranks: int, tp: int) -> None:
        """Join the trainer's `ranks` as one of `tp`, in the process group `name`.

        Raises RuntimeError after setup.timeout seconds without progress, or if another rank of the server fails.
        """
        self._device, self._timeout, self._parts = setup.device, setup.timeout, setup.parts
        setup.store.set_ready(setup.server, setup.rank, True)
        if not setup.store.all_ready(setup.server, tp, setup.timeout):
            raise RuntimeError("another rank of the server did not join")
        self._group = _join(setup.address, name, ranks + setup.rank, ranks + tp, setup.device, setup.timeout)
        largest = max((stop for sources in self._parts for _, stop in sources.values()), default=0)
        count = min(2, len(self._parts))
        self._buckets = [torch.zeros(largest, dtype=torch.uint8, device=self._device) for _ in range(count)]

    def buckets(self, store: SyncStore, first: int) -> Iterator[Tensor]:
        coming = self._receive(first)
        for number in range(first, len(self._parts)):
            deadline = time.monotonic() + self._timeout
            for work in coming:
                finish(work, deadline, self._device)
            coming = self._receive(number + 1)
            yield self._buckets[number % 2]

    def _receive(self, number: int) -> list[dist.Work]:
        if number == len(self._parts):
            return []
        bucket, parts = self._buckets[number % 2], self._parts[number]
        return [self._group.recv([bucket[slice(*part)]], source, number) for source, part in parts.items()]


class NetworkTransport(Transport):
    """The trainer's side, on every rank.

    A server that does not join or take a bucket for setup.idle_timeout seconds, which is shorter than the servers' own
    timeout, is abandoned: a hung server must not fail the others.
    """

    receiver = NetworkReceiver
    needs_separate_gpus = True

    def __init__(self, setup: TransportSetup) -> None:
        self._writer, self._address, self._prefix = setup.writer, setup.address, setup.prefix
        self._device, self._timeout = setup.device, setup.idle_timeout
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        count, size = min(2, len(self._writer.parts)), self._writer.largest
        self._buffers = [torch.zeros(size, dtype=torch.uint8, device=self._device) for _ in range(count)]
        self._groups: dict[int, dist.ProcessGroup] = {}

    @classmethod
    def bytes_held(cls, plan: SyncPlan, places: Places, rank: int) -> Allocated:
        return Allocated(buffers=(largest_round(round_spans(written(plan, places, rank))),) * min(2, len(plan)))

    def addresses(self, store: SyncStore, peers: Sequence[Peer]) -> dict[int, list[dict[str, Any]]]:
        groups = {p.server: {"name": self._name(store, p), "ranks": self._ranks, "tp": p.tp} for p in peers}
        return {server: [group] * group["tp"] for server, group in groups.items()}

    def carry(self, store: SyncStore, peers: Sequence[Peer], sums: Sums | None, first: int) -> None:
        """Send buckets `first` and later to `peers`, skipping servers that fail; for `sums` see Sender.write."""
        deadline = time.monotonic() + self._timeout
        for peer in peers:
            if peer.new:
                self._meet(store, peer, deadline)
        under_way: dict[int, dict[int, list[dist.Work]]] = {}
        rounds = len(self._writer.parts)
        for number in range(first, rounds + 2):
            if works := under_way.pop(number - 2, {}):
                self._settle(store, peers, number - 2, works)
            if number >= rounds:
                continue
            parts = self._writer.packed(number, self._buffers[number % 2])
            self._writer.write(number, parts, sums)
            sending = under_way[number] = {}
            for peer in [peer for peer in peers if peer.server in self._groups]:
                group = self._groups[peer.server]
                with self._losing(store, peer):
                    sending[peer.server] = [group.send([data], self._ranks + t, number) for t, data in parts.items()]
            store.set_sent(number, self._ranks)

    def drop(self, server: int) -> None:
        """Forget the process group of a server that failed."""
        group = self._groups.pop(server, None)
        if group is not None and self._device.type != "cpu":
            group.abort()  # else pending sends stay on the GPU forever

    def close(self) -> None:
        self._groups.clear()
        self._buffers.clear()

    def _meet(self, store: SyncStore, peer: Peer, deadline: float) -> None:
        """Form a process group with a server, unless it did not join."""
        self.drop(peer.server)
        with self._losing(store, peer):
            if not store.all_ready(peer.server, peer.tp, _remaining(deadline)) or store.abandoned(peer.server):
                raise RuntimeError("it did not join")
            name, size = self._name(store, peer), self._ranks + peer.tp
            self._groups[peer.server] = _join(self._address, name, self._rank, size, self._device, self._timeout)

    def _name(self, store: SyncStore, peer: Peer) -> str:
        return f"{self._prefix}/group/{store.number}/{peer.server}"

    def _settle(
        self, store: SyncStore, peers: Sequence[Peer], number: int, works: Mapping[int, Sequence[dist.Work]]
    ) -> None:
        """Wait until the servers, except lost ones, have received bucket `number`."""
        store.wait_sent(number)  # until then a server may wait for another trainer rank
        deadline = time.monotonic() + self._timeout
        for peer in [peer for peer in peers if peer.server in works and peer.server in self._groups]:
            with self._losing(store, peer):
                if store.abandoned(peer.server):
                    raise RuntimeError("another rank lost the connection")
                for work in works[peer.server]:
                    finish(work, deadline, self._device)

    @contextmanager
    def _losing(self, store: SyncStore, peer: Peer) -> Iterator[None]:
        """Abandon a server if an operation with it fails."""
        try:
            yield
        except RuntimeError as error:
            logger.warning("server %d is abandoned: %s", peer.server, error)
            store.abandon(peer.server, range(peer.tp))
            self.drop(peer.server)
