"""Checkpoint files that are on disk piece by piece: one flush of a whole file may take longer than a rank may stand."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem

from megatron_collab.runtime import heartbeat

PIECE_BYTES = 1 << 26


class Writer(FileSystemWriter):
    """Writes a rank's file, and says what the operating system said when it cannot."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.fs = _Paced()

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # torch.save hides a full disk behind an error about its own format.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise


class _Paced(FileSystem):
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with io.BufferedWriter(Pieces(path, mode)) as stream:
            yield stream


class Pieces(io.FileIO):
    """A file that is flushed after every PIECE_BYTES."""

    unflushed = 0

    def write(self, content: Any) -> int:
        """At most a piece of `content`; how many bytes that is."""
        written = super().write(memoryview(content)[:PIECE_BYTES])
        self.unflushed += written
        if self.unflushed >= PIECE_BYTES:
            os.fsync(self.fileno())
            self.unflushed = 0
            heartbeat.beat()
        return written
