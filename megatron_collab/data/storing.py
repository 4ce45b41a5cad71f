"""The rows of a file as Arrow on disk, mapped into memory: parsed once, by whichever process of the run is first.

Two columns: `row` is its JSON, `number` says where it is in the file. Rows keep what they have, and no more: neither do
columns get one type, nor do rows get the columns of others. A JSON file beside it, written last, says what it holds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from megatron_collab.data.parsing import NAMED, Parsed, Unreadable, parse, refused
from megatron_collab.runtime import files

if TYPE_CHECKING:
    import pyarrow as pa

_BATCH_BYTES = 1 << 20  # characters of the rows that are written together
_FORMAT = 1  # of what is written: raise it where that changes


@dataclass(frozen=True)
class StoredRows:
    """The rows of a file: JSON texts and numbers, Arrow's; the names of all columns; a digest that tells it apart."""

    file: str
    texts: pa.ChunkedArray
    numbers: pa.ChunkedArray
    columns: tuple[str, ...]
    digest: str

    def __len__(self) -> int:
        return len(self.texts)


def stored(file: str, where: str, cache: Path) -> StoredRows:
    """The rows of `file`, from `cache`, where they are written unless they are there already.

    Raises ValueError, which begins with `where`, for what cannot be read.
    """
    import pyarrow as pa

    found = Path(file).stat()
    of = [str(Path(file).absolute()), found.st_size, found.st_mtime_ns, _FORMAT]
    digest = hashlib.blake2b(json.dumps(of).encode(), digest_size=8).hexdigest()
    arrow, about = cache / f"rows-{digest}.arrow", cache / f"rows-{digest}.json"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f".rows-{digest}.lock"):
        if not about.is_file():
            files.replace(about, json.dumps({"file": file, "columns": _write(Path(file), where, arrow)}))
    table = pa.ipc.open_file(pa.memory_map(str(arrow))).read_all()
    columns = tuple(json.loads(about.read_text())["columns"])
    return StoredRows(file, table["row"], table["number"], columns, digest)


def _write(file: Path, where: str, arrow: Path) -> list[str]:
    """Write the rows of `file`; the names of their columns, as they first appear."""
    import pyarrow as pa

    schema = pa.schema([("row", pa.string()), ("number", pa.int64())])
    columns: dict[str, None] = {}
    faults, bad, rows = list[Unreadable](), 0, 0
    draft = arrow.with_suffix(".unfinished")
    try:
        with files.writing(draft), pa.OSFile(str(draft), "wb") as out, pa.ipc.new_file(out, schema) as writer:
            batch, size = list[Parsed](), 0
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
    except Unreadable as error:
        at = where if error.row is None else f"{where} row {error.row}"
        raise ValueError(f"{at}: {error}") from error
    if faults:
        first, *others = faults
        raise ValueError(refused(f"{where} row {first.row}: {first}", [each.row for each in others], bad, rows))
    draft.replace(arrow)
    return list(columns)


def _batch(rows: list[Parsed], schema: pa.Schema) -> Any:
    import pyarrow as pa

    given: Mapping[str, list[Any]] = {"row": [row.text for row in rows], "number": [row.number for row in rows]}
    return pa.RecordBatch.from_pydict(given, schema)
