"""Routes a bucket's slices to the memory of each node: which rank writes them, and what crosses between nodes.

Pure functions of numbers:

    a slice that a rank of the node holds:   that rank ------------------------> the node's segment
    one that none of them holds:             its source in the plan -- once --> the segment's keeper, a rank of the node

All servers of a node read the same segments. On one node nothing crosses.
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
class Nodes:
    """`count` nodes of `ranks` trainer ranks and `servers` servers each, both counted node by node.

    `colocated`: rank t of a node's first server stands on the device of the node's trainer rank t.
    """

    count: int
    ranks: int
    servers: int
    colocated: bool = False

    def of_rank(self, rank: int) -> int:
        """The node of a trainer rank."""
        return rank // self.ranks

    def of_server(self, server: int) -> int:
        """The node of a server."""
        return server // self.servers

    def members(self, node: int) -> range:
        """The trainer ranks of a node."""
        return range(node * self.ranks, (node + 1) * self.ranks)

    def keeper(self, node: int, target: int) -> int:
        """The trainer rank that owns the segments of server rank `target` on a node, and receives into them."""
        return node * self.ranks + target % self.ranks

    def origin(self, node: int, target: int, piece: Slice) -> int:
        """The rank that a node gets a slice from: the keeper, else a local holder in turn, else the slice's source."""
        keeper = self.keeper(node, target)
        if self.colocated and keeper in piece.holders:
            return keeper
        local = _both(piece.holders, self.members(node))
        return local[piece.holders.index(piece.source) % len(local)] if local else piece.source

    def writer(self, node: int, target: int, piece: Slice) -> int:
        """The rank of the node that announces a slice once it is written."""
        origin = self.origin(node, target, piece)
        return origin if self.of_rank(origin) == node else self.keeper(node, target)


class Hop(NamedTuple):
    """Bytes [start, stop) of server rank `target`'s bucket, from trainer rank `source` to `keeper` on another node."""

    source: int
    keeper: int
    target: int
    start: int
    stop: int


def nodes(config: Config) -> Nodes:
    """The nodes of a run. Over the network every rank reaches every server, as if all were on one node."""
    if not uses_memory(config):
        return Nodes(1, ranks(config), config.rollout.server.replicas)
    launch, server = config.launch, config.rollout.server
    return Nodes(launch.nodes, launch.nproc_per_node, servers_per_node(config), server.colocated)


def written(plan: SyncPlan, nodes: Nodes, rank: int) -> list[list[Item]]:
    """By round, what a rank writes into the segments of its node."""
    node = nodes.of_rank(rank)
    return _items(plan, lambda target, piece: rank in piece.holders and nodes.origin(node, target, piece) == rank)


def sent(plan: SyncPlan, nodes: Nodes, rank: int) -> list[list[Item]]:
    """By round, what a rank sends to other nodes, to one or to several."""
    return _items(plan, lambda _, piece: piece.source == rank and bool(lacking(nodes, piece.holders)))


def _items(plan: SyncPlan, chosen: Callable[[int, Slice], bool]) -> list[list[Item]]:
    return [
        [(target, piece) for target, bucket in enumerate(row) for piece in bucket.slices if chosen(target, piece)]
        for row in plan
    ]


def hops(plan: SyncPlan, nodes: Nodes) -> list[list[Hop]]:
    """By round, all transfers between nodes, in the same order on both ends."""
    return [
        [hop for target, bucket in enumerate(buckets) for hop in _crossing(target, bucket, nodes)] for buckets in plan
    ]


def _crossing(target: int, bucket: Bucket, nodes: Nodes) -> Iterator[Hop]:
    """Adjacent slices with the same source and keeper form one hop."""
    under_way: dict[int, tuple[int, Hop]] = {}  # by node, the hop with the number of its last slice
    for number, piece in enumerate(bucket.slices):
        for node in lacking(nodes, piece.holders):
            stop = piece.offset + piece.size
            before, hop = under_way.get(node, (-1, None))
            if hop is not None and before == number - 1 and hop.source == piece.source:
                under_way[node] = number, hop._replace(stop=stop)
                continue
            if hop is not None:
                yield hop
            under_way[node] = number, Hop(piece.source, nodes.keeper(node, target), target, piece.offset, stop)
    for _, hop in under_way.values():
        yield hop


@cache
def _both(holders: range, members: range) -> list[int]:
    return [rank for rank in members if rank in holders]


@cache
def lacking(nodes: Nodes, holders: range) -> tuple[int, ...]:
    """The nodes where no rank holds it."""
    return tuple(node for node in range(nodes.count) if not _both(holders, nodes.members(node)))
