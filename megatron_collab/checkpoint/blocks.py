"""Rectangular blocks of global tensors, which is what a torch_dist checkpoint is made of."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megatron_collab.runtime import heartbeat

Shape = Sequence[int]


@dataclass(frozen=True)
class Block:
    """`tensor` is the part that begins at `offsets` of the tensor `key`, whose shape is `whole`."""

    key: str
    whole: Shape
    offsets: Shape
    tensor: torch.Tensor


def write_item(key: str, whole: Shape, offsets: Shape, sizes: Shape, dtype: torch.dtype) -> WriteItem:
    """The request to write a block."""
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(whole))
    return WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def rectangles(start: int, end: int, shape: Shape) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of the blocks that elements [start, end) of a row-major tensor are, in their order.

    At most 2 n - 1 for n dimensions: a part of a row, whole rows, a part of a row.
    """
    if start == end:
        return
    if len(shape) == 1:
        yield (start,), (end - start,)
        return
    row = prod(shape[1:])
    first, last = -(-start // row), end // row  # whole rows
    if first > last:
        yield from _within(last, start, end, shape)
        return
    yield from _within(first - 1, start, first * row, shape)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _within(last, last * row, end, shape)


def _within(row: int, start: int, end: int, shape: Shape) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    begin = row * prod(shape[1:])
    for offsets, sizes in rectangles(start - begin, end - begin, shape[1:]):
        yield (row, *offsets), (1, *sizes)


class SaveBlocks(DefaultSavePlanner):
    """Has this rank write `blocks` and, by key, `objects` (serialised)."""

    def __init__(self, blocks: Iterable[Block], objects: Mapping[str, bytes]) -> None:
        super().__init__(flatten_state_dict=False)
        self._items: list[WriteItem] = []
        self._data: dict[MetadataIndex, Any] = {}
        for block in blocks:
            self._add(
                write_item(block.key, block.whole, block.offsets, block.tensor.shape, block.tensor.dtype), block.tensor
            )
        for key, content in objects.items():
            self._add(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO), io.BytesIO(content))

    def _add(self, item: WriteItem, data: Any) -> None:
        self._items.append(item)
        self._data[item.index] = data

    def create_local_plan(self) -> SavePlan:
        return SavePlan(self._items)

    def resolve_data(self, write_item: WriteItem) -> Any:
        heartbeat.beat()
        return self._data[write_item.index]
