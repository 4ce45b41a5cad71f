"""On-disk cache of judge answers, so that each is paid for only once."""

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
from megatron_collab.runtime.redact import LONGEST_EXCERPT

LONGEST = (1 << 20) + 12 * LONGEST_EXCERPT  # bytes of an answer's values and text; 12 of a character, at most
_BUSY = 60.0  # seconds to wait for another process's write
_PRIVATE = 0o600  # only the owner may read conversations and verdicts


class Cache:
    """Persistent map from questions to answers. Several processes may share a folder.

    Each node has its own file: SQLite's write-ahead log needs shared memory, which network file systems lack.
    `counters["damaged"]` counts damaged entries and files, which are treated as absent.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        self.counters: Counter[str] = Counter()
        file = folder / f"{socket.gethostname()}.sqlite"
        with FileLock(file.with_suffix(".lock"), mode=_PRIVATE):  # SQLite does not wait if two set the journal mode
            os.close(os.open(file, os.O_CREAT | os.O_RDWR, _PRIVATE))
            file.chmod(_PRIVATE)  # files of earlier versions had other permissions
            try:
                self._connection = _connect(file)
            except sqlite3.OperationalError:  # e.g. a full disk
                raise
            except sqlite3.DatabaseError:  # the file is corrupt
                self.counters["damaged"] += 1
                file.write_bytes(b"")
                self._connection = _connect(file)

    def get(self, key: str, fields: Sequence[Field]) -> dict[str, Any] | None:
        """The cached answer, with valid values of `fields`; None if there is no entry or it is damaged."""
        query = "SELECT substr(CAST(answer AS BLOB), 1, ?) FROM answers WHERE key = ?"
        row = self._connection.execute(query, (LONGEST + 1, key)).fetchone()
        if row is None:
            return None
        try:
            if len(row[0]) > LONGEST:
                raise ValueError("too long")
            answer: dict[str, Any] = json.loads(row[0])
            return {**answer, **checked(answer, fields)}
        except (ValueError, TypeError, LookupError, RecursionError):  # MalformedAnswer is a ValueError
            self.counters["damaged"] += 1
            return None

    def put(self, key: str, answer: dict[str, Any]) -> None:
        """Store an answer; replaces an existing one."""
        self._connection.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, json.dumps(answer)))


def _connect(file: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(file, timeout=_BUSY, isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")  # a crash of the machine may lose the last answers
    connection.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT) WITHOUT ROWID")
    return connection


def key_of(question: dict[str, Any]) -> str:
    """A digest of everything that an answer depends on; `question` is JSON."""
    return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()
