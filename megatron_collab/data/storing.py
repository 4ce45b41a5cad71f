"""The rows of a file as memory-mapped Arrow on disk: parsed once, by the first process of the run that needs them.

Two columns: `row` is the JSON of a row, `number` its place in the file. Rows keep exactly their own columns: values are
not cast to a common type, and columns of other rows are not added. A JSON file beside it, written last, describes it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from megatron_collab.data.parsing import NAMED, ParsedRow, Unreadable, parse, refusal
from megatron_collab.runtime import files, screen

if TYPE_CHECKING:
    import pyarrow as pa

_BATCH_BYTES = 1 << 20  # characters of the rows written together
_FORMAT = 2  # version of the stored files: raise it if they change


@dataclass(frozen=True)
class StoredRows:
    """The rows of a file: JSON texts and numbers as Arrow, the names of all columns, a digest of the file's state."""

    file: str
    texts: pa.ChunkedArray
    numbers: pa.ChunkedArray
    columns: tuple[str, ...]
    digest: str

    def __len__(self) -> int:
        return len(self.texts)


def stored_rows(file: str, where: str, cache: Path) -> StoredRows:
    """The rows of `file`, read from `cache`, after writing them there unless that is done.

    Raises ValueError, which begins with `where`, if the file cannot be read.
    """
    stat = Path(file).stat()
    identity = [str(Path(file).absolute()), stat.st_size, stat.st_mtime_ns, _FORMAT]
    digest = hashlib.blake2b(json.dumps(identity).encode(), digest_size=8).hexdigest()
    arrow, about = cache / f"rows-{digest}.arrow", cache / f"rows-{digest}.json"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f".rows-{digest}.lock"):
        with suppress(OSError, ValueError, KeyError, TypeError):  # missing, or damaged by a fault of the disk
            return _stored(file, arrow, about, digest)
        with screen.phase(f"reading {Path(file).name}"):
            columns = _write(Path(file), where, arrow)
        files.replace(about, json.dumps({"file": file, "columns": columns}))
        return _stored(file, arrow, about, digest)


def _stored(file: str, arrow: Path, about: Path, digest: str) -> StoredRows:
    """The rows in `arrow` and `about`. Raises an error of Arrow, of JSON or of their content if one is not whole."""
    import pyarrow as pa

    table = pa.ipc.open_file(pa.memory_map(str(arrow))).read_all()
    names = tuple(json.loads(about.read_text())["columns"])
    return StoredRows(file, table["row"], table["number"], names, digest)


def _write(file: Path, where: str, arrow: Path) -> list[str]:
    """Writes the rows of `file`; returns their column names in order of first appearance."""
    import pyarrow as pa

    schema = pa.schema([("row", pa.string()), ("number", pa.int64())])
    columns: dict[str, None] = {}
    faults, bad, rows = list[Unreadable](), 0, 0
    try:
        with files.writing(arrow), files.draft_of(arrow) as out, pa.ipc.new_file(out, schema) as writer:
            batch, size = list[ParsedRow](), 0
            for parsed in parse(file):
                rows += 1
                if isinstance(parsed, Unreadable):
                    bad += 1
                    faults += [parsed] if bad <= NAMED else []
                    continue
                columns.update(dict.fromkeys(parsed.row))
                batch.append(parsed)
                size += len(parsed.text)
                if size > _BATCH_BYTES:
                    writer.write_batch(_batch(batch, schema))
                    batch, size = [], 0
            writer.write_batch(_batch(batch, schema))
            if faults:
                first, *more = faults
                raise ValueError(refusal(f"{where} row {first.row}: {first}", [fault.row for fault in more], bad, rows))
    except Unreadable as error:
        location = where if error.row is None else f"{where} row {error.row}"
        raise ValueError(f"{location}: {error}") from error
    return list(columns)


def _batch(rows: list[ParsedRow], schema: pa.Schema) -> Any:
    import pyarrow as pa

    columns: Mapping[str, list[Any]] = {"row": [row.text for row in rows], "number": [row.number for row in rows]}
    return pa.RecordBatch.from_pydict(columns, schema)
