"""The judges' answers on disk: each is paid for once."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sqlite3
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from megatron_collab.llm.answer import Field, checked

LONGEST = 1 << 20  # bytes of an answer
_BUSY = 60.0  # seconds to wait for another process's write
_OWN = 0o600  # what users say and judges answer is nobody else's


class Cache:
    """A persistent map from questions to their answers. Several processes may share a folder.

    Each node has its own file there: SQLite's write-ahead log needs shared memory, which network file systems lack.
    `counters` counts what was damaged, entries or the whole file, and is as if it were not there.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        self.counters: Counter[str] = Counter()
        file = folder / f"{socket.gethostname()}.sqlite"
        with FileLock(file.with_suffix(".lock"), mode=_OWN):  # SQLite does not wait where two set the journal's mode
            os.close(os.open(file, os.O_CREAT | os.O_RDWR, _OWN))
            file.chmod(_OWN)  # one of an earlier version
            try:
                self._file = _opened(file)
            except sqlite3.OperationalError:  # as a full disk
                raise
            except sqlite3.DatabaseError:  # it is none any more
                self.counters["damaged"] += 1
                file.write_bytes(b"")
                self._file = _opened(file)

    def get(self, key: str, fields: Sequence[Field]) -> dict[str, Any] | None:
        """The answer with the values of `fields`; None where there is none, or it is damaged."""
        query = "SELECT substr(CAST(answer AS BLOB), 1, ?) FROM answers WHERE key = ?"
        row = self._file.execute(query, (LONGEST + 1, key)).fetchone()
        if row is None:
            return None
        try:
            if len(row[0]) > LONGEST:
                raise ValueError("too long")
            return checked(json.loads(row[0]), fields)
        except (ValueError, TypeError, LookupError, RecursionError):  # MalformedAnswer is a ValueError
            self.counters["damaged"] += 1
            return None

    def put(self, key: str, answer: dict[str, Any]) -> None:
        """Store an answer, in place of the one that is there."""
        self._file.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, json.dumps(answer)))


def _opened(file: Path) -> sqlite3.Connection:
    opened = sqlite3.connect(file, timeout=_BUSY, isolation_level=None)
    opened.execute("PRAGMA journal_mode=WAL")
    opened.execute("PRAGMA synchronous=NORMAL")  # a crash of the machine may lose the last answers
    opened.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT) WITHOUT ROWID")
    return opened


def key_of(question: dict[str, Any]) -> str:
    """A digest of everything that an answer depends on; `question` is JSON."""
    return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()
