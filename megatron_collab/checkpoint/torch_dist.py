"""How a torch_dist checkpoint is written: rectangular blocks of global tensors, flushed to disk piece by piece.

One flush of a whole file can take longer than a rank may go without a heartbeat.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter, SavePlan
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megatron_collab.runtime import heartbeat

Shape = Sequence[int]
PIECE_BYTES = 1 << 26


@dataclass(frozen=True)
class FileBlock:
    """`tensor` is the part that begins at `offsets` of the tensor `key`, whose shape is `whole`."""

    key: str
    whole: Shape
    offsets: Shape
    tensor: torch.Tensor


def write_item(key: str, whole: Shape, offsets: Shape, sizes: Shape, dtype: torch.dtype) -> WriteItem:
    """torch's request to write a block."""
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(whole))
    return WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def rectangles(start: int, end: int, shape: Shape) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of the blocks that make up elements [start, end) of a row-major tensor, in their order.

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
    """The save plan of this rank: its `blocks` and, by key, serialised `objects`."""

    def __init__(self, blocks: Iterable[FileBlock], objects: Mapping[str, bytes]) -> None:
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


class PacedWriter(FileSystemWriter):
    """Writes a rank's file; raises the error of the operating system where it cannot."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.fs = _PacedFiles()

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # torch.save hides a full disk behind an error about its own format.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise


class _PacedFiles(FileSystem):
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with io.BufferedWriter(_Pieces(path, mode)) as stream:
            yield stream


class _Pieces(io.FileIO):
    """A file that is flushed after every PIECE_BYTES."""

    unflushed = 0

    def write(self, content: Any) -> int:
        """Write at most one piece of `content`; return the number of bytes."""
        written = super().write(memoryview(content)[:PIECE_BYTES])
        self.unflushed += written
        if self.unflushed >= PIECE_BYTES:
            os.fsync(self.fileno())
            self.unflushed = 0
            heartbeat.beat()
        return written
