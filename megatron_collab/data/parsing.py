"""The rows of one file as JSON texts, each checked: whatever is in the file, it gives rows, or Unreadable.

JSON is read line by line, and each line is kept as it was written; every value of CSV and TSV is a text, as written.
A line of JSON that cannot be read is given as Unreadable among the rows, so that all of them can be named; what makes
the rest of a file unreadable is raised.
"""

from __future__ import annotations

import csv
import json
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from lzma import LZMAError
from pathlib import Path
from typing import Any, NamedTuple

from megatron_collab.data.packing import CUT, content, kind_of, misnamed, suffix_of

DEPTH = 100  # of lists and objects in each other: what copies, pickles or prints a row goes as deep
NAMED = 5  # rows that a message names
_BATCH = 1000  # rows that are taken from a table at once
_KINDS = {type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "a text", list: "a list"}


class Unreadable(ValueError):
    """Why a file, or its row of the number `row`, cannot be read, with the way out."""

    def __init__(self, why: str, row: int | None = None) -> None:
        super().__init__(why)
        self.row = row


def refused(first: str, others: Sequence[object], bad: int, rows: int) -> str:
    """The message of the `first` of so many `bad` rows, with the numbers of the next few."""
    also = f"; also row{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}" if others else ""
    more = f" and {bad - 1 - len(others)} more" if bad - 1 > len(others) else ""
    return first + (f" ({bad} of {rows} rows are refused{also}{more})" if bad > 1 else "")


class Parsed(NamedTuple):
    """A row: its number for messages, from 1 (of a text, that of the line), its JSON, and what that holds."""

    number: int
    text: str
    row: Mapping[str, Any]


Read = Parsed | Unreadable


def parse(file: Path) -> Iterator[Read]:
    """The rows of `file`, one after the other, by its suffix. Raises Unreadable."""
    try:
        if fault := misnamed(file):
            raise Unreadable(fault)
        yield from _PARSERS[kind_of(file)](file)
    except Unreadable:
        raise
    except (EOFError, LZMAError, zlib.error) as error:
        raise Unreadable(f"its compressed content is cut off or damaged ({error}); copy it again") from error
    except (OSError, ValueError, ArithmeticError, LookupError, NotImplementedError, MemoryError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise Unreadable(f"cannot be read as {suffix_of(file)[1:]} ({reason}); {CUT}") from error


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Number and text of each line, its end included."""
    with content(file) as stream:
        for number, raw in enumerate(stream, 1):
            yield number, _decoded(raw, number)


def _decoded(raw: bytes, number: int) -> str:
    try:
        line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        byte = f"its byte {error.start + 1}, {raw[error.start]:#04x}, is no UTF-8"
        out = "write the file in UTF-8; of a text in Latin-1, iconv -f LATIN1 -t UTF-8 makes it"
        raise Unreadable(f"{byte}; {out}", number) from error
    if "\0" in line:
        raise Unreadable("holds NUL bytes, so the file is damaged or no text; write it again", number)
    return line


def _json(file: Path) -> Iterator[Read]:
    """Of JSON with a row a line, or of one document: a list of rows, or a row."""
    with content(file) as stream:
        given = ((number, raw) for number, raw in enumerate(stream, 1) if raw.strip())
        first = next(given, None)
        if first is None:
            return
        begins = first[1].removeprefix(BOM_UTF8).lstrip()
        if begins.startswith(b"[") or (suffix_of(file) != ".jsonl" and not _is_whole(begins)):
            yield from _document(_decoded(raw, number) for number, raw in chain([first], given))
            return
        for number, raw in chain([first], given):
            try:
                text = _decoded(raw, number).strip()
                yield Parsed(number, text, _row(text, number))
            except Unreadable as error:
                yield error


def _document(lines: Iterable[str]) -> Iterator[Parsed]:
    try:
        found = json.loads("".join(lines), object_pairs_hook=_object)
    except RecursionError as error:
        raise _too_deep(None) from error
    except Unreadable:
        raise
    except ValueError as error:
        raise Unreadable(f"is no JSON ({error}); {CUT}") from error
    for number, row in enumerate(found if isinstance(found, list) else [found], 1):
        try:
            text = json.dumps(row, ensure_ascii=False)
        except RecursionError as error:
            raise _too_deep(number) from error
        _check(row, text, number, escaped=False)
        yield Parsed(number, text, row)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; Unreadable where it gives a name two values, of which Python would keep the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise Unreadable(f"names {twice!r} twice in an object; remove one of them")
    return found


def _is_whole(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _row(text: str, number: int) -> Mapping[str, Any]:
    try:
        row = json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise _too_deep(number) from error
    except Unreadable as error:
        raise Unreadable(str(error), number) from error
    except json.JSONDecodeError as error:
        reason = f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
        raise Unreadable(f"is no JSON ({reason}); correct the line, or remove it", number) from error
    except ValueError as error:  # a number of more than 4,300 digits
        raise Unreadable(f"is no JSON that can be read ({error}); correct the line, or remove it", number) from error
    _check(row, text, number, escaped=True)
    found: Mapping[str, Any] = row
    return found


def _check(row: Any, text: str, number: int, escaped: bool) -> None:
    """Raise Unreadable for what is no object, too deep, or holds a half of a pair of surrogates."""
    if not isinstance(row, dict):
        raise Unreadable(f"is {_KINDS[type(row)]}, and no JSON object; give an object with the columns", number)
    if text.count("[") + text.count("{") > DEPTH and too_deep(row):
        raise _too_deep(number)
    if not escaped or "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            raise Unreadable(f"holds {half}, half a pair of surrogates; correct it, or remove it", number) from error


def too_deep(value: Any) -> bool:
    """Whether lists and objects are nested in each other more than DEPTH deep."""
    level = [value]
    for _ in range(DEPTH):
        level = [
            entry
            for each in level
            for entry in (each.values() if isinstance(each, dict) else each)
            if isinstance(entry, dict | list)
        ]
        if not level:
            return False
    return True


def json_in(text: str, otherwise: Any) -> Any:
    """What a JSON text holds; `otherwise` where it is none. ValueError where it is as deep as no row may be."""
    try:
        found = json.loads(text)
        deep = too_deep(found)
    except RecursionError:
        deep = True
    except ValueError:
        return otherwise
    if deep:
        raise ValueError(f"holds JSON of more than {DEPTH} lists and objects in each other; flatten it")
    return found


def _too_deep(number: int | None) -> Unreadable:
    return Unreadable(f"nests lists and objects more than {DEPTH} deep; flatten or remove it", number)


def _table(file: Path, delimiter: str) -> Iterator[Parsed]:
    """Every value is a text as it was written; empty ones are none."""
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader((line for _, line in _lines(file)), delimiter=delimiter, strict=True)
    number = 1
    try:
        columns = next(reader, [])
        if twice := next((name for name in columns if columns.count(name) > 1), None):
            raise Unreadable(f"names the column {twice!r} twice; rename one of them", 1)
        number = reader.line_num + 1
        for values in reader:
            if len(values) > len(columns):
                raise Unreadable(f"has {len(values)} values for {len(columns)} columns; quote values", number)
            if values:
                values += [""] * (len(columns) - len(values))
                row = {name: value or None for name, value in zip(columns, values, strict=True)}
                yield Parsed(number, json.dumps(row, ensure_ascii=False), row)
            number = reader.line_num + 1
    except csv.Error as error:
        raise Unreadable(f"cannot be read as a table ({error}); quote values, and close quotes", number) from error


def _text(file: Path) -> Iterator[Read]:
    """A row a line; JSON where it begins like that."""
    begins = next((line.strip() for _, line in _lines(file) if line.strip()), "")
    if begins.startswith("{"):
        yield from _json(file)
        return
    for number, line in _lines(file):
        row = {"text": line.rstrip("\r\n")}
        yield Parsed(number, json.dumps(row, ensure_ascii=False), row)


def _parquet(file: Path) -> Iterator[Parsed]:
    import pyarrow.parquet as pq

    with content(file) as stream:
        source = pq.ParquetFile(stream)
        yield from _rows(source.iter_batches(_BATCH))


def _arrow(file: Path) -> Iterator[Parsed]:
    """Of an Arrow file, or of a stream as save_to_disk writes it."""
    from pyarrow import ipc

    with content(file) as stream:
        whole = stream.read(6) == b"ARROW1"
        stream.seek(0)
        reader = ipc.open_file(stream) if whole else ipc.open_stream(stream)
        batches = (reader.get_batch(at) for at in range(reader.num_record_batches)) if whole else reader
        yield from _rows(batches)


def _rows(batches: Iterable[Any]) -> Iterator[Parsed]:
    """Of Arrow's record batches; dates, bytes and decimals as texts."""
    number = 0
    for whole in batches:
        whole.validate(full=True)  # values that are out of bounds would end Python
        for begin in range(0, len(whole), _BATCH):
            batch = whole.slice(begin, _BATCH)
            for row in batch.to_pylist():
                number += 1
                row = {name: _plain(row[name], batch.schema.field(name).type) for name in row}
                yield Parsed(number, json.dumps(row, ensure_ascii=False, default=str), row)


def _plain(value: Any, kind: Any) -> Any:
    """A value of the Arrow type `kind`, with JSON that is stored as text read."""
    import pyarrow as pa

    if value is None or pa.types.is_primitive(kind) or pa.types.is_string(kind):
        return value
    if isinstance(kind, pa.JsonType):
        return json.loads(value)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return [_plain(each, kind.value_type) for each in value]
    if pa.types.is_struct(kind):
        return {field.name: _plain(value[field.name], field.type) for field in kind}
    return value


_PARSERS: dict[str, Callable[[Path], Iterator[Read]]] = {
    "json": _json,
    "csv": lambda file: _table(file, ","),
    "tsv": lambda file: _table(file, "\t"),
    "parquet": _parquet,
    "arrow": _arrow,
    "text": _text,
}
