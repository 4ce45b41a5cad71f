"""What a plan of publishing costs on paper: bytes by path, seconds by link."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod

from megatron_collab.config import Config
from megatron_collab.models import hf_to_megatron
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.models.parallel_layout import ranks, servers_per_node
from megatron_collab.weight_sync.node_routing import Nodes, nodes
from megatron_collab.weight_sync.plan import Plan, Slice, uses_memory


class Link(Enum):
    """What bytes pass on their way from one device to another."""

    MEMORY = "the same device"
    NODE = "another device of the node"
    NETWORK = "a device of another node"


class Cut(Enum):
    """Whether a trainer rank holds a parameter as the server rank does."""

    SAME = "same cut"
    OTHER = "cut anew"


@dataclass(frozen=True)
class Cost:
    """Of one publish to all servers.

    `sent`: bytes by trainer rank; `received`: by (server, its rank). `seconds`: all rounds, each as long as the busiest
    link of a device in one direction. `floor`: the bytes of each kind of link over those links of all server ranks
    together, of the kind that takes longest.
    """

    paths: Mapping[tuple[Cut, Link], int]
    sent: Mapping[int, int]
    received: Mapping[tuple[int, int], int]
    seconds: float
    floor: float


def cost(config: Config, shape: ModelShape, found: Plan, bandwidths: Mapping[Link, float]) -> Cost:
    """`bandwidths` in bytes a second, of one device in one direction.

    Colocated servers stand on the trainer's devices in order, others on devices of their own: of the trainer's node
    where that is the only one, else of further nodes. Through memory what several servers of a node take comes to the
    first of them once; the others take it from there.
    """
    servers, tp = range(config.rollout.server.replicas), config.rollout.server.tp
    same, places = _same_cuts(found, shape, config.parallel.tp), nodes(config)
    paths: Counter[tuple[Cut, Link]] = Counter()
    sent: Counter[int] = Counter()
    received: Counter[tuple[int, int]] = Counter()
    seconds = 0.0
    for row in found.rounds:
        busy: Counter[tuple[int, str, Link]] = Counter()
        for target, bucket in enumerate(row):
            cuts = [Cut.SAME if _block(target, piece) in same else Cut.OTHER for piece in bucket.slices]
            for server in servers:
                device = _device(config, server, target)
                sizes: Counter[tuple[int, Cut]] = Counter()
                for piece, cut in zip(bucket.slices, cuts, strict=True):
                    sizes[_source(config, places, server, target, piece), cut] += piece.size
                for (source, cut), size in sizes.items():
                    link = _link(config, source, device)
                    paths[cut, link] += size
                    sent[source] += size
                    received[server, target] += size
                    busy[source, "out", link] += size
                    busy[device, "in", link] += size
        seconds += max(size / bandwidths[link] for (_, _, link), size in busy.items())
    by_link: Counter[Link] = Counter()
    for (_, link), size in paths.items():
        by_link[link] += size
    floor = max(size / (len(servers) * tp * bandwidths[link]) for link, size in by_link.items())
    return Cost(paths, sent, received, seconds, floor)


def _source(config: Config, places: Nodes, server: int, target: int, piece: Slice) -> int:
    """The device that a server's rank has a slice from."""
    node = places.of_server(server)
    first = node * places.servers
    if uses_memory(config) and server != first:
        return _device(config, first, target)
    return places.origin(node, target, piece)


def _device(config: Config, server: int, rank: int) -> int:
    """Devices are counted as trainer ranks are, and on."""
    options = config.rollout.server
    if not options.colocated:
        return ranks(config) + server * options.tp + rank
    node, place = divmod(server, servers_per_node(config))
    return node * config.launch.nproc_per_node + place * options.tp + rank


def _link(config: Config, source: int, device: int) -> Link:
    if source == device:
        return Link.MEMORY
    size = config.launch.nproc_per_node
    near = config.launch.nodes == 1 or source // size == device // size
    return Link.NODE if near else Link.NETWORK


# A parameter of a server rank, of stacked experts one: (server rank, name, first index of an expert).
_Block = tuple[int, str, int]


def _block(target: int, piece: Slice) -> _Block:
    stacked = len(piece.target_index) > len(piece.shard_index)
    return target, piece.target, piece.target_index[0].start if stacked else 0


def _same_cuts(found: Plan, shape: ModelShape, tp: int) -> set[_Block]:
    """Blocks that are one shard: what they take of the shards of its name has the size of one."""
    shards = {entry.megatron: prod(hf_to_megatron.shard_shape(entry, tp)) for entry in hf_to_megatron.table(shape)}
    missing: dict[_Block, int] = {}
    for row in found.rounds:
        for target, bucket in enumerate(row):
            for piece in bucket.slices:
                block = _block(target, piece)
                elements = prod(cut.stop - cut.start for cut in piece.shard_index)
                missing[block] = missing.get(block, shards[piece.shard]) - elements
    return {block for block, elements in missing.items() if elements == 0}
