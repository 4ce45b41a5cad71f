"""The rows of one file as checked JSON texts. Every file, whatever it contains, gives rows or Unreadable.

JSON is kept as it was written; every value of CSV and TSV stays a text. Lines end at \\n only. A line of JSON that
cannot be read is yielded as Unreadable among the rows, so that a message can name all of them. A fault that makes the
rest of a file unreadable is raised.
"""

from __future__ import annotations

import csv
import json
import re
import zlib
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, count
from lzma import LZMAError
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from megatron_collab.data.packing import CUT, content, kind_of, misnamed, suffix_of
from megatron_collab.runtime import files
from megatron_collab.settings.documents import DEPTH, TooDeep, is_too_deep, parse_json

ROW_BYTES = 64 << 20  # maximum length of a row
NAMED = 5  # maximum number of rows that a message names
_BATCH = 16  # rows read from a table at once: each may have ROW_BYTES
_KINDS = {bool: "true or false", int: "a number", float: "a number", str: "a text", list: "a list", dict: "an object"}
_SEPARATOR = re.compile(r"[;\t|,]")  # of columns
_MEMBER = re.compile(r"[^\s,]")  # the beginning of the next row in a JSON list


class Unreadable(ValueError):
    """The reason why a file, or its row number `row`, cannot be read, with a remedy."""

    def __init__(self, why: str, row: int | None = None) -> None:
        super().__init__(why)
        self.row = row


class Number(float):
    """A JSON number with a fraction or an exponent; as a text it is what was written, such as 0.10 or 1e22."""

    text: str

    def __new__(cls, text: str) -> Number:
        number = super().__new__(cls, text)
        number.text = text
        return number

    def __str__(self) -> str:
        return self.text


_DECODER = json.JSONDecoder(parse_float=Number)
value_of: Callable[[str], Any] = _DECODER.decode  # of a JSON text


def kind_of_value(value: Any) -> str:
    """What a value of a row is, for messages."""
    if isinstance(value, float) and not isfinite(value):
        return "not a finite number"
    return next((name for kind, name in _KINDS.items() if isinstance(value, kind)), "null")


def refusal(first: str, next_rows: Sequence[object], bad: int, rows: int) -> str:
    """The message `first` about the first of `bad` bad rows, with the numbers of the next few."""
    also = f"; also row{'s' if len(next_rows) > 1 else ''} {', '.join(map(str, next_rows))}" if next_rows else ""
    more = f" and {bad - 1 - len(next_rows)} more" if bad - 1 > len(next_rows) else ""
    return first + (f" ({bad} of {rows} rows are refused{also}{more})" if bad > 1 else "")


class ParsedRow(NamedTuple):
    """A row: its number for messages, from 1 (of JSON lines and texts that of the line), its JSON text, its value."""

    number: int
    text: str
    row: Mapping[str, Any]


Read = ParsedRow | Unreadable


def parse(file: Path) -> Iterator[Read]:
    """The rows of `file` in order; the suffix selects the parser. Raises Unreadable."""
    try:
        if fault := files.irregular(file) or misnamed(file):
            raise Unreadable(fault)
        for read in _PARSERS[kind_of(file)](file):
            yield read if isinstance(read, Unreadable) or len(read.text) <= ROW_BYTES else _length_fault(read.number)
    except Unreadable:
        raise
    except (EOFError, LZMAError, zlib.error) as error:
        raise Unreadable(f"its compressed content is cut off or damaged ({error}); copy it again") from error
    except (OSError, ValueError, ArithmeticError, LookupError, NotImplementedError, MemoryError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise Unreadable(f"cannot be read as {suffix_of(file)[1:]} ({reason}); {CUT}") from error


def _raw_lines(stream: Any) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of each line, including its line ending. Raises Unreadable for a line without end."""
    for number in count(1):
        raw = stream.readline(ROW_BYTES + 1)
        if len(raw) > ROW_BYTES:
            raise _length_fault(number)
        if not raw:
            return
        yield number, raw


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Number and text of each line, including its line ending."""
    with content(file) as stream:
        for number, raw in _raw_lines(stream):
            yield number, _decode(raw, number)


def _decode(raw: bytes, number: int | None) -> str:
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = f"its byte {error.start + 1}, {raw[error.start]:#04x}, is not UTF-8"
        remedy = "write the file in UTF-8; of a text in Latin-1, iconv -f LATIN1 -t UTF-8 makes it"
        raise Unreadable(f"{byte}; {remedy}", number) from error
    if "\0" in text:
        raise Unreadable("contains NUL bytes, so the file is damaged or not text; write it again", number)
    return text


def _json(file: Path) -> Iterator[Read]:
    """JSON with one row per line, or one document: a list of rows, or a single row."""
    with content(file) as stream:
        lines = (raw.removeprefix(BOM_UTF8).strip() for raw in iter(lambda: stream.readline(ROW_BYTES), b""))
        first = next((line for line in lines if line), b"")
    if first.startswith(b"[") or (first and suffix_of(file) != ".jsonl" and not _is_json(first)):
        yield from _document(file)
        return
    with content(file) as stream:
        for number, raw in _raw_lines(stream):
            try:
                if text := _decode(raw, number).strip():
                    yield ParsedRow(number, text, _row(text, number))
            except Unreadable as error:
                yield error


def _document(file: Path) -> Iterator[ParsedRow]:
    with content(file) as stream:
        text = _decode(stream.read(), None)
    try:
        document = json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise _nesting_fault(None) from error
    except Unreadable:
        raise
    except ValueError as error:
        raise Unreadable(f"is not JSON ({error}); {CUT}") from error
    rows, end = (document, text.index("[") + 1) if isinstance(document, list) else ([document], 0)
    for number, row in enumerate(rows, 1):
        begin = _MEMBER.search(text, end).start()  # type: ignore[union-attr]
        _, end = _DECODER.raw_decode(text, begin)
        _check(row, text[begin:end], number)
        yield ParsedRow(number, text[begin:end], row)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises Unreadable if it repeats a name, of which Python would keep the last value."""
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        raise Unreadable(f"names {_repeated(names)!r} twice in an object; remove one of them")
    return members


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _row(text: str, number: int) -> Mapping[str, Any]:
    try:
        row = json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise _nesting_fault(number) from error
    except Unreadable as error:
        raise Unreadable(str(error), number) from error
    except json.JSONDecodeError as error:
        reason = f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
        raise Unreadable(f"is not JSON ({reason}); correct the line, or remove it", number) from error
    except ValueError as error:  # a number of more than 4,300 digits
        raise Unreadable(f"is not readable JSON ({error}); correct the line, or remove it", number) from error
    _check(row, text, number)
    checked: Mapping[str, Any] = row
    return checked


def _check(row: Any, text: str, number: int) -> None:
    """Raises Unreadable if the row is no object, is nested too deep, or holds half a surrogate pair."""
    if not isinstance(row, dict):
        raise Unreadable(f"is {kind_of_value(row)}, not a JSON object; give an object with the columns", number)
    if text.count("[") + text.count("{") > DEPTH and is_too_deep(row):
        raise _nesting_fault(number)
    if "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            raise Unreadable(f"holds {half}, half a pair of surrogates; correct it, or remove it", number) from error


def json_in(text: str, otherwise: Any) -> Any:
    """The value of a JSON text; `otherwise` if it is not JSON. Raises ValueError if it is nested too deep for a row."""
    try:
        return parse_json(text)
    except TooDeep as error:
        raise TooDeep(f"{error}; flatten it") from error
    except ValueError:
        return otherwise


def _length_fault(number: int) -> Unreadable:
    return Unreadable(f"is longer than {ROW_BYTES >> 20} MiB; write one row a line, or remove the row", number)


def _nesting_fault(number: int | None) -> Unreadable:
    return Unreadable(f"nests lists and objects more than {DEPTH} deep; flatten or remove it", number)


def _repeated(names: Sequence[str]) -> str | None:
    """The first name that there is twice; None if there is none."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


def _table(file: Path, delimiter: str) -> Iterator[ParsedRow]:
    """Every value stays a text as it was written; empty values become null."""
    csv.field_size_limit(ROW_BYTES)
    lines, number = (line for _, line in _lines(file)), 1
    header = next(lines, "")
    if delimiter not in header and (other := _SEPARATOR.search(header)):
        raise Unreadable(f"separates columns by {other[0]!r}, not by {delimiter!r}; write the file with the latter", 1)
    reader = csv.reader(chain([header], lines), delimiter=delimiter, strict=True)
    try:
        columns = next(reader, [])
        if (duplicate := _repeated(columns)) is not None:
            raise Unreadable(f"names the column {duplicate!r} twice; rename one of them", 1)
        number = reader.line_num + 1
        for values in reader:
            if len(values) > len(columns):
                raise Unreadable(f"has {len(values)} values for {len(columns)} columns; quote values", number)
            if values:
                values += [""] * (len(columns) - len(values))
                row = {name: value or None for name, value in zip(columns, values, strict=True)}
                yield ParsedRow(number, json.dumps(row, ensure_ascii=False), row)
            number = reader.line_num + 1
    except csv.Error as error:
        raise Unreadable(f"cannot be read as a table ({error}); quote values, and close quotes", number) from error


def _text(file: Path) -> Iterator[Read]:
    """One row per line; JSON if the first line with text begins with {."""
    begins = next((line.strip() for _, line in _lines(file) if line.strip()), "")
    if begins.startswith("{"):
        yield from _json(file)
        return
    for number, line in _lines(file):
        row = {"text": line.rstrip("\r\n")}
        yield ParsedRow(number, json.dumps(row, ensure_ascii=False), row)


def _parquet(file: Path) -> Iterator[ParsedRow]:
    import pyarrow.parquet as pq

    with content(file) as stream:
        source = pq.ParquetFile(stream)
        yield from _rows(source.iter_batches(_BATCH))


def _arrow(file: Path) -> Iterator[ParsedRow]:
    """The rows of an Arrow file, or of a stream as save_to_disk writes it."""
    from pyarrow import ipc

    with content(file) as stream:
        is_file = stream.read(6) == b"ARROW1"
        stream.seek(0)
        reader = ipc.open_file(stream) if is_file else ipc.open_stream(stream)
        batches = (reader.get_batch(at) for at in range(reader.num_record_batches)) if is_file else reader
        yield from _rows(batches)


def _rows(batches: Iterable[Any]) -> Iterator[ParsedRow]:
    """The rows of Arrow record batches; dates, bytes and decimals become texts."""
    number = 0
    for record_batch in batches:
        record_batch.validate(full=True)  # values out of bounds would crash the process
        for begin in range(0, len(record_batch), _BATCH):
            batch = record_batch.slice(begin, _BATCH)
            for row in batch.to_pylist():
                number += 1
                row = {name: _plain(row[name], batch.schema.field(name).type) for name in row}
                yield ParsedRow(number, json.dumps(row, ensure_ascii=False, default=str), row)


def _plain(value: Any, kind: Any) -> Any:
    """A value of the Arrow type `kind`: a whole number without a fraction, JSON that is stored as text parsed."""
    import pyarrow as pa

    if isinstance(value, float) and value.is_integer():
        return int(value)  # a column of whole numbers with a gap has 4.0 for 4
    if value is None or pa.types.is_primitive(kind) or pa.types.is_string(kind):
        return value
    if isinstance(kind, pa.JsonType):
        return parse_json(value)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return [_plain(entry, kind.value_type) for entry in value]
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
