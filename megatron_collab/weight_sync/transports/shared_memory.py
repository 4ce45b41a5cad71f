"""Transport through memory that the processes of a node share: trainer ranks write, servers read. Both ends are here.

A place (see node_routing.py) has two segments per rank of its servers: one is written while the other is read. All
servers of a place read the same segments. Slices that no rank of the place holds arrive from other places, straight
into the segments. On CPU a segment is an anonymous file, freed with its last user, however that process ends; on CUDA
it is device memory, opened through CUDA IPC.
"""

from __future__ import annotations

import base64
import io
import mmap
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from itertools import chain
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.multiprocessing  # registers CUDA tensors with ForkingPickler
from torch import Tensor

from megatron_collab.runtime.device import synchronize
from megatron_collab.weight_sync.encoding import Sums, largest_round, round_spans
from megatron_collab.weight_sync.node_routing import Hop, Places, hops, lacking, sent
from megatron_collab.weight_sync.store_protocol import Address, Peer, PlaceStore, SyncStore, connect, host
from megatron_collab.weight_sync.transports.base import (
    Allocated,
    ReceiverSetup,
    Transport,
    TransportReceiver,
    TransportSetup,
)
from megatron_collab.weight_sync.transports.p2p import finish

if TYPE_CHECKING:  # servers do not have the trainer's libraries
    from megatron_collab.weight_sync.plan import SyncPlan
    from megatron_collab.weight_sync.sender import Sender

# How another process opens a segment: a path and its size, or a torch pickle and 0.
Handle = tuple[str, int]

_LOOK_SECONDS = 0.5  # interval of checks for abandoned servers


class Segment:
    """Shared `data`, uint8 [size]. Its pages are populated at once, because first writes are slow."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._file: int | None = None
        if device.type == "cpu":
            self._file = os.memfd_create("megatron-collab")
            os.ftruncate(self._file, size)
            self.data = _mapped(self._file, size)
        else:
            self.data = torch.empty(size, dtype=torch.uint8, device=device)

    def handle(self) -> Handle:
        """Handle with which one other process can open the segment; every process needs its own."""
        if self._file is not None:
            return f"/proc/{os.getpid()}/fd/{self._file}", len(self.data)
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(self.data)
        return base64.b64encode(buffer.getvalue()).decode(), 0

    def close(self) -> None:
        """Prevent further opening; the memory is freed with its last user."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def opened(handle: Handle) -> Tensor:
    """The data, uint8 [size], of a segment of another process."""
    text, size = handle
    if not size:
        return ForkingPickler.loads(base64.b64decode(text))
    file = os.open(text, os.O_RDWR | os.O_CLOEXEC)
    try:
        return _mapped(file, size)
    finally:
        os.close(file)


def _mapped(file: int, size: int) -> Tensor:
    memory = mmap.mmap(file, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def segment_sizes(plan: SyncPlan, places: Places, rank: int) -> dict[int, list[int]]:
    """Bytes of the segments that a trainer rank allocates, by target server rank."""
    targets = range(len(plan[0]))
    return {t: [max(buckets[t].size for buckets in plan)] * min(2, len(plan)) for t in targets if places.keeps(rank, t)}


class SharedMemoryReceiver(TransportReceiver):
    """A server rank's side."""

    def __init__(self, setup: ReceiverSetup, *, address: Sequence[Any], handles: Sequence[Handle]) -> None:
        """`address`: of the place's store; `handles`: of its segments."""
        name, port = address
        self._store = connect((name, port), setup.prefix, setup.timeout)
        self._segments = [opened(handle) for handle in handles]
        self._sources, self._server, self._rank = setup.parts, setup.server, setup.rank

    def buckets(self, store: SyncStore, first: int) -> Iterator[Tensor]:
        keys = PlaceStore(self._store, store.number)
        for number, sources in enumerate(self._sources[first:], first):
            keys.wait_written(number, sources)
            yield self._segments[number % 2]
            keys.set_loaded(number, self._server, self._rank)


class SharedMemoryTransport(Transport):
    """The trainer's side, on every rank.

    A server that has not read a bucket setup.idle_timeout seconds after it was written is abandoned. The place's store
    is hosted by its first rank.
    """

    receiver = SharedMemoryReceiver
    needs_same_node = True
    opens_gpu_memory = True

    def __init__(self, setup: TransportSetup) -> None:
        plan, places, prefix, devices = setup.plan, setup.places, setup.prefix, setup.server_devices
        self._places, self._writer, self._timeout = places, setup.writer, setup.idle_timeout
        self._rank = dist.get_rank()
        self._place = places.of_rank(self._rank)
        crossing = sent(plan, places, self._rank)
        sender = setup.make_sender(crossing, lambda target, piece: lacking(places, target, piece.holders))
        self._relay = Relay(sender, hops(plan, places), setup.device, setup.timeout)
        self._host = Host(prefix, setup.limit) if self._rank == places.members(self._place)[0] else None
        self._address: Address = _gathered({self._place: self._host.address} if self._host else {})[self._place]
        self._store = connect(self._address, prefix, setup.limit)
        sizes_by_target = segment_sizes(plan, places, self._rank)
        self._segments = {t: [Segment(size, devices[t]) for size in sizes] for t, sizes in sizes_by_target.items()}
        peers = [rank for rank in places.members(self._place) if rank != self._rank]
        # By rank, the targets whose segments another rank keeps; slices from other places go into kept segments.
        writes = _gathered({self._rank: {t for parts in self._writer.parts for t in parts} - self._segments.keys()})
        offers = _gathered({(t, rank): self._handles(t) for t in self._segments for rank in peers if t in writes[rank]})
        self._buffers = {t: [opened(handle) for handle in offers[t, self._rank]] for t in writes[self._rank]}
        self._buffers |= {t: [segment.data for segment in segments] for t, segments in self._segments.items()}

    @classmethod
    def bytes_held(cls, plan: SyncPlan, places: Places, rank: int) -> Allocated:
        """Two segments for each server rank whose keeper this is, and a round's slices for other places."""
        segments = tuple(chain(*segment_sizes(plan, places, rank).values()))
        return Allocated(segments, (largest_round(round_spans(sent(plan, places, rank))),))

    def addresses(self, store: SyncStore, peers: Sequence[Peer]) -> dict[int, list[dict[str, Any]]]:
        if not peers:
            return {}
        offers = _gathered({(p.server, t): self._offer(t) for t in self._segments for p in self._near(peers, t)})
        return {peer.server: [offers[peer.server, t] for t in range(peer.tp)] for peer in peers}

    def carry(self, store: SyncStore, peers: Sequence[Peer], sums: Sums | None, first: int) -> None:
        """Write buckets `first` and later, each once all `peers` have read the segment's previous bucket.

        For `sums` see Sender.write.
        """
        keys = PlaceStore(self._store, store.number)
        near = [peer for peer in peers if any(self._near([peer], t) for t in range(peer.tp))]
        with self._host.releasing(store, near, len(self._writer.parts)) if self._host else nullcontext():
            for number, parts in enumerate(self._writer.parts[first:], first):
                targets = sorted(parts.keys() | self._relay.receives(number))
                if number >= first + 2:
                    self._wait_read(store, keys, number - 2, peers, targets)
                segments = {t: self._buffers[t][number % 2] for t in targets}
                with self._relay.crossing(number, segments, sums):
                    self._writer.write(number, {t: segments[t][slice(*part)] for t, part in parts.items()}, sums)
                synchronize(*segments.values())  # copies to another device run on this device's stream
                keys.set_written(number, self._rank)
            if self._host:  # ranks may still wait for a server that is abandoned now
                keys.wait_written(len(self._writer.parts) - 1, self._places.members(self._place))

    def clear(self, number: int) -> None:
        """Remove the keys of a publish from the place's store; only its host does so."""
        if self._host:
            self._host.clear(number)

    def close(self) -> None:
        if self._host:
            self._host.close()
        for segment in chain(*self._segments.values()):
            segment.close()
        self._buffers.clear()

    def _near(self, peers: Sequence[Peer], t: int) -> list[Peer]:
        """The servers whose rank `t` is in this place."""
        return [peer for peer in peers if self._places.of_server(peer.server, t) == self._place]

    def _wait_read(
        self, store: SyncStore, keys: PlaceStore, number: int, peers: Sequence[Peer], targets: Sequence[int]
    ) -> None:
        """Wait until ranks `targets` of the local servers have read a bucket; abandon servers that do not in time."""
        keys.wait_written(number, self._places.members(self._place))  # else a server may be waiting for a trainer rank
        late = keys.late(number, [(peer.server, t) for t in targets for peer in self._near(peers, t)], self._timeout)
        for peer in peers:
            if peer.server in late:
                store.abandon(peer.server, range(peer.tp))

    def _offer(self, t: int) -> dict[str, Any]:
        """Arguments of a SharedMemoryReceiver for rank `t` of a server."""
        return {"address": self._address, "handles": self._handles(t)}

    def _handles(self, t: int) -> list[Handle]:
        return [segment.handle() for segment in self._segments[t]]


class Host:
    """The store of a place, on its first rank; other processes of the node connect to `address`."""

    def __init__(self, prefix: str, limit: float) -> None:
        """For `prefix` and `limit` see store_protocol.connect."""
        self.address, store = host(prefix, limit)
        self._store: dist.Store | None = store

    @contextmanager
    def releasing(self, store: SyncStore, peers: Sequence[Peer], buckets: int) -> Iterator[None]:
        """During the block, end the waits for local servers (`peers`) that are abandoned.

        Rank 0, which detects dead servers, does not reach the stores of other nodes.
        """
        finished = threading.Event()
        looks = threading.Thread(target=self._look, args=(finished, store, list(peers), buckets), daemon=True)
        looks.start()
        try:
            yield
        finally:
            finished.set()
            looks.join()

    def _look(self, finished: threading.Event, store: SyncStore, peers: list[Peer], buckets: int) -> None:
        try:
            while not finished.wait(_LOOK_SECONDS):
                for peer in [peer for peer in peers if store.abandoned(peer.server)]:
                    assert self._store is not None
                    peers.remove(peer)
                    PlaceStore(self._store, store.number).release(peer, buckets)
        except dist.DistError:  # the run's store has ended: end this one too, which ends the waits on it
            self.close()

    def clear(self, number: int) -> None:
        """Remove the keys of a publish."""
        if self._store is not None:
            PlaceStore(self._store, number).clear()

    def close(self) -> None:
        self._store = None  # its only reference in this process


class Relay:
    """Sends slices that a place needs but none of its ranks holds, from trainer rank to trainer rank; on every rank.

    Sent slices are packed once into a buffer for all places; received slices go straight to segments. Uses a separate
    process group with one process per device, as NCCL requires; CPUs use gloo. NCCL was never run here.
    """

    def __init__(self, writer: Sender, hops: Sequence[Sequence[Hop]], device: torch.device, timeout: float) -> None:
        """Collective. `writer` writes the slices that this rank sends; `hops`: those of all ranks, by round.

        Raises RuntimeError, also later, if another rank does not answer for `timeout` seconds.
        """
        self._writer, self._device, self._timeout = writer, device, timeout
        self._rank = dist.get_rank()
        self._hops = [
            [(tag, hop) for tag, hop in enumerate(row) if self._rank in (hop.source, hop.keeper)] for row in hops
        ]
        self._buffer = torch.zeros(writer.largest, dtype=torch.uint8, device=device)
        self._group = dist.new_group(timeout=timedelta(seconds=timeout)) if any(hops) else None
        if self._group is not None:
            # NCCL needs all ranks in the first call, but not every rank has a hop in every round.
            dist.barrier(self._group)

    def receives(self, number: int) -> set[int]:
        """The server ranks for whose buckets this rank receives data in a round."""
        return {hop.target for _, hop in self._hops[number] if hop.keeper == self._rank}

    @contextmanager
    def crossing(self, number: int, into: Mapping[int, Tensor], sums: Sums | None) -> Iterator[None]:
        """Run a round during the block; at its end into[t], server rank t's bucket, is received and all sends are done.

        For `sums` see Sender.write.
        """
        local_hops = self._hops[number]
        if not local_hops:
            yield
            return
        parts = self._writer.packed(number, self._buffer)
        self._writer.write(number, parts, sums)
        operations = []
        for tag, hop in local_hops:
            receives = hop.keeper == self._rank
            first = 0 if receives else self._writer.parts[number][hop.target][0]
            data = (into if receives else parts)[hop.target][hop.start - first : hop.stop - first]
            call, peer = (dist.irecv, hop.source) if receives else (dist.isend, hop.keeper)
            operations.append(dist.P2POp(call, data, peer, self._group, tag))
        works = dist.batch_isend_irecv(operations)
        yield
        deadline = time.monotonic() + self._timeout
        try:
            for work in works:
                finish(work, deadline, self._device)
        except RuntimeError as error:
            peers = {end for _, hop in local_hops for end in (hop.source, hop.keeper)} - {self._rank}
            raise RuntimeError(
                f"publishing: trainer rank {self._rank} waits for ranks {sorted(peers)} in round {number}: {error}"
            ) from error


def _gathered(local: Mapping[Any, Any]) -> dict[Any, Any]:
    """The union of all ranks' dictionaries; collective."""
    gathered: list[Mapping[Any, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(gathered, local)
    return {key: value for part in gathered for key, value in part.items()}
