"""Atomic writes of files that are read on resume, bounded reads of files from outside, and temporary folders that are
removed with their process.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError

from megatron_collab.runtime.process import RunStopped


def _cache() -> Path:
    """The user's folder of caches, or one in the temporary folder if there is no home folder to write to."""
    with suppress(OSError, RuntimeError):
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    return Path(tempfile.gettempdir()) / f"cache-{os.getuid()}"


CACHE = _cache()
# PyTorch's folder of compiled code: by default in the temporary folder, but worth keeping like other caches.
COMPILE_CACHE = ("TORCHINDUCTOR_CACHE_DIR", str(CACHE / "torchinductor"))
LONGEST_TEXT = 1 << 26  # bytes of a file that is read whole
_KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}
_POINTER, _LONGEST_POINTER = b"version https://git-lfs", 1024  # how a pointer begins, and its bytes
_PREFIX = "mgcollab-"
_ROOT_LENGTH = 25  # characters: a socket's path has at most 107; Ray needs 64 of them, the folder's name 18
_ATTEMPTS, _PAUSE = 200, 0.1  # pause in seconds: on a busy machine processes that were just ended write for long


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Turn an OSError or SafetensorError within the block into a RunStopped that names `file`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise _unwritten(file, error) from error


def full_disk(error: BaseException) -> RunStopped | None:
    """What `error` means if it is an OSError of a full disk or quota; None for any other error."""
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return _unwritten(getattr(error, "filename", None) or "a file of the run", error) if is_full else None


def _unwritten(file: Path | str, error: BaseException) -> RunStopped:
    reason = getattr(error, "strerror", None) or error
    advice = "free space there; the same command resumes from the last checkpoint"
    return RunStopped(f"{file}: cannot be written: {reason}; {advice}")


def replace(file: Path, content: str | bytes) -> None:
    """Write `file` atomically: readers see the old or the new content, even if the process or machine stops midway.

    Raises RunStopped if it cannot be written.
    """
    with writing(file), draft_of(file) as out:
        out.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def draft_of(file: Path) -> Iterator[BinaryIO]:
    """A stream to a draft that becomes `file` at the end of the block. Nothing is left of it if the block fails: on a
    full disk it would take the place of a checkpoint.
    """
    draft = file.with_name(f"{file.name}.tmp")
    try:
        with draft.open("wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        draft.replace(file)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def irregular(file: Path) -> str:
    """Why `file` must not be read: a pipe, a device or a socket may never end, a pointer stands for content elsewhere.

    Empty for any other.
    """
    kind = _KINDS.get(stat.S_IFMT((status := file.stat()).st_mode))
    if kind:
        return f"is {kind}, not a file; write its content to a file"
    if stat.S_ISREG(status.st_mode) and status.st_size < _LONGEST_POINTER:
        with file.open("rb") as stream:
            if stream.read(len(_POINTER)) == _POINTER:
                return "is a pointer of Git LFS, without the content; get it with git lfs pull"
    return ""


def read_text(file: Path, longest: int = LONGEST_TEXT) -> str:
    """The text of `file`. Raises ValueError if it is no regular file, longer than `longest` bytes, or not UTF-8."""
    reason = irregular(file)
    if not reason:
        with file.open("rb") as stream:
            content = stream.read(longest + 1)
        reason = f"has more than {longest} bytes; give a shorter one" if len(content) > longest else ""
    if reason:
        raise ValueError(f"{file}: {reason}")
    return content.decode().replace("\r\n", "\n")


class ScratchFolder:
    """A new folder `path` below the temporary folder, or below /tmp if that path is too long for sockets.

    If the temporary folder is itself a ScratchFolder, the new one is created beside it.

    The process holds a lock on its folder. Folders without a lock, left by killed processes, are removed when the next
    ScratchFolder of any run is created.
    """

    def __init__(self) -> None:
        remove_abandoned()
        self._lock: int | None = None
        while self._lock is None:  # another process may remove it as abandoned before it is locked
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_root()))
            with suppress(FileNotFoundError):
                lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                fcntl.flock(lock, fcntl.LOCK_EX)
                if self.path.exists():
                    self._lock = lock
                else:
                    os.close(lock)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the folder and its contents; later calls do nothing."""
        if self._lock is None:
            return
        for _ in range(_ATTEMPTS):
            shutil.rmtree(self.path, ignore_errors=True)
            if not self.path.exists():
                break
            time.sleep(_PAUSE)
        os.close(self._lock)
        self._lock = None


def remove_abandoned() -> None:
    """Remove the folders that killed processes of this user left behind."""
    for folder in _root().glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another user's, or removed by another process
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _root() -> Path:
    root = Path(tempfile.gettempdir())
    if root.name.startswith(_PREFIX):
        root = root.parent
    return root if len(str(root)) <= _ROOT_LENGTH else Path("/tmp")
