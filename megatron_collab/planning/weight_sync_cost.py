"""Estimates the cost of a weight sync plan: bytes by path, seconds by bandwidth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod

from megatron_collab.config import Config
from megatron_collab.inference.spec import Placement
from megatron_collab.launch.trainer_specs import sync_spec
from megatron_collab.models import hf_to_megatron, lora
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.weight_sync.plan import Slice, SyncPlan
from megatron_collab.weight_sync.transports.registry import places_of, transport_class

# The part of a server rank's parameter, or of one of its stacked experts, that comes from shards of one name: (server
# rank, name of the parameter, name of the shards, first index of an expert).
_Block = tuple[int, str, str, int]


class Bandwidth(Enum):
    """The kind of link between two devices, which limits a transfer."""

    MEMORY = "the same device"
    NODE = "another device of the node"
    NETWORK = "a device of another node"


class Sharding(Enum):
    """Whether trainer rank and server rank shard a parameter in the same way."""

    SAME = "same shard"
    OTHER = "resharded"


@dataclass(frozen=True)
class SyncCost:
    """Cost of one weight sync to all servers.

    `paths`: bytes by kind; `sent`: bytes by trainer rank; `received`: bytes by (server, rank). `seconds`: sum over the
    rounds, each as long as the busiest link of a device in one direction. `floor`: seconds of the slowest kind of link
    if its bytes are spread evenly over all server ranks.
    """

    paths: Mapping[tuple[Sharding, Bandwidth], int]
    sent: Mapping[int, int]
    received: Mapping[tuple[int, int], int]
    seconds: float
    floor: float


def sync_cost(
    config: Config, placement: Placement, shape: ModelShape, plan: SyncPlan, bandwidths: Mapping[Bandwidth, float]
) -> SyncCost:
    """`placement`: of the policy's servers; `bandwidths`: bytes per second of one device in one direction, for devices
    as described in commands/plan_sync.py.

    With shared memory, slices for several servers of a place are sent once to the first, and the others copy them.
    """
    copies = transport_class(config.publish, placement).needs_same_node
    servers, tp = range(placement.replicas), placement.tp
    same, places = _same_shards(config, plan, shape), places_of(sync_spec(config), placement, on_gpus=True)
    paths: Counter[tuple[Sharding, Bandwidth]] = Counter()
    sent: Counter[int] = Counter()
    received: Counter[tuple[int, int]] = Counter()
    seconds = 0.0
    for row in plan:
        busy: Counter[tuple[int, str, Bandwidth]] = Counter()
        for target, bucket in enumerate(row):
            cuts = [Sharding.SAME if _block(target, piece) in same else Sharding.OTHER for piece in bucket.slices]
            for server in servers:
                device, place = _device(config, placement, server, target), places.of_server(server, target)
                first = places.first_server(place)
                donor = _device(config, placement, first, target) if copies and server != first else None
                sizes: Counter[tuple[int, Sharding]] = Counter()
                for piece, cut in zip(bucket.slices, cuts, strict=True):
                    sizes[places.origin(place, target, piece) if donor is None else donor, cut] += piece.size
                for (source, cut), size in sizes.items():
                    link = _link(config, source, device)
                    paths[cut, link] += size
                    sent[source] += size
                    received[server, target] += size
                    busy[source, "out", link] += size
                    busy[device, "in", link] += size
        seconds += max(size / bandwidths[link] for (_, _, link), size in busy.items())
    by_link: Counter[Bandwidth] = Counter()
    for (_, link), size in paths.items():
        by_link[link] += size
    floor = max(size / (len(servers) * tp * bandwidths[link]) for link, size in by_link.items())
    return SyncCost(paths, sent, received, seconds, floor)


def _device(config: Config, placement: Placement, server: int, rank: int) -> int:
    """Device number: the trainer ranks' devices come first, then those of separate servers."""
    if not placement.colocated:
        return config.launch.ranks + server * placement.tp + rank
    part, local_rank = divmod(rank, placement.ranks_per_node)
    node = placement.nodes_of(server)[part]
    return node * config.launch.nproc_per_node + placement.first_device(server) + local_rank


def _link(config: Config, source: int, device: int) -> Bandwidth:
    if source == device:
        return Bandwidth.MEMORY
    size = config.launch.nproc_per_node
    near = config.launch.nodes == 1 or source // size == device // size
    return Bandwidth.NODE if near else Bandwidth.NETWORK


def _block(target: int, piece: Slice) -> _Block:
    stacked = len(piece.target_index) > len(piece.shard_index)
    return target, piece.target, piece.shard, piece.target_index[0].start if stacked else 0


def _same_shards(config: Config, plan: SyncPlan, shape: ModelShape) -> set[_Block]:
    """Blocks that equal one shard: their elements from shards of that name add up to the size of one."""
    entries = *hf_to_megatron.table(shape), *lora.factor_table(shape, config.model.lora)
    shards = {entry.megatron: prod(hf_to_megatron.shard_shape(entry, config.parallel.tp)) for entry in entries}
    remaining: dict[_Block, int] = {}
    for row in plan:
        for target, bucket in enumerate(row):
            for piece in bucket.slices:
                block, elements = _block(target, piece), prod(cut.stop - cut.start for cut in piece.shard_index)
                remaining[block] = remaining.get(block, shards[piece.shard]) - elements
    return {block for block, elements in remaining.items() if elements == 0}
