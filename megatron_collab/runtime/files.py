"""Atomic writes of the files that a resume reads: a process may be killed at any moment of a write."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_collab.runtime.process import RunStopped


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Turn an OSError within the block into RunStopped, which names `file`."""
    try:
        yield
    except OSError as error:
        raise RunStopped(
            f"{file}: cannot be written: {error.strerror}; free space there; the same command resumes from the last "
            "checkpoint"
        ) from error


def replace(file: Path, text: str) -> None:
    """Write `file` atomically: readers see the old text or the new one, whenever the process or the machine stops.

    Raises RunStopped where it cannot be written.
    """
    draft = file.with_name(f"{file.name}.tmp")
    with writing(file), draft.open("w") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    draft.replace(file)
