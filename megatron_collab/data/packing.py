"""The kind of a file by its name and by its first bytes; its content, decompressed if necessary."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# suffix: how a file with it is read
KINDS = {
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
CUT = "it may be cut off or of another format; write it again, or correct its name"
_TABLES = ("parquet", "arrow")
# First bytes: what the file is, and its suffix.
_PACKED = {
    b"\x1f\x8b": ("compressed with gzip", ".gz"),
    b"BZh": ("compressed with bzip2", ".bz2"),
    b"\xfd7zXZ\0": ("compressed with xz", ".xz"),
    b"\x28\xb5\x2f\xfd": ("compressed with Zstandard", ".zst"),
}
_OTHER = {
    b"PAR1": ("Parquet", ".parquet"),
    b"ARROW1": ("Arrow", ".arrow"),
    b"PK\x03\x04": ("an archive (zip), or a workbook", ""),
    b"7z\xbc\xaf\x27\x1c": ("an archive (7z)", ""),
    b"SQLite format 3\0": ("a data base (SQLite)", ""),
    b"%PDF": ("a PDF", ""),
}
_WIDE = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


def suffix_of(file: Path | str) -> str:
    """The suffix of the format, without that of a compression."""
    path = Path(file)
    return (path.with_suffix("") if path.suffix in COMPRESSED else path).suffix


def kind_of(file: Path | str) -> str:
    """How a file is read, by its name; as JSON if the suffix is unknown."""
    return KINDS.get(suffix_of(file), "json")


def misnamed(file: Path) -> str | None:
    """How the first bytes of `file` contradict its name, with a remedy; None if they agree."""
    packed = file.suffix if file.suffix in COMPRESSED else ""
    with file.open("rb") as raw:
        head = raw.read(64)
    compression = next((description for magic, description in _PACKED.items() if head.startswith(magic)), None)
    if head and packed and (not compression or compression[1] != packed):
        return f"is not compressed as {packed} says; correct its name, or copy it again"
    if compression and not packed:
        return f"is {compression[0]}, which its name does not say; rename it to {file.name}{compression[1]}"
    if packed:
        return None
    other = next((description for magic, description in _OTHER.items() if head.startswith(magic)), None)
    if kind_of(file) in _TABLES:
        return None  # the readers of tables report the fault
    if other:
        remedy = f"rename it to {file.stem}{other[1]}" if other[1] else "give the files in it, as JSONL, CSV or Parquet"
        return f"is {other[0]}, not text; {remedy}"
    wide = next((name for magic, name in _WIDE.items() if head.startswith(magic)), None)
    halves = [half for half in (head[::2], head[1::2]) if half]
    if wide is None and len(head) > 3 and any(not any(half) for half in halves) and any(head):
        wide = "UTF-16"
    return f"is text in {wide}; write it in UTF-8, as iconv -f {wide} -t UTF-8 does" if wide else None


@contextmanager
def content(file: Path) -> Iterator[Any]:
    """The bytes of `file`, decompressed, as a stream. A compressed table is read into memory to be seekable."""
    import pyarrow as pa

    openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    if file.suffix == ".zst":
        with pa.input_stream(str(file), compression="zstd") as packed:
            yield pa.BufferReader(packed.read()) if kind_of(file) in _TABLES else io.BufferedReader(packed)
        return
    with openers.get(file.suffix, open)(file, "rb") as stream:
        yield pa.BufferReader(stream.read()) if file.suffix in openers and kind_of(file) in _TABLES else stream
