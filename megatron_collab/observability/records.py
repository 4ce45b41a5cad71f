"""Reads the files of a run. Of a file that is torn or holds something else, the readable part is returned."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from megatron_collab.runtime.process import FINISHED
from megatron_collab.settings.documents import parse_json

Row = Mapping[str, Any]
_MOST = 1e100  # squares of errors and the axes of a figure must stay finite too
_MOST_STEPS = 2**53  # steps are drawn as floats, which are not exact above it


def lines(file: Path) -> Iterator[tuple[str, Row | None]]:
    """Each line of a JSONL file as text and as an object (None if it is no JSON object); nothing without a file."""
    if file.is_file():
        with file.open(errors="replace", newline="\n") as stream:
            for text in filter(str.strip, stream):
                yield text.rstrip("\n"), parsed(text)


def of_step(row: Row) -> bool:
    """Whether the row has a valid step number."""
    step = row.get("step")
    return type(step) is int and 0 <= step < _MOST_STEPS


def number(value: Any, most: float = _MOST) -> float | None:
    """The value if it can be averaged and drawn, and is below `most` in size, else None."""
    return value if type(value) in (int, float) and -most < value < most else None


def finite(value: Any) -> Any:
    """A value for JSON, with null for numbers that it cannot hold (NaN, infinity); those of libraries become floats."""
    if isinstance(value, dict):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    if isinstance(value, Real) and not isinstance(value, int):
        return float(value) if math.isfinite(value) else None
    return value


def unreadable_lines(count: int) -> str:
    """Text for a message about lines that are left out."""
    return f"{count} unreadable line{'s' * (count > 1)}"


def finished(folder: Path) -> bool:
    """Whether the run in `folder` has written its result."""
    file = folder / FINISHED
    return file.is_file() and parsed(file.read_text(errors="replace")) is not None


def parsed(text: str) -> Row | None:
    """The JSON object in `text`; None if it is something else."""
    try:
        value = parse_json(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
