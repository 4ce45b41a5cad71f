"""Plans a weight sync: which trainer rank sends which block into which server rank's bucket, and in which round.

Pure functions of numbers:

    what trainer ranks hold (parallel_layout) -+
                                               +--> blocks in common (overlap) -> source per block -> rounds of buckets
    what server ranks hold (hf_to_sglang) -----+

In round k every server rank receives its k-th bucket. Every trainer rank that holds blocks of a server rank writes an
equal share of them in every round: all stages and ranks work in parallel until the end, and no link waits for another.
Data parallel ranks that hold the same blocks share the writing. If there are several nodes, node_routing.py decides
which slices the ranks of a node write themselves.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from operator import itemgetter
from typing import NamedTuple

from megatron_collab.models import hf_to_sglang
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.models.hf_to_megatron import Index
from megatron_collab.models.hf_to_sglang import ADAPTERS, ServerLayout
from megatron_collab.models.parallel_layout import Holders, TrainerLayout
from megatron_collab.settings import PublishConfig
from megatron_collab.weight_sync import overlap
from megatron_collab.weight_sync.fp8_blocks import FP8_BLOCK, fp8_nbytes
from megatron_collab.weight_sync.overlap import WeightBlock

# Offsets of slices are multiples of this many bytes, so that any dtype can be viewed in place.
ALIGNMENT = 64
BUCKET_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Slice:
    """target[target_index] of a server rank = shard[shard_index] of trainer rank `source`, through a bucket.

    `shard` is a Megatron parameter under its global name (hf.named_shards), `target` one of SGLang; both
    blocks have equal shape and order, as in a Piece. In the bucket the slice is contiguous at `offset`, `size` bytes,
    in the model's dtype; `quantized`: in the format of write_fp8. `holders`: all trainer ranks that hold the same
    values under the same name, including `source`.
    """

    source: int
    holders: range
    shard: str
    shard_index: Index
    target: str
    target_index: Index
    offset: int
    size: int
    quantized: bool = False


@dataclass(frozen=True)
class Bucket:
    """The `size` bytes that one server rank receives in one round; slices are ordered by source, offsets ascend."""

    slices: tuple[Slice, ...]
    size: int


SyncPlan = Sequence[Sequence[Bucket]]  # [k][t]: bucket k of rank t of every server; empty once the rank has everything


@dataclass(frozen=True)
class SyncSpec:
    """How weights reach the servers. `pause`: what becomes of requests in flight, abort or retract; `timeout`: seconds
    of a collective."""

    trainer: TrainerLayout
    publish: PublishConfig
    pause: str
    timeout: float

    @property
    def call_timeout(self) -> float:
        """Seconds after which a server without all weights has failed, before the ranks' collectives time out."""
        return self.timeout / 2

    @property
    def idle_timeout(self) -> float:
        """Seconds of them that may be without progress, or a wait for servers; the other ranks wait in a collective."""
        return self.timeout / 4


def plan_sync(
    shape: ModelShape, trainer: TrainerLayout, server: ServerLayout, item_bytes: int, bucket_bytes: int = BUCKET_BYTES
) -> SyncPlan:
    """A plan that writes every element of every server rank once; `item_bytes`: bytes of an element of the model.

    Adapters that a server holds beside the model are sent in separate rounds after it (see `first_round`).
    Neither a bucket nor the data that one source sends in a round to all server ranks exceeds `bucket_bytes`.
    Raises ValueError if a layout cannot hold the model, if it cuts FP8 blocks, or if `bucket_bytes` is too small.
    """
    plan = _planned(_queues(shape, trainer, server, item_bytes), server, bucket_bytes)
    if server.lora is not None:
        plan += _planned(_queues(shape, trainer, server, item_bytes, adapters=True), server, bucket_bytes)
    return plan


def first_round(plan: SyncPlan, server: ServerLayout, new: bool) -> int:
    """The round at which a sync begins: 0 if a server is `new` or none holds adapters, else the adapters' first."""
    if new or server.lora is None:
        return 0
    rows = ([piece.target for bucket in row for piece in bucket.slices] for row in plan)
    return next(number for number, names in enumerate(rows) if names[0].endswith(ADAPTERS))


def _planned(queues: Sequence[_Queue], server: ServerLayout, bucket_bytes: int) -> list[tuple[Bucket, ...]]:
    """Assign the loads of `queues` to rounds and sources."""
    per_target = Counter(queue.target for queue in queues)
    for queue in queues:  # all writers at once, unless that makes the slack of such queues exceed a quarter of a bucket
        most = bucket_bytes // (4 * per_target[queue.target] * queue.slack)
        queue.at_once = max(1, min(len(queue.writers), most))
    rounds = _rounds(queues, bucket_bytes)
    shares = [list(_shares(queue, rounds)) for queue in queues]
    turns: Counter[range] = Counter()
    plan = []
    for number in range(max(-(-len(parts) // queue.at_once) for queue, parts in zip(queues, shares, strict=True))):
        received: list[list[tuple[int, _Share]]] = [[] for _ in range(server.tp)]
        for queue, parts in zip(queues, shares, strict=True):
            for share in parts[number * queue.at_once : (number + 1) * queue.at_once]:
                source = queue.writers[turns[queue.writers] % len(queue.writers)]
                turns[queue.writers] += 1
                received[queue.target].append((source, share))
        plan.append(tuple(map(_bucket, received)))
    return plan


def layout_fault(shape: ModelShape, trainer: TrainerLayout | None, server: ServerLayout) -> str | None:
    """One line that says why a server cannot hold the model (in FP8: as the trainer sends it); None if it can."""
    try:
        hf_to_sglang.table(shape, server, 0)
        if trainer and server.fp8:
            next(overlap.placed(shape, trainer, server))
    except ValueError as error:
        return str(error)
    return None


class _Load(NamedTuple):
    """A block of a layer to send, whole or by rows; `unit`: bytes of `step` rows, the smallest part."""

    block: WeightBlock
    layer: int | None
    holders: range
    rows: int
    size: int
    unit: int

    @property
    def step(self) -> int:
        """Number of rows that must stay together."""
        return FP8_BLOCK if self.block.quantized else 1

    def nbytes(self, start: int, stop: int) -> int:
        """Bytes of rows [start, stop); `start` is a multiple of `step`, `stop` also or the last row."""
        before = start // self.step * self.unit
        return (self.size if stop == self.rows else stop // self.step * self.unit) - before


_Share = list[tuple[_Load, int, int]]  # loads, each with its rows [start, stop)


@dataclass
class _Queue:
    """Loads for server rank `target` that any of `writers` can write; `at_once` of them write in a round."""

    target: int
    writers: range
    loads: list[_Load]
    at_once: int = 1

    @cached_property
    def size(self) -> int:
        return sum(_aligned(load.size) for load in self.loads)

    @cached_property
    def slack(self) -> int:
        """Bytes by which a share may exceed its quota: a row that did not fit the share before, and padding."""
        return _aligned(max(load.unit for load in self.loads)) + 3 * ALIGNMENT


def _queues(
    shape: ModelShape, trainer: TrainerLayout, server: ServerLayout, item_bytes: int, adapters: bool = False
) -> list[_Queue]:
    loads: dict[tuple[int, range], list[_Load]] = defaultdict(list)
    for stage, layer, block in overlap.placed(shape, trainer, server, adapters):
        rows, *columns = (cut.stop - cut.start for cut in block.shard_index)
        size, unit = (
            fp8_nbytes((count, *columns)) if block.quantized else count * prod(columns) * item_bytes
            for count in (rows, min(rows, FP8_BLOCK) if block.quantized else 1)
        )
        holders = block.holders.ranks(trainer, stage)
        # All holders of a block take turns. A block on every tensor parallel rank comes from the ranks that send to
        # this target anyway.
        part = Holders(block.rank * trainer.tp // server.tp, trainer.tp)
        writers = part.ranks(trainer, stage) if block.holders.step == 1 else holders
        loads[block.rank, writers].append(_Load(block, layer, holders, rows, size, unit))
    # Loads with more holders go last: if a node holds only these, the other loads still arrive in one piece.
    return [
        _Queue(target, writers, sorted(queue_loads, key=lambda load: len(load.holders)))
        for (target, writers), queue_loads in loads.items()
    ]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _rounds(queues: Sequence[_Queue], bucket_bytes: int) -> int:
    """The fewest rounds such that neither a target nor a source exceeds `bucket_bytes` in a round."""
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
    """Split a queue into equal shares for `rounds` rounds; rows that do not fit a share go to the next one."""
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
    """The bucket of (source, share) pairs, ordered by source."""
    slices, offset = [], 0
    for source, share in sorted(shares, key=itemgetter(0)):
        for load, start, stop in share:
            block, size = load.block, load.nbytes(start, stop)
            shard_index, target_index = (
                overlap.with_bounds(index, axis, index[axis].start + start, index[axis].start + stop)
                for index, axis in ((block.shard_index, 0), (block.target_index, block.axis))
            )
            shard, target = block.shard.format(load.layer), block.target.format(load.layer)
            slices.append(
                Slice(source, load.holders, shard, shard_index, target, target_index, offset, size, block.quantized)
            )
            offset += _aligned(size)
    return Bucket(tuple(slices), offset)
