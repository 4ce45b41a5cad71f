"""Files that a next start reads: a process may be killed at any moment while it writes one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_collab.runtime.process import RunStopped


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """RunStopped where what is done within it cannot write `file`."""
    try:
        yield
    except OSError as error:
        raise RunStopped(
            f"{file}: cannot be written: {error.strerror}; make room there; the same command goes on from the last "
            "checkpoint"
        ) from error


def replace(file: Path, text: str) -> None:
    """Write `file` as a whole: what is read is the old text or the new one, whenever the process or machine stops.

    RunStopped where it cannot be written.
    """
    draft = file.with_name(f"{file.name}.tmp")
    with writing(file), draft.open("w") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    draft.replace(file)
