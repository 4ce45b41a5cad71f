"""Routes a bucket's slices to the segments of each place: which rank writes them, and what crosses between places.

A place is a node. With colocated servers on GPUs, each server and the trainer ranks on its devices are a place: a
server cannot copy from another device into its memory, which torch-memory-saver maps for its own device only.

    a slice that a rank of the place holds:   that rank ------------------------> the place's segment
    a slice that no rank of the place holds:  its source in the plan -- once --> the segment's keeper, a rank there

All servers of a place read the same segments. A server that spans several nodes has ranks in one place per node; a
place has segments for its own server ranks only. Pure functions of numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # servers do not have the trainer's libraries
    from megatron_collab.weight_sync.plan import Bucket, Slice, SyncPlan

Item = tuple[int, "Slice"]  # (target server rank, slice)


@dataclass(frozen=True)
class Places:
    """`count` places of `ranks` trainer ranks and (parts of) `servers` servers each, both numbered place by place.

    `colocated`: the n-th local rank of a place's first server shares its device with the n-th trainer rank. A server
    has `width` ranks on each of `span` nodes; a node has `per_node` places.
    """

    count: int
    ranks: int
    servers: int
    width: int
    colocated: bool = False
    span: int = 1
    per_node: int = 1

    def of_rank(self, rank: int) -> int:
        """The place of a trainer rank."""
        return rank // self.ranks

    def of_server(self, server: int, target: int) -> int:
        """The place of rank `target` of a server."""
        block, offset = divmod(server, self.per_node * self.servers)
        return (block * self.span + target // self.width) * self.per_node + offset // self.servers

    def first_server(self, place: int) -> int:
        """The first of the servers that have ranks in a place."""
        node, offset = divmod(place, self.per_node)
        return (node // self.span * self.per_node + offset) * self.servers

    def has(self, place: int, target: int) -> bool:
        """Whether rank `target` of a place's servers runs in this place."""
        return place // self.per_node % self.span == target // self.width

    def members(self, place: int) -> range:
        """The trainer ranks of a place."""
        return range(place * self.ranks, (place + 1) * self.ranks)

    def keeper(self, place: int, target: int) -> int:
        """The trainer rank that owns the segments of server rank `target` in a place, and receives into them."""
        return place * self.ranks + target % self.width % self.ranks

    def keeps(self, rank: int, target: int) -> bool:
        """Whether a trainer rank owns segments of server rank `target`."""
        place = self.of_rank(rank)
        return self.has(place, target) and self.keeper(place, target) == rank

    def origin(self, place: int, target: int, piece: Slice) -> int:
        """The rank that provides a slice to a place: its keeper, else a local holder in turn, else the source."""
        keeper = self.keeper(place, target)
        if self.colocated and keeper in piece.holders:
            return keeper
        local = _local_holders(piece.holders, self.members(place))
        return local[piece.holders.index(piece.source) % len(local)] if local else piece.source

    def writer(self, place: int, target: int, piece: Slice) -> int:
        """The rank of the place that announces that a slice is written."""
        origin = self.origin(place, target, piece)
        return origin if self.of_rank(origin) == place else self.keeper(place, target)


class Hop(NamedTuple):
    """Bytes [start, stop) of server rank `target`'s bucket, from trainer rank `source` to `keeper` in another place."""

    source: int
    keeper: int
    target: int
    start: int
    stop: int


def written(plan: SyncPlan, places: Places, rank: int) -> list[list[Item]]:
    """The items that a rank writes into the segments of its place, by round."""
    place = places.of_rank(rank)

    def writes(target: int, piece: Slice) -> bool:
        return places.has(place, target) and rank in piece.holders and places.origin(place, target, piece) == rank

    return _items(plan, writes)


def sent(plan: SyncPlan, places: Places, rank: int) -> list[list[Item]]:
    """The items that a rank sends to one or several other places, by round."""
    return _items(plan, lambda target, piece: piece.source == rank and bool(lacking(places, target, piece.holders)))


def _items(plan: SyncPlan, chosen: Callable[[int, Slice], bool]) -> list[list[Item]]:
    return [
        [(target, piece) for target, bucket in enumerate(row) for piece in bucket.slices if chosen(target, piece)]
        for row in plan
    ]


def hops(plan: SyncPlan, places: Places) -> list[list[Hop]]:
    """All transfers between places by round, in the same order on both ends."""
    return [
        [hop for target, bucket in enumerate(buckets) for hop in _crossing(target, bucket, places)] for buckets in plan
    ]


def _crossing(target: int, bucket: Bucket, places: Places) -> Iterator[Hop]:
    """Hops for a bucket; adjacent slices with the same source and keeper form one hop."""
    under_way: dict[int, tuple[int, Hop]] = {}  # place -> (number of its last slice, hop)
    for number, piece in enumerate(bucket.slices):
        for place in lacking(places, target, piece.holders):
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
def _local_holders(holders: range, members: range) -> list[int]:
    return [rank for rank in members if rank in holders]


@cache
def lacking(places: Places, target: int, holders: range) -> tuple[int, ...]:
    """The places whose servers have rank `target` but whose trainer ranks are none of `holders`."""
    readers = (place for place in range(places.count) if places.has(place, target))
    return tuple(place for place in readers if not _local_holders(holders, places.members(place)))
