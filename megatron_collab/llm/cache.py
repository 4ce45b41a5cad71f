"""Cache of language models' answers on disk: a question is paid for once, also after a resume."""

from __future__ import annotations

import hashlib
import json
import socket
import sqlite3
from pathlib import Path
from typing import Any

_BUSY = 60.0  # seconds to wait for another process's write


class Cache:
    """A persistent map from questions to the values of their answers; several processes may share a folder.

    Each node has its own file there: SQLite's write-ahead log needs shared memory, which a network file system does
    not have. Raises sqlite3.Error where the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = sqlite3.connect(folder / f"{socket.gethostname()}.sqlite", timeout=_BUSY, isolation_level=None)
        self._file.execute("PRAGMA journal_mode=WAL")
        self._file.execute("PRAGMA synchronous=NORMAL")  # a crash of the machine may lose the last answers
        self._file.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT) WITHOUT ROWID")

    def get(self, key: str) -> dict[str, Any] | None:
        row = self._file.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def put(self, key: str, answer: dict[str, Any]) -> None:
        self._file.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, json.dumps(answer)))


def key_of(question: dict[str, Any]) -> str:
    """A digest of everything that an answer depends on; `question` is JSON."""
    return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()
