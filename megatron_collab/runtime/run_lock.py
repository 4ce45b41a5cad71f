"""The lock on run.dir: one run at a time, and a second one is told whose it is."""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from socket import gethostname
from typing import Self

from megatron_collab.config import ConfigError
from megatron_collab.runtime.process import under_torchrun

FILE = ".lock"


class RunLock:
    """The folder run.dir, made where it is missing, for this process and the program that it becomes (exec).

    It is free again when the `with` block ends or the process does, however it does. A folder that was made for it and
    is still empty goes with the block. Raises ConfigError where another process has it, or it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._file = folder, folder / FILE
        self._made: list[Path] = []

    def __enter__(self) -> Self:
        try:
            self._made = [one for one in (self._folder, *self._folder.parents) if not one.exists()]
            while (held := self._taken()) is None:
                pass  # its last holder has removed it meanwhile
        except BlockingIOError as error:
            raise ConfigError(f"run.dir={self._folder}: {self._holder()}") from error
        except OSError as error:
            said = f"cannot be used ({error.strerror}: {error.filename or self._file})"
            raise ConfigError(f"run.dir={self._folder}: {said}; choose another run.dir") from error
        self._held = held
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # another process has put something there
            if self._made and [one.name for one in self._folder.iterdir()] == [FILE]:
                self._file.unlink()
                for folder in self._made:
                    folder.rmdir()
        os.close(self._held)

    def _taken(self) -> int | None:
        """The descriptor that holds the lock; None where the file is no more at its place."""
        self._folder.mkdir(parents=True, exist_ok=True)
        held = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not self._in_place(held):
                os.close(held)
                return None
            at = datetime.now(UTC).isoformat(timespec="seconds")
            os.ftruncate(held, 0)
            os.pwrite(held, json.dumps({"pid": os.getpid(), "host": gethostname(), "since": at}).encode(), 0)
            os.set_inheritable(held, not under_torchrun())  # a rank becomes no other program
        except OSError:
            os.close(held)
            raise
        return held

    def _in_place(self, held: int) -> bool:
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(held), self._file.stat())
        return False

    def _holder(self) -> str:
        """Who has it, and the way out."""
        way_out = "wait until it ends, or choose another run.dir"
        try:
            found = json.loads(self._file.read_text())
            who = f"process {found['pid']} on {found['host']} since {found['since']}"
            if found["host"] != gethostname():
                way_out += f"; if that host is gone, remove {self._file}"
        except (OSError, ValueError, KeyError, TypeError):  # it has only just taken it
            who = "another process"
        return f"in use by {who}; {way_out}"
