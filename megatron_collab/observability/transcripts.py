"""Transcripts of a run: every future of a step in one Parquet file, transcripts/step_000012.parquet.

A row is a group. `content` is the JSON of its futures as folder.rows_of yields them; the other columns serve filters,
as lists over the group's futures. Up to 64 groups are a row group, whose first row has its distinct words and for each
word which groups have it, as bits. Pages of contents are small, since a page is read to open one of its groups. Files
are complete, and a repeated step replaces its file. Earlier versions wrote transcripts.jsonl, a line per future; a run
that was resumed since has both, and its lines are of earlier steps than its files.
"""

from __future__ import annotations

import json
import mmap
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron_collab.observability import records
from megatron_collab.runtime import files
from megatron_collab.runtime.redact import redacted
from megatron_collab.settings import ConfigError

Row = Mapping[str, Any]

FOLDER, TOKENS, OLD_FILE = "transcripts", "tokens", "transcripts.jsonl"
MOST_GROUPS = 64  # of a row group: the bits of a word
_MOST_CONTENT = 1 << 22  # characters of JSON of a row group that has more than one group
_PAGE = 1 << 19  # bytes of JSON that zstd packs as a whole; 4 % more bytes than one page for 64 groups
_LEVEL = 12  # of zstd: about 30 MB of JSON per second
_LONGEST_WORD = 64  # characters; longer ones count as several
_WORD = re.compile(rf"\w{{1,{_LONGEST_WORD}}}")
_NOT_TEXT = ("task", "role", "ending")  # values that have their own columns or say nothing
_LARGEST = float(np.finfo(np.float32).max)
_BATCH = 8  # groups that are decoded at a time
_STEP_FILE = re.compile(r"step_(\d{6,15})\.parquet")
_LISTS = {"rollout": pa.int32(), "future": pa.int32(), "ending": pa.string()}  # columns of repeated values
SCORE = "score/"
TERMS = ("standard_error", "surprise")  # besides scores and reward, columns of float32 if the rows have such values


def step_file(folder: Path, step: int, kind: str = FOLDER) -> Path:
    """The file of a step of the run in `folder`. `kind`: the folder in it, of transcripts or of tokens."""
    return folder / kind / f"step_{step:06}.parquet"


def step_files(folder: Path, kind: str = FOLDER) -> dict[int, Path]:
    """The files of the run in `folder` by step, in order of steps."""
    parent = folder / kind
    names = [file.name for file in parent.iterdir()] if parent.is_dir() else []
    matches = filter(None, map(_STEP_FILE.fullmatch, names))
    return dict(sorted((int(match[1]), parent / match[0]) for match in matches))


def write_step(folder: Path, step: int, groups: Iterable[Sequence[Row]]) -> None:
    """Write the transcripts of a step of the run in `folder`: the rows of its futures by group; nothing if none."""
    with files.writing(folder / FOLDER):
        (folder / FOLDER).mkdir(exist_ok=True)
    write(step_file(folder, step), groups, step)


def write(file: Path, groups: Iterable[Sequence[Row]], step: int | None = None) -> None:
    """Write the futures of `groups` to `file` atomically, keys redacted; nothing if there are none.

    `step`: of training, which every row then has. Raises RunStopped if the file cannot be written.
    """
    if tables := [*tables_of(groups, step)]:
        write_tables(file, tables)


def write_tables(file: Path, tables: Sequence[pa.Table]) -> None:
    """Write row groups to `file` atomically. Raises RunStopped if it cannot be written."""
    schema = pa.unify_schemas([table.schema for table in tables])  # some metrics may apply to some groups only
    repeated = ["step", "task", *(f"{name}.list.element" for name in _LISTS)]
    stream = pa.BufferOutputStream()
    with pq.ParquetWriter(
        stream,
        schema,
        compression="zstd",
        compression_level=_LEVEL,
        data_page_size=_PAGE,
        use_dictionary=repeated,
        column_encoding={"words.list.element": "DELTA_BYTE_ARRAY"},  # they are sorted
        write_statistics=False,
        write_batch_size=1,  # a page ends between groups
    ) as writer:
        for table in tables:
            empty = {name: pa.nulls(len(table), schema.field(name).type) for name in schema.names}
            columns = empty | dict(zip(table.column_names, table.columns, strict=True))
            writer.write_table(pa.table(columns, schema=schema), row_group_size=MOST_GROUPS)
    files.replace(file, stream.getvalue().to_pybytes())


def tables_of(groups: Iterable[Sequence[Row]], step: int | None) -> Iterator[pa.Table]:
    """The row groups of a file, keys redacted: a row per group that has futures. `step` as in `write`."""
    batch, characters = list[tuple[Sequence[Row], str]](), 0
    for futures in groups:
        if not futures:
            continue
        rows = records.finite(redacted(futures))
        content = json.dumps(rows, separators=(",", ":"))
        if batch and (len(batch) == MOST_GROUPS or characters + len(content) > _MOST_CONTENT):
            yield _table(batch, step)
            batch, characters = [], 0
        batch.append((rows, content))
        characters += len(content)
    if batch:
        yield _table(batch, step)


def read_row_group(source: pq.ParquetFile, number: int, positions: Sequence[int] | None = None) -> Iterator[list[Row]]:
    """The futures of the groups at `positions`, which ascend, in a row group; of all groups if `positions` is None.

    Reads no further than the last position.
    """
    batches = source.iter_batches(_BATCH, row_groups=[number], columns=["step", "content"], use_threads=False)
    groups = range(source.metadata.row_group(number).num_rows)
    if positions is None:
        positions = groups
    if not set(positions) <= set(groups):
        raise LookupError("other groups than when it was indexed")
    begin, batch = 0, next(batches)
    for position in positions:
        while position >= begin + len(batch):
            begin += len(batch)
            batch = next(batches)
        step, rows = batch["step"][position - begin].as_py(), json.loads(batch["content"][position - begin].as_py())
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError(f"group {position} has no futures")
        yield rows if step is None else [{"step": step, **row} for row in rows]


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Turn an error from a damaged `file` within the block into a ConfigError."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError, MemoryError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConfigError(
            f"{file}: cannot be read ({reason}); restore it, or remove it to forget its futures"
        ) from None


def rows_of_file(file: Path) -> Iterator[Row | None]:
    """The futures in a file of either format, and None for each line that is no JSON object; nothing without a file.

    They are as they were written, with their step if they have one. Raises ConfigError if a Parquet file is damaged.
    """
    if file.suffix == ".parquet":
        with suppress(FileNotFoundError), readable(file):
            source = pq.ParquetFile(file, memory_map=True)
            for number in range(source.num_row_groups):
                for rows in read_row_group(source, number):
                    yield from rows
    else:
        yield from (row for _, row in records.lines(file))


def run_rows(folder: Path, step: int | None = None) -> Iterator[Row]:
    """The futures of the run in `folder`, or of one step, in order and with their step.

    Lines of transcripts.jsonl that are no futures are left out. Raises ConfigError if a file is damaged.
    """
    for row in rows_of_file(folder / OLD_FILE):
        if row is not None and records.of_step(row) and step in (None, row["step"]):
            yield row
    for at, file in step_files(folder).items():
        if step in (None, at):
            yield from filter(None, rows_of_file(file))


def by_group(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """The rows of a step by group. A group begins with its first future, and with another task."""
    group: list[Row] = []
    for row in rows:
        begins = (row.get("rollout", 0), row.get("future", 0)) == (0, 0)
        if group and (begins or row.get("task") != group[0].get("task")):
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def forget(folder: Path, start: int) -> None:
    """Remove transcripts and tokens of the run in `folder` from step `start` on, which are repeated.

    Others are not read.
    """
    for step, file in (*step_files(folder).items(), *step_files(folder, TOKENS).items()):
        if step >= start:
            with files.writing(file):
                file.unlink()
    old = folder / OLD_FILE
    if not old.is_file() or not old.stat().st_size:
        return
    with files.writing(old), old.open("r+b") as stream:
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as text:
            end = len(text)
            while end:  # from the last line, which is torn if the process was killed while it wrote it
                begin = text.rfind(b"\n", 0, end - 1) + 1
                row = records.parsed(text[begin:end].decode(errors="replace"))
                if row is not None and records.of_step(row) and row["step"] < start:
                    break
                end = begin
        stream.truncate(end)


def _table(groups: Sequence[tuple[Sequence[Row], str]], step: int | None) -> pa.Table:
    """A row group of groups, each with its redacted rows and their JSON."""
    rows = [row for group, _ in groups for row in group]
    ends = np.cumsum([0, *(len(group) for group, _ in groups)], dtype=np.int32)

    def column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
        return pa.ListArray.from_arrays(ends, pa.array(values, kind))

    scores = [row["scores"] if isinstance(row.get("scores"), dict) else {} for row in rows]
    numbers = {
        f"{SCORE}{name}": [of.get(name) for of in scores] for name in dict.fromkeys(n for of in scores for n in of)
    }
    numbers["reward"] = [row.get("reward") for row in rows]
    numbers |= {name: [row.get(name) for row in rows] for name in TERMS if any(name in row for row in rows)}
    words, bits = _inverted([group for group, _ in groups])
    no_words = [None] * (len(groups) - 1)
    return pa.table(
        {
            "step": pa.array([step] * len(groups), pa.int32()),
            "task": pa.array([_encodable(group[0].get("task")) for group, _ in groups], pa.string()),
            "rollout": column([_integer(row.get("rollout")) for row in rows], _LISTS["rollout"]),
            "future": column([_integer(row.get("future")) for row in rows], _LISTS["future"]),
            "ending": column([_ending(row.get("ending")) for row in rows], _LISTS["ending"]),
            **{_encodable(name): column(_floats(values), pa.float32()) for name, values in numbers.items()},
            "words": pa.array([words, *no_words], pa.list_(pa.string())),
            "word_groups": pa.array([bits, *no_words], pa.list_(pa.uint64())),
            "content": pa.array([content for _, content in groups], pa.string()),
        }
    )


def _inverted(groups: Sequence[Sequence[Row]]) -> tuple[list[str], list[int]]:
    """The distinct lower-cased words of a row group, and for each the groups that have it: bit N for group N."""
    bits = defaultdict[str, int](int)
    for number, rows in enumerate(groups):
        texts = dict.fromkeys(text for row in rows for text in _texts(row))
        for word in {word for text in texts for word in words_of(text)}:
            bits[word] |= 1 << number
    words = sorted(bits)
    return words, [bits[word] for word in words]


def words_of(text: str) -> list[str]:
    """The words of a text, lower-cased."""
    return _WORD.findall(text.lower())


def _texts(row: Row) -> Iterator[str]:
    """Every text in a row, at any depth."""
    values: list[Any] = [row]
    while values:
        match values.pop():
            case str(text):
                yield text
            case dict(parts):
                values += [value for name, value in parts.items() if name not in _NOT_TEXT]
            case list(parts):
                values += parts


def _floats(values: Sequence[Any]) -> list[float | None]:
    """The values that are finite in float32, else null."""
    numbers = [records.number(value, _LARGEST) for value in values]
    return [None if number is None else float(number) for number in numbers]


def _integer(value: Any) -> int:
    return value if type(value) is int and 0 <= value < 1 << 31 else 0


def _ending(value: Any) -> str | None:
    return None if value is None else _encodable(value)


def _encodable(value: Any) -> str:
    """The value as text that UTF-8 can hold: lone surrogates become ?."""
    return str(value).encode(errors="replace").decode()
