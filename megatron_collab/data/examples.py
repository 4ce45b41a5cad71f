"""The rows of one source as tasks, conversations or pairs, each read when it is accessed."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from megatron_collab.data.formats import FORMATS, Use, natural_use, recognize
from megatron_collab.data.messages import Unfit, unread_parts
from megatron_collab.data.readers import checked_task, unread_metadata, with_metadata
from megatron_collab.data.rows import open_rows
from megatron_collab.data.sources import Source
from megatron_collab.runtime import files, hub, screen
from megatron_collab.runtime.trial import TrialError, run_trial
from megatron_collab.settings import ConfigError, Extension, make, nearest, require
from megatron_collab.types import Message, Task

_Read = TypeVar("_Read")
READER_SECONDS = 600.0  # of a user's reader for a source


class TaskReader(Extension):
    """Base class of the readers that data.format may name as package.module:Class; a function works too."""

    def __call__(self, path: Path) -> Iterable[Task]:
        """The tasks in data.train or data.eval. Raises ValueError."""
        raise NotImplementedError


class Examples(Sequence[_Read]):
    """The rows of a source, without those left out, read as `use`; `format` and `why` say how.

    Raises ValueError, naming setting, file and row, when a bad row is accessed.
    """

    def __init__(
        self,
        source: Source,
        rows: Any,
        read: Callable[[Any, int], _Read],
        at: Callable[[int], str],
        use: Use,
        format: str,
        why: str,
        splits: Sequence[str] = (),
        distinct: bool = False,
    ) -> None:
        """`rows`: Rows, or KeptTasks of a user's reader. `read`: makes the example from a row and its number. `at`: the
        location of a row, for messages. `distinct`: of rows with the same prompt, one is already chosen.
        """
        self.source, self.rows, self.at, self.splits = source, rows, at, splits
        self.use, self.format, self.why, self.distinct = use, format, why, distinct
        self._read = read
        self._columns = {"prompt", *(FORMATS[format].columns if format in FORMATS else ())}
        self._kept: np.ndarray | None = None

    def leave_out(self, numbers: Sequence[int]) -> None:
        """Leaves out the rows of these numbers from now on."""
        self._kept = np.delete(np.arange(len(self.rows)), numbers) if numbers else None

    def __len__(self) -> int:
        return len(self.rows if self._kept is None else self._kept)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        number = range(len(self))[index] if self._kept is None else int(self._kept[index])
        return self.read(self.rows[number], number)

    def __iter__(self) -> Iterator[_Read]:
        kept = None if self._kept is None else np.isin(np.arange(len(self.rows)), self._kept)
        return (self.read(row, number) for number, row in self.numbered() if kept is None or kept[number])

    def numbered(self) -> Iterator[tuple[int, Any]]:
        """All rows with their numbers, including those left out."""
        return enumerate(self.rows)

    def read(self, row: Any, number: int) -> _Read:
        """The example of a row. Raises ValueError, and Unfit if nothing can be learned from the row."""
        try:
            return self._read(row, number)
        except Unfit:
            raise
        except ValueError as error:
            raise ValueError(f"{self.at(number)}: {error}") from error
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError) as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ValueError(f"{self.at(number)}: is not a row of the format {self.format} ({reason})") from error

    def unread(self, row: Any) -> Iterator[str]:
        """Every part of the messages of a row, or of the two rows of a pair, that is not read; and columns."""
        for part in row if isinstance(row, tuple) else (row,):
            if isinstance(part, Mapping):
                yield from unread_parts(part, self._columns)
                yield from FORMATS[self.format].unread(part) if self.format in FORMATS else ()
                yield from unread_metadata(part) if self.use == "task" else ()

    def sort_keys(self, by: str) -> np.ndarray:
        """Integer keys that sort the rows by a column, descending for `-column`. Raises ConfigError."""
        column, sign = by.removeprefix("-"), -1 if by[:1] == "-" else 1
        columns, where = getattr(self.rows, "column_names", []), f"data.train={self.source.source}: sort_by={by}"
        fault = f"no such column{nearest(column, columns)}; there are {', '.join(columns) or 'none'}"
        require(column in columns, f"{where}: {fault}")
        cells = [row[column] for row in self.rows]
        values: np.ndarray = np.empty(len(cells), dtype=object)
        values[:] = _numbers(cells) or cells
        values = values if self._kept is None else values[self._kept]
        kinds = {"text" if isinstance(value, str) else "number" for value in values}
        sortable = len(kinds) == 1 and all(isinstance(value, str | int | float) and value == value for value in values)
        require(sortable, f"{where}: its values must be all numbers or all texts, without a gap; choose another column")
        return sign * np.unique(values, return_inverse=True)[1]


def _numbers(texts: Sequence[Any]) -> list[float] | None:
    """Texts as numbers, because tables hold texts; None if any is not a number."""
    try:
        return [float(text) for text in texts] if all(isinstance(text, str) for text in texts) else None
    except ValueError:
        return None


@dataclass(frozen=True)
class RowFormat:
    """The format of rows, as in data.format; `options`: those of a custom reader."""

    name: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)


AUTO = RowFormat()


def load_tasks(
    source: Source | Path | str,
    setting: str = "data.train",
    format: RowFormat = AUTO,
    cache: Path | None = None,
    calls_reader: bool = True,
) -> Examples[Task]:
    """The tasks of a source in its order, in any format that is read as tasks, or by the reader of data.format.

    The rows are stored as Arrow in `cache`, by default in a temporary folder. A reader is called in a fork of this
    process, with a limit on time and memory, and its tasks are kept in `cache`; without `calls_reader` these are taken.
    Raises ConfigError for an invalid source or reader, ValueError if the data cannot be read.
    """
    source = source if isinstance(source, Source) else Source(source=str(source))
    if ":" not in format.name:
        return _examples(source, setting, format, cache, "task")
    where = f"{setting}={source.source}"
    read = make(format.name, "data.format", TaskReader, format.options, "data.format_options.")
    is_on_hub = hub.parse(source.source) is not None
    path = hub.download(source.source, setting, "dataset", ["*"]) if is_on_hub else Path(source.source)
    out = "correct one of them, or write its tasks to a file once"
    try:
        with screen.phase(f"reading {source.title}"):
            kept = cache and cache / f"tasks-{_digest(source, format)}.pickle"
            tasks = _read_tasks(partial(read, path), kept, calls_reader)
    except ConfigError:
        raise
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    except TrialError as error:
        raise ValueError(f"{where}: data.format={format.name} {error}; {out}") from error
    except BaseException as error:  # a user's reader may raise anything
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"{where}: data.format={format.name} fails ({reason}); {out}") from error
    if not tasks:
        raise ValueError(f"{where}: data.format reads no tasks from it")

    def at(number: int) -> str:
        return f"{where} task {number + 1}"

    return Examples(source, tasks, lambda task, number: checked_task(task), at, "task", format.name, "data.format")


class KeptTasks(list[Task]):
    """The tasks that a reader gave; equal `fingerprint`s mean equal tasks."""

    def __init__(self, pickled: bytes) -> None:
        super().__init__(pickle.loads(pickled))
        self.fingerprint = [hashlib.sha256(pickled).hexdigest()]


def _read_tasks(read: Callable[[], Iterable[Task]], kept: Path | None, calls_reader: bool) -> KeptTasks:
    """The tasks that a reader gives in a child process, or those that are `kept` in a file. Raises TrialError."""
    if kept and kept.is_file() and not calls_reader:
        return KeptTasks(kept.read_bytes())
    pickled = run_trial(lambda: pickle.dumps(list(read())), READER_SECONDS)
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        files.replace(kept, pickled)
    return KeptTasks(pickled)


def _digest(source: Source, format: RowFormat) -> str:
    return hashlib.blake2b(f"{source!r} {format!r}".encode(), digest_size=8).hexdigest()


def load_conversations(
    source: Source | Path | str, setting: str = "data.train", format: RowFormat = AUTO, cache: Path | None = None
) -> Examples[tuple[Message, ...]]:
    """The conversations of a source in its order, in any format that is read as conversations. As `load_tasks`."""
    source = source if isinstance(source, Source) else Source(source=str(source))
    return _examples(source, setting, format, cache, "conversation")


def load_any(source: Source, setting: str) -> Examples[Any]:
    """The rows of a source as what they are: pairs, else tasks if possible, else conversations. As `load_tasks`."""
    return _examples(source, setting, AUTO, None, None)


def load_pairs(source: Source, setting: str, format: RowFormat = AUTO, cache: Path | None = None) -> Examples[Any]:
    """Pairs, or conversations if the source holds scored candidates that are not paired yet. As `load_tasks`."""
    return _examples(source, setting, format, cache, "pair")


def _examples(source: Source, setting: str, format: RowFormat, cache: Path | None, use: Use | None) -> Examples[Any]:
    rows = open_rows(source, setting, cache)
    columns, first = rows.column_names, rows[0]
    use = use or natural_use(columns, first)
    name, why = recognize(format.name, columns, first, use, f"{setting}={source.source}")
    reader: Any = getattr(FORMATS[name], use) or FORMATS[name].conversation

    def read(row: Any, number: int) -> Any:
        example = checked_task(with_metadata(reader(row, number), row)) if use == "task" else reader(row)
        if isinstance(example, Task) and any(message.role == "tool" for message in example.messages):
            raise ValueError("the prompt calls tools; such rows are read for supervised training only")
        return example

    return Examples(source, rows, read, rows.at, use, name, why, rows.splits)
