"""Reading what a run has written: of a file that is torn, or of something else, what can be read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_collab.runtime.process import FINISHED

Row = Mapping[str, Any]
_MOST = 1e100  # the squares of errors, and the axes of a figure, are numbers too
_MOST_STEPS = 2**53  # from there on a float, as which steps are drawn, is not exact


def lines(file: Path) -> Iterator[tuple[str, Row | None]]:
    """Each line of a JSONL file as text and as read, None where it is no object; nothing where there is no file."""
    if file.is_file():
        with file.open(errors="replace", newline="\n") as stream:
            for text in filter(str.strip, stream):
                yield text.rstrip("\n"), _object(text)


def of_step(row: Row) -> bool:
    """Whether the row has the number of a step."""
    step = row.get("step")
    return type(step) is int and 0 <= step < _MOST_STEPS


def number(value: Any) -> float | None:
    """A value that can be averaged and drawn; None for another one."""
    return value if type(value) in (int, float) and -_MOST < value < _MOST else None


def unread(count: int) -> str:
    """What is said of lines that are left out."""
    return f"{count} line{'s' * (count > 1)} that cannot be read"


def finished(folder: Path) -> bool:
    """Whether the run in `folder` has written its result."""
    file = folder / FINISHED
    return file.is_file() and _object(file.read_text(errors="replace")) is not None


def _object(text: str) -> Row | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
