"""Plans a weight sync: which trainer rank sends which block into which server rank's bucket, and in which round.

Pure functions of numbers:

    what trainer ranks hold (parallel_layout) -+
                                               +--> blocks in common (overlap) -> a source for each -> rounds of buckets
    what server ranks hold (hf_to_sglang) -----+

In round k every server rank receives its k-th bucket. Every trainer rank that holds blocks of a server rank writes an
equal share of them in every round: all stages and ranks work in parallel until the end, and no link waits for another.
Data parallel ranks that hold the same blocks share the writing. node_routing.py decides what the ranks of a node write
themselves where there are several nodes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from operator import itemgetter
from typing import NamedTuple

from megatron_collab.config import Config
from megatron_collab.models import hf_to_sglang
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.models.hf_to_megatron import Index
from megatron_collab.models.hf_to_sglang import ADAPTERS, ServerLayout
from megatron_collab.models.parallel_layout import Holders, TrainerLayout, ranks
from megatron_collab.weight_sync import overlap
from megatron_collab.weight_sync.fp8_blocks import FP8_BLOCK, fp8_nbytes
from megatron_collab.weight_sync.overlap import WeightBlock

# Offsets of slices are multiples of this many bytes, so that any dtype can be viewed in place.
ALIGNMENT = 64
BUCKET_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Slice:
    """target[target_index] of a server rank = shard[shard_index] of trainer rank `source`, through a bucket.

    `shard` is a Megatron parameter under its global name (hf.named_shards), `target` one of SGLang; they are alike
    as those of a Piece. They lie at `offset`, contiguous, in the model's dtype, `size` bytes; `quantised`: as write_fp8
    leaves them. `holders`: all trainer ranks that have the same under the same name; `source` is one of them.
    """

    source: int
    holders: range
    shard: str
    shard_index: Index
    target: str
    target_index: Index
    offset: int
    size: int
    quantised: bool = False


@dataclass(frozen=True)
class Bucket:
    """The `size` bytes that one server rank receives in one round; slices are ordered by source, offsets ascend."""

    slices: tuple[Slice, ...]
    size: int


SyncPlan = Sequence[Sequence[Bucket]]  # [k][t]: the k-th bucket of rank t of every server; empty once it has everything


def trainer_layout(config: Config) -> TrainerLayout:
    """The layout of a run's trainer."""
    parallel = config.parallel
    return TrainerLayout(parallel.tp, parallel.pp, parallel.vpp, parallel.cp, parallel.ep, ranks(config))


def server_layout(config: Config) -> ServerLayout:
    """The layout of each server of a run."""
    server = config.rollout.server
    return ServerLayout(server.tp, server.ep, server.fp8, config.model.lora if config.model.lora.served else None)


def uses_memory(config: Config) -> bool:
    """Whether weights go through memory that servers and trainer ranks of a node share."""
    transport = config.publish.transport
    near = config.launch.nodes == 1 or config.rollout.server.colocated
    return transport == "memory" or (transport == "auto" and near)


def plan_sync(
    shape: ModelShape, trainer: TrainerLayout, server: ServerLayout, item_bytes: int, bucket_bytes: int = BUCKET_BYTES
) -> SyncPlan:
    """A plan that writes every element of every server rank once; `item_bytes`: of the model's dtype.

    Adapters that a server holds beside the model have rounds of their own after it (see `first_round`).
    No bucket is larger than `bucket_bytes`, nor is what one source sends in a round to all server ranks.
    ValueError if a layout cannot hold the model, if it cuts FP8's blocks, or if `bucket_bytes` are too few.
    """
    found = _planned(_queues(shape, trainer, server, item_bytes), server, bucket_bytes)
    if server.lora is not None:
        found += _planned(_queues(shape, trainer, server, item_bytes, adapters=True), server, bucket_bytes)
    return found


def first_round(plan: SyncPlan, server: ServerLayout, new: bool) -> int:
    """The round at which a sync begins: the first, if a server is `new` or holds no adapters; else that of these."""
    if new or server.lora is None:
        return 0
    rows = ([piece.target for bucket in row for piece in bucket.slices] for row in plan)
    return next(number for number, names in enumerate(rows) if names[0].endswith(ADAPTERS))


def _planned(queues: Sequence[_Queue], server: ServerLayout, bucket_bytes: int) -> list[tuple[Bucket, ...]]:
    """The rounds in which `queues` are sent."""
    per_target = Counter(queue.target for queue in queues)
    for queue in queues:  # all writers at once, unless the slack of queues like this came to over a quarter of a bucket
        most = bucket_bytes // (4 * per_target[queue.target] * queue.slack)
        queue.at_once = max(1, min(len(queue.writers), most))
    rounds = _rounds(queues, bucket_bytes)
    shares = [list(_shares(queue, rounds)) for queue in queues]
    turns: Counter[range] = Counter()
    found = []
    for number in range(max(-(-len(own) // queue.at_once) for queue, own in zip(queues, shares, strict=True))):
        received: list[list[tuple[int, _Share]]] = [[] for _ in range(server.tp)]
        for queue, own in zip(queues, shares, strict=True):
            for share in own[number * queue.at_once : (number + 1) * queue.at_once]:
                source = queue.writers[turns[queue.writers] % len(queue.writers)]
                turns[queue.writers] += 1
                received[queue.target].append((source, share))
        found.append(tuple(map(_bucket, received)))
    return found


def layout_fault(shape: ModelShape, trainer: TrainerLayout, server: ServerLayout) -> str | None:
    """Why a server cannot hold the model, or not in FP8 what the trainer sends, in one line; None where it can."""
    try:
        hf_to_sglang.table(shape, server, 0)
        if server.fp8:
            next(overlap.placed(shape, trainer, server))
    except ValueError as error:
        return str(error)
    return None


class _Load(NamedTuple):
    """A block of a layer that is to travel, whole or by rows; `unit`: bytes of the fewest of its rows that can."""

    block: WeightBlock
    layer: int | None
    holders: range
    rows: int
    size: int
    unit: int

    @property
    def step(self) -> int:
        """Rows that must stay together."""
        return FP8_BLOCK if self.block.quantised else 1

    def nbytes(self, start: int, stop: int) -> int:
        """Bytes of the rows from `start`, where it may be cut, to `stop`, where it may be or ends."""
        before = start // self.step * self.unit
        return (self.size if stop == self.rows else stop // self.step * self.unit) - before


_Share = list[tuple[_Load, int, int]]  # first and last row of each load, the last one excluded


@dataclass
class _Queue:
    """What goes to server rank `target` from `writers`, each of which could write it; `at_once` do in a round."""

    target: int
    writers: range
    loads: list[_Load]
    at_once: int = 1

    @cached_property
    def size(self) -> int:
        return sum(_aligned(load.size) for load in self.loads)

    @cached_property
    def slack(self) -> int:
        """What a share may take above its part of the bytes: a row that did not fit before, and paddings."""
        return _aligned(max(load.unit for load in self.loads)) + 3 * ALIGNMENT


def _queues(
    shape: ModelShape, trainer: TrainerLayout, server: ServerLayout, item_bytes: int, adapters: bool = False
) -> list[_Queue]:
    found: dict[tuple[int, range], list[_Load]] = defaultdict(list)
    for stage, layer, block in overlap.placed(shape, trainer, server, adapters):
        rows, *columns = (cut.stop - cut.start for cut in block.shard_index)
        size, unit = (
            fp8_nbytes((count, *columns)) if block.quantised else count * prod(columns) * item_bytes
            for count in (rows, min(rows, FP8_BLOCK) if block.quantised else 1)
        )
        holders = block.holders.ranks(trainer, stage)
        # All that hold a block take turns with it; what every tensor parallel rank holds comes from the part that the
        # target needs anyway.
        part = Holders(block.rank * trainer.tp // server.tp, trainer.tp)
        writers = part.ranks(trainer, stage) if block.holders.step == 1 else holders
        found[block.rank, writers].append(_Load(block, layer, holders, rows, size, unit))
    # What more ranks hold goes last: where a node has just that, the rest still arrives in one piece.
    return [
        _Queue(target, writers, sorted(loads, key=lambda load: len(load.holders)))
        for (target, writers), loads in found.items()
    ]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _rounds(queues: Sequence[_Queue], bucket_bytes: int) -> int:
    """The fewest rounds in which neither a target nor a source has more than `bucket_bytes` at once."""
    sizes: Counter[tuple[str, int]] = Counter()
    slacks: Counter[tuple[str, int]] = Counter()
    alike: dict[range, list[_Queue]] = defaultdict(list)
    for queue in queues:
        sizes["target", queue.target] += queue.size
        slacks["target", queue.target] += queue.at_once * queue.slack
        alike[queue.writers].append(queue)
    for writers, group in alike.items():
        # Shares are dealt out in turn.
        shares = -(-sum(queue.at_once for queue in group) // len(writers))
        for source in writers:
            sizes["source", source] += shares * max(-(-queue.size // queue.at_once) for queue in group)
            slacks["source", source] += shares * max(queue.slack for queue in group)
    if bucket_bytes <= max(slacks.values()):
        raise ValueError(f"a bucket of {bucket_bytes} bytes is too small: single rows take {max(slacks.values())}")
    return max(-(-size // (bucket_bytes - slacks[end])) for end, size in sizes.items())


def _shares(queue: _Queue, rounds: int) -> Iterator[_Share]:
    """A queue in equal shares, for `rounds` rounds; what a share has no room for goes on in the next one."""
    quota = _aligned(-(-queue.size // (rounds * queue.at_once))) + queue.slack - ALIGNMENT
    share: _Share = []
    room = quota
    for load in queue.loads:
        start = 0
        while _aligned(load.nbytes(start, load.rows)) > room:
            stop = start + room // load.unit * load.step
            if stop > start:
                share.append((load, start, stop))
            yield share
            share, room, start = [], quota, stop
        share.append((load, start, load.rows))
        room -= _aligned(load.nbytes(start, load.rows))
    yield share


def _bucket(shares: Sequence[tuple[int, _Share]]) -> Bucket:
    """Shares with their sources, one after another."""
    slices, offset = [], 0
    for source, share in sorted(shares, key=itemgetter(0)):
        for load, start, stop in share:
            block, size = load.block, load.nbytes(start, stop)
            there, here = (
                overlap.with_bounds(index, axis, index[axis].start + start, index[axis].start + stop)
                for index, axis in ((block.shard_index, 0), (block.target_index, block.axis))
            )
            shard, target = block.shard.format(load.layer), block.target.format(load.layer)
            slices.append(Slice(source, load.holders, shard, there, target, here, offset, size, block.quantised))
            offset += _aligned(size)
    return Bucket(tuple(slices), offset)
