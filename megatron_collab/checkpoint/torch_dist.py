"""Writes torch_dist checkpoints: rectangular blocks of global tensors, flushed to disk piece by piece.

Flushing a whole file at once can take longer than the limit between two heartbeats.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter, SavePlan
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megatron_collab.runtime.process import beat

Shape = Sequence[int]
PIECE_BYTES = 1 << 26


# A write item and its content: a tensor or bytes.
WriteRequest = tuple[WriteItem, torch.Tensor | io.BytesIO]


def write_item(key: str, global_shape: Shape, offsets: Shape, sizes: Shape, dtype: torch.dtype) -> WriteItem:
    """torch's item for the block of `sizes` at `offsets` of the tensor `key`, whose shape is `global_shape`."""
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(global_shape))
    return WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def rectangles(start: int, end: int, shape: Shape) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of the blocks that make up elements [start, end) of a row-major tensor, in order.

    There are at most 2 n - 1 blocks for n dimensions: a part of a row, full rows, a part of a row.
    """
    if start == end:
        return
    row = prod(shape[1:])
    first, last = -(-start // row), end // row  # full rows
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


class SaveItems(DefaultSavePlanner):
    """The save planner of this rank: its write items with their contents."""

    def __init__(self, items: Sequence[tuple[WriteItem, Any]]) -> None:
        super().__init__(flatten_state_dict=False)
        self._items = [item for item, _ in items]
        self._data = {item.index: content for item, content in items}

    def create_local_plan(self) -> SavePlan:
        return SavePlan(self._items)

    def resolve_data(self, write_item: WriteItem) -> Any:
        beat()
        return self._data[write_item.index]


class CheckpointWriter(FileSystemWriter):
    """Writes a rank's file; raises the OSError itself if the write fails."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.fs = _FlushedFiles()

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # torch.save hides a full disk behind an error about its own format.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise


class _FlushedFiles(FileSystem):
    """A file system for writing only; a FileSystemWriter never reads."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with io.BufferedWriter(_Pieces(path, mode)) as stream:
            yield stream


class _Pieces(io.FileIO):
    """A file that is flushed after every PIECE_BYTES."""

    unflushed = 0

    def write(self, content: Any) -> int:
        """Write at most PIECE_BYTES of `content`; return the number of bytes written."""
        written = super().write(memoryview(content)[:PIECE_BYTES])
        self.unflushed += written
        if self.unflushed >= PIECE_BYTES:
            os.fsync(self.fileno())
            self.unflushed = 0
            beat()
        return written
