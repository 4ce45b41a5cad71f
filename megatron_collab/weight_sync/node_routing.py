"""Routes a bucket's slices to the segments of each place: which rank writes them, and what crosses between places.

A place is a node. On GPUs each colocated server is one, with the trainer ranks on its devices: no server may copy from
another device into its own memory, which torch-memory-saver maps for its own device alone.

    a slice that a rank of the place holds:   that rank ------------------------> the place's segment
    one that none of them holds:              its source in the plan -- once --> the segment's keeper, a rank there

All servers of a place read the same segments. Pure functions of numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from megatron_collab.config import Config
from megatron_collab.models.parallel_layout import ranks, servers_per_node
from megatron_collab.weight_sync.plan import Bucket, Slice, SyncPlan, uses_memory

Item = tuple[int, Slice]  # with the server rank that it is for


@dataclass(frozen=True)
class Places:
    """`count` places of `ranks` trainer ranks and `servers` servers each, both counted place by place.

    `colocated`: rank t of a place's first server stands on the device of the place's trainer rank t.
    """

    count: int
    ranks: int
    servers: int
    colocated: bool = False

    def of_rank(self, rank: int) -> int:
        """The place of a trainer rank."""
        return rank // self.ranks

    def of_server(self, server: int) -> int:
        """The place of a server."""
        return server // self.servers

    def members(self, place: int) -> range:
        """The trainer ranks of a place."""
        return range(place * self.ranks, (place + 1) * self.ranks)

    def keeper(self, place: int, target: int) -> int:
        """The trainer rank that owns the segments of server rank `target` in a place, and receives into them."""
        return place * self.ranks + target % self.ranks

    def origin(self, place: int, target: int, piece: Slice) -> int:
        """The rank that a place gets a slice from: the keeper, else a holder there in turn, else the slice's source."""
        keeper = self.keeper(place, target)
        if self.colocated and keeper in piece.holders:
            return keeper
        local = _both(piece.holders, self.members(place))
        return local[piece.holders.index(piece.source) % len(local)] if local else piece.source

    def writer(self, place: int, target: int, piece: Slice) -> int:
        """The rank of the place that announces a slice once it is written."""
        origin = self.origin(place, target, piece)
        return origin if self.of_rank(origin) == place else self.keeper(place, target)


class Hop(NamedTuple):
    """Bytes [start, stop) of server rank `target`'s bucket, from trainer rank `source` to `keeper` in another place."""

    source: int
    keeper: int
    target: int
    start: int
    stop: int


def places_of(config: Config, on_gpus: bool) -> Places:
    """The places of a run. Over the network every rank reaches every server, as if all were in one."""
    launch, server = config.launch, config.rollout.server
    if not uses_memory(config):
        return Places(1, ranks(config), server.replicas)
    if on_gpus and server.colocated:
        return Places(server.replicas, ranks(config) // server.replicas, 1, colocated=True)
    return Places(launch.nodes, launch.nproc_per_node, servers_per_node(config), server.colocated)


def written(plan: SyncPlan, places: Places, rank: int) -> list[list[Item]]:
    """By round, what a rank writes into the segments of its place."""
    place = places.of_rank(rank)
    return _items(plan, lambda target, piece: rank in piece.holders and places.origin(place, target, piece) == rank)


def sent(plan: SyncPlan, places: Places, rank: int) -> list[list[Item]]:
    """By round, what a rank sends to other places, to one or to several."""
    return _items(plan, lambda _, piece: piece.source == rank and bool(lacking(places, piece.holders)))


def _items(plan: SyncPlan, chosen: Callable[[int, Slice], bool]) -> list[list[Item]]:
    return [
        [(target, piece) for target, bucket in enumerate(row) for piece in bucket.slices if chosen(target, piece)]
        for row in plan
    ]


def hops(plan: SyncPlan, places: Places) -> list[list[Hop]]:
    """By round, all transfers between places, in the same order on both ends."""
    return [
        [hop for target, bucket in enumerate(buckets) for hop in _crossing(target, bucket, places)] for buckets in plan
    ]


def _crossing(target: int, bucket: Bucket, places: Places) -> Iterator[Hop]:
    """Adjacent slices with the same source and keeper form one hop."""
    under_way: dict[int, tuple[int, Hop]] = {}  # by place, the hop with the number of its last slice
    for number, piece in enumerate(bucket.slices):
        for place in lacking(places, piece.holders):
            stop = piece.offset + piece.size
            before, hop = under_way.get(place, (-1, None))
            if hop is not None and before == number - 1 and hop.source == piece.source:
                under_way[place] = number, hop._replace(stop=stop)
                continue
            if hop is not None:
                yield hop
            under_way[place] = number, Hop(piece.source, places.keeper(place, target), target, piece.offset, stop)
    for _, hop in under_way.values():
        yield hop


@cache
def _both(holders: range, members: range) -> list[int]:
    return [rank for rank in members if rank in holders]


@cache
def lacking(places: Places, holders: range) -> tuple[int, ...]:
    """The places where no rank holds it."""
    return tuple(place for place in range(places.count) if not _both(holders, places.members(place)))
