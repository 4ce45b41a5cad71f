"""Files that a next start reads: a process may be killed at any moment while it writes one."""

from __future__ import annotations

import os
from pathlib import Path


def replace(file: Path, text: str) -> None:
    """Write `file` as a whole: what is read is the old text or the new one, whenever the process or machine stops."""
    draft = file.with_name(f"{file.name}.tmp")
    with draft.open("w") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    draft.replace(file)
