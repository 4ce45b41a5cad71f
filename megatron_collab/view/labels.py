"""Labels of conversations by people, from a file: JSON lines, or CSV with the same names in its first row."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from megatron_collab.observability.conversations import TRAINING
from megatron_collab.observability.records import number, parsed
from megatron_collab.runtime import files
from megatron_collab.runtime.text import one_line
from megatron_collab.settings import ConfigError, require

MOST_ROWS, LONGEST = 10_000, 1 << 24  # LONGEST: bytes of a file
_NAMES = ("step", "evaluation", "task", "rollout", "future", "label", "rater", "metric")
_KNOWN = ", ".join(_NAMES)
_WORDS = {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
_SHOWN = 80  # characters of a value in a message
_MOST_STEPS = 10**15


class Label(NamedTuple):
    """A label of the conversation `task`/`rollout`/`future` of an evaluation, or of training/STEP: yes is 1, no 0.

    `rater` may be empty, and so may `metric`: then the label is about every metric.
    """

    part: str
    task: str
    rollout: int
    future: int
    label: float
    rater: str
    metric: str


def read(file: Path) -> tuple[list[Label], list[str]]:
    """The labels in `file`, and a line for each faulty row. Raises ConfigError if it is no file, or too long."""
    shown = one_line(f"--labels={file}")
    require(file.suffix in (".jsonl", ".csv"), f"{shown}: give a file whose name ends in .jsonl or .csv")
    try:
        text = files.read_text(file, LONGEST).removeprefix("\ufeff")
    except (OSError, ValueError) as error:  # a UnicodeDecodeError is a ValueError
        reason = error.strerror if isinstance(error, OSError) else f"{error}".removeprefix(f"{file}: ")
        raise ConfigError(f"{shown}: {one_line(str(reason))}") from None
    labels, faults = dict[Label, int](), list[str]()  # labels by what they may say once, with their row
    kept = list[Label]()
    for count, (at, row) in enumerate(_rows_of_csv(shown, text) if file.suffix == ".csv" else _rows_of_json(text), 1):
        require(count <= MOST_ROWS, f"{shown}: has more than {MOST_ROWS} rows; give fewer")
        try:
            label = _label(row)
            first = labels.setdefault(label._replace(label=0.0), at)
            require(first == at, f"repeats the conversation, rater and metric of row {first}; remove one")
        except ConfigError as error:
            faults.append(f"{shown}, row {at}: {error}")
        else:
            kept.append(label)
    require(bool(kept or faults), f"{shown}: has no labels")
    return kept, faults


def _rows_of_json(text: str) -> Iterator[tuple[int, Mapping[str, Any] | None]]:
    for at, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield at, parsed(line)


def _rows_of_csv(shown: str, text: str) -> Iterator[tuple[int, Mapping[str, Any] | None]]:
    """By the number of its last line, each row without its empty cells; None if it has other cells than the first."""
    reader = csv.reader(StringIO(text, newline=""), strict=True)
    try:
        names = [name.strip() for name in next(reader, [])]
        unknown = [name for at, name in enumerate(names) if name not in _NAMES or name in names[:at]]
        require(not unknown, f"{shown}: column {_short(*unknown[:1])}: unknown or repeated; choose from {_KNOWN}")
        for cells in reader:
            if any(cells):
                row = {name: cell.strip() for name, cell in zip(names, cells, strict=False) if cell.strip()}
                yield reader.line_num, row if len(cells) == len(names) else None
    except csv.Error as error:
        raise ConfigError(f"{shown}, row {reader.line_num}: is no CSV ({one_line(str(error))}); correct it") from None


def _label(row: Mapping[str, Any] | None) -> Label:
    """Raises ConfigError, which says what is wrong with the row."""
    require(row is not None, "is no JSON object, or has more or fewer cells than the first row")
    assert row is not None
    unknown = [name for name in row if name not in _NAMES]
    require(not unknown, f"{_short(*unknown[:1])}: no such name; choose from {_KNOWN}")
    require(("step" in row) != ("evaluation" in row), "give either step or evaluation")
    require("task" in row and "label" in row, "give task and label")
    part = row["evaluation"] if "evaluation" in row else f"{TRAINING}{_integer(row, 'step')}"
    texts = {"evaluation": part, "task": row["task"], "rater": row.get("rater", ""), "metric": row.get("metric", "")}
    for name, value in texts.items():
        require(isinstance(value, str), f"{name}={_short(value)}: give a text")
    value = row["label"]
    label = _WORDS.get(str(value).strip().lower(), _float(value))
    require(label is not None, f"label={_short(value)}: give a number, or yes or no")
    assert label is not None
    places = _integer(row, "rollout"), _integer(row, "future")
    return Label(part, row["task"], *places, float(label), texts["rater"], texts["metric"])


def _integer(row: Mapping[str, Any], name: str) -> int:
    value = row.get(name, 0)
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 15:
        value = int(value)
    message = f"{name}={_short(value)}: give a whole number from 0 on"
    require(type(value) is int and 0 <= value < _MOST_STEPS, message)
    return int(value)


def _float(value: Any) -> float | None:
    """The number that a cell is or has as text; None if it is none."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    return number(value)


def _short(value: Any = "") -> str:
    return one_line(str(value), _SHOWN)
