"""The lock on run.dir: only one run at a time; the error of a second run names the holder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from socket import gethostname
from typing import Self

from megatron_collab.runtime.process import under_torchrun
from megatron_collab.settings import ConfigError

FILE = ".lock"
_LONGEST = 4096 - 256  # bytes: Linux allows 4,096 for a path, and the files of a run are below its folder


class RunLock:
    """Locks run.dir, created if it is missing, for this process and the program that replaces it (exec).

    The lock is released when the `with` block or the process ends. Folders that it created are removed with the block
    if they are still empty. Raises ConfigError if another process holds the lock, or if the folder is not writable.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._file = folder, folder / FILE
        self._created: list[Path] = []

    def __enter__(self) -> Self:
        try:
            if len(os.fsencode(self._folder.absolute())) > _LONGEST:
                raise OSError(errno.ENAMETOOLONG, f"{os.strerror(errno.ENAMETOOLONG)}, the files in it included")
            self._created = [folder for folder in (self._folder, *self._folder.parents) if not folder.exists()]
            while (descriptor := self._acquire()) is None:
                pass  # its last holder has removed it meanwhile
        except BlockingIOError as error:
            raise ConfigError(f"run.dir={self._folder}: {self._holder()}") from error
        except OSError as error:
            reason = f"cannot be used ({error.strerror}: {error.filename or self._file})"
            raise ConfigError(f"run.dir={self._folder}: {reason}; choose another run.dir") from error
        self._descriptor = descriptor
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # another process has written a file to the folder
            if self._created and [entry.name for entry in self._folder.iterdir()] == [FILE]:
                self._file.unlink()
                for folder in self._created:
                    folder.rmdir()
        os.close(self._descriptor)

    def _acquire(self) -> int | None:
        """The file descriptor that holds the lock; None if the file was removed meanwhile."""
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not self._in_place(descriptor):
                os.close(descriptor)
                return None
            since = datetime.now(UTC).isoformat(timespec="seconds")
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": gethostname(), "since": since}).encode(), 0)
            os.set_inheritable(descriptor, not under_torchrun())  # ranks do not exec
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def _in_place(self, descriptor: int) -> bool:
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(descriptor), self._file.stat())
        return False

    def _holder(self) -> str:
        """The holder of the lock, and what to do."""
        hint = "wait until it ends, or choose another run.dir"
        try:
            record = json.loads(self._file.read_text())
            holder = f"process {record['pid']} on {record['host']} since {record['since']}"
            if record["host"] != gethostname():
                hint += f"; if that host is gone, remove {self._file}"
        except (OSError, ValueError, KeyError, TypeError):  # not written yet
            holder = "another process"
        return f"in use by {holder}; {hint}"
