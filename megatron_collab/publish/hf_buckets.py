"""Who writes which block of the weights where: a pure function of the table and the trainer's layout.

The server is given the Hugging Face tensors one after another in buckets of bytes. Every rank writes its own
blocks straight to their places, so that no rank ever holds a tensor it does not train.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import prod

from megatron_collab.publish import hf_map
from megatron_collab.publish.hf_map import Index, ModelShape, Place, Shape

# Offsets of tensors are multiples of this many bytes, so that any dtype can be viewed in place.
ALIGNMENT = 64


@dataclass(frozen=True)
class Placement:
    """A whole Hugging Face tensor in a bucket: its bytes start at `offset`."""

    name: str
    shape: Shape
    offset: int


@dataclass(frozen=True)
class Bucket:
    """What travels at once; `size` in bytes."""

    tensors: tuple[Placement, ...]
    size: int


@dataclass(frozen=True)
class Write:
    """tensor `target` of the bucket [target_index] = Megatron shard `source` [source_index]."""

    target: str
    target_index: Index
    source: str
    source_index: Index


def buckets(shape: ModelShape, item_bytes: int, bucket_bytes: int) -> tuple[Bucket, ...]:
    """All tensors in the order of the table, in buckets of at most `bucket_bytes`; a larger tensor stands alone."""
    found: list[Bucket] = []
    tensors: list[Placement] = []
    size = 0
    for name, dimensions in hf_map.hf_shapes(shape).items():
        tensor_bytes = prod(dimensions) * item_bytes
        if tensors and size + tensor_bytes > bucket_bytes:
            found.append(Bucket(tuple(tensors), size))
            tensors, size = [], 0
        tensors.append(Placement(name, dimensions, size))
        size += -(-tensor_bytes // ALIGNMENT) * ALIGNMENT
    return (*found, Bucket(tuple(tensors), size))


def writes(
    layout: tuple[Bucket, ...], shape: ModelShape, held: Collection[str], place: Place
) -> tuple[tuple[Write, ...], ...]:
    """What the rank at `place` writes, a tuple a bucket.

    `held` are the Megatron parameters it has, under their global names. Ranks that hold the same ones take
    turns. Over all ranks every element of every tensor is written once.
    """
    bucket_of = {tensor.name: number for number, bucket in enumerate(layout) for tensor in bucket.tensors}
    found: list[list[Write]] = [[] for _ in layout]
    for number, entry in enumerate(hf_map.table(shape)):
        if entry.megatron in held and place.writes(entry, turn=number):
            for piece in hf_map.pieces(entry, shape, place.tp, place.tp_rank):
                write = Write(piece.hf, piece.hf_index, entry.megatron, piece.shard_index)
                found[bucket_of[piece.hf]].append(write)
    return tuple(tuple(bucket) for bucket in found)
