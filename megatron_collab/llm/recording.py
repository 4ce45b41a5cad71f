"""Recorded calls of language models on disk: question, answer, usage.

A recording is a folder of shards. Each process appends to its own shard, and every answer is recorded before it is
used. A shard begins with a line of JSON ({format, run}); each call is a header with the digests for lookup, followed by
the call as JSON, compressed by zstd with a checksum. If a process or machine died while writing, its shard is read up
to the incomplete call.

A call is looked up by its conversation (caller.py), its question, and how often the conversation sent that question
before. If several calls match, the latest counts: the conversation was played again.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import secrets
import socket
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zstandard

from megatron_collab.runtime import files

SUFFIX = ".calls"
FORMAT = 1
LONGEST = 1 << 26  # bytes of one call
_MOST = 253402300799  # of a number: seconds of the year 9999, the last that a date can be
_LINE = 1 << 12  # bytes of a shard's first line, at most
_DIGEST = 16  # bytes
_HEAD = struct.Struct(f">Id{_DIGEST}s{_DIGEST}s{_DIGEST}s")  # bytes of the call, its time, digests: key, question, name
_CRC = struct.Struct(">I")  # of the header, which it follows
_PRIVATE = 0o600  # only the owner may read conversations and verdicts
_COMPRESSOR, _DECOMPRESSOR = zstandard.ZstdCompressor(write_checksum=True), zstandard.ZstdDecompressor()
_INDEX: np.dtype[Any] = np.dtype([("key", f"S{_DIGEST}"), ("time", "f8"), ("shard", "i4"), ("at", "i8")])


@dataclass
class Usage:
    """Usage of an answer: tokens, US dollars (None: unknown), seconds of all requests including pauses.

    `version`: the model as its endpoint names it; `cached`: the answer came from the cache, so the rest is zero.
    """

    prompt_tokens: int = 0
    answer_tokens: int = 0
    usd: float | None = 0.0
    seconds: float = 0.0
    requests: int = 0
    version: str = ""
    cached: bool = False


@dataclass
class CallKey:
    """A question (JSON), the name of its conversation, and how often that conversation sent it before.

    `shared`: the answer does not depend on the conversation, as with judges, whose answers are cached.
    """

    name: str
    number: int
    question: Mapping[str, Any]
    shared: bool = False

    @cached_property
    def digest(self) -> bytes:
        return _digest(json.dumps(self.question, sort_keys=True).encode())

    @cached_property
    def key(self) -> bytes:
        return _digest(self.digest + f"{self.number}/{self.name}".encode())


@dataclass(frozen=True)
class Call:
    """A recorded call. `answer` is JSON.

    If the call `failed`, that holds the error's type and message, and `answer` the unusable text of the model, or None.
    """

    name: str
    number: int
    time: float  # seconds since 1970, of the answer
    question: dict[str, Any]
    answer: Any
    failed: tuple[str, str] | None
    taken: Usage


class StoredCall(NamedTuple):
    """A call as stored in a shard."""

    time: float
    key: bytes
    digest: bytes  # of the question as sent, before redaction
    name: bytes  # digest of the conversation's name
    content: bytes

    def call(self) -> Call:
        """Decode the call. Raises ValueError if it is damaged."""
        try:
            if not 0 <= zstandard.get_frame_parameters(self.content).content_size <= LONGEST:
                raise ValueError("too long")
            record = json.loads(_DECOMPRESSOR.decompress(self.content))
            failed = record["failed"] and (str(record["failed"][0]), str(record["failed"][1]))
            call = Call(**{**record, "failed": failed, "taken": Usage(**record["taken"])})
            if not _is_valid(call):
                raise ValueError("its fields have other types")
            return call
        except (zstandard.ZstdError, ValueError, TypeError, LookupError, RecursionError) as error:
            raise ValueError(f"a recorded call is damaged: {error}") from error

    def containing(self, call: Call) -> StoredCall:
        """A copy with the same lookup digests that contains `call`."""
        return self._replace(content=_compressed(call))


def _is_valid(call: Call) -> bool:
    """Whether the fields have their types, as far as readers rely on them."""
    question = call.question if isinstance(call.question, dict) else {}
    usage = {**vars(call.taken), "usd": call.taken.usd or 0.0}
    texts, messages = [call.name, usage.pop("version"), question.get("model")], question.get("messages") or []
    numbers = [call.number, call.time, *usage.values()]
    return (
        all(isinstance(text, str) for text in texts)
        and all(isinstance(number, int | float) and 0 <= number <= _MOST for number in numbers)
        and isinstance(messages, list)
        and all(isinstance(message, dict) for message in messages)
    )


class Shard:
    """A new file of a recording, to which calls are appended; the first call creates it."""

    def __init__(self, folder: Path, run: str) -> None:
        """`run`: name of the recorded run, such as its run.dir."""
        self.file = folder / f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}"
        self._run, self._out = run, -1

    def record(self, call_key: CallKey, call: Call) -> None:
        """Append a call. Raises RunStopped if it cannot be written."""
        self.append(
            StoredCall(call.time, call_key.key, call_key.digest, _digest(call_key.name.encode()), _compressed(call))
        )

    def append(self, stored: StoredCall) -> None:
        """As `record`. The call survives the death of the process; of the machine once its buffers are flushed."""
        head = _HEAD.pack(len(stored.content), stored.time, stored.key, stored.digest, stored.name)
        self._write(head + _CRC.pack(zlib.crc32(head)) + stored.content)

    def _write(self, content: bytes) -> None:
        with files.writing(self.file):
            if self._out < 0:
                self.file.parent.mkdir(0o700, parents=True, exist_ok=True)
                self._out = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, _PRIVATE)
                content = json.dumps({"format": FORMAT, "run": self._run}).encode() + b"\n" + content
            while content:
                content = content[os.write(self._out, content) :]


class Recording:
    """The calls in one or several folders, as of opening.

    About 50 bytes per call are held in memory. `torn` has a line for each shard that ends in the middle of a call.
    """

    def __init__(self, *folders: Path) -> None:
        """Raises ValueError if a folder is no recording, or one of a later version."""
        self.folders = folders
        self.runs: set[str] = set()
        self.torn: list[str] = []
        self.shards: list[Path] = []
        self._content: list[bytes | mmap.mmap] = []
        index: list[tuple[bytes, float, int, int]] = []
        questions, names = list[bytes](), list[bytes]()
        for folder in folders:
            paths = sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else []
            if not paths:
                raise ValueError(f"{folder}: holds no recorded calls (*{SUFFIX})")
            for shard in paths:
                for at, stored in self._read(shard):
                    index.append((stored.key, stored.time, len(self.shards), at))
                    questions.append(stored.digest)
                    names.append(stored.name)
                self.shards.append(shard)
        self._index = np.array(index, _INDEX)
        order = np.lexsort((self._index["at"], self._index["shard"], self._index["time"]))
        self._index = self._index[order]  # in the order of time
        self._by_key = _Sorted(self._index["key"])
        self._by_question = _Sorted(np.array(questions, f"S{_DIGEST}")[order])
        self._by_name = _Sorted(np.array(names, f"S{_DIGEST}")[order])

    def __len__(self) -> int:
        return len(self._index)

    def find(self, call_key: CallKey) -> Call | None:
        """The latest call with the same question and conversation; for a shared question, of any conversation.

        Raises ValueError if it is damaged.
        """
        numbers = self._by_key.find(call_key.key)
        if not len(numbers) and call_key.shared:
            numbers = self._by_question.find(call_key.digest)
        return self.stored(int(numbers[-1])).call() if len(numbers) else None

    def of(self, name: str) -> Iterator[Call]:
        """The calls of a conversation, in order of time."""
        return (self.stored(int(number)).call() for number in self._by_name.find(_digest(name.encode())))

    def stored(self, number: int) -> StoredCall:
        """The call with this number in order of time."""
        _, _, shard, at = self._index[number].item()
        content = self._content[shard]
        size, time, key, question, name = _HEAD.unpack_from(content, at)
        begin = at + _HEAD.size + _CRC.size
        return StoredCall(time, key, question, name, bytes(content[begin : begin + size]))

    def superseded(self) -> set[int]:
        """The numbers of the calls that a later call replaces."""
        last = {bytes(key): number for number, key in enumerate(self._index["key"])}
        return set(range(len(self))) - set(last.values())

    def _read(self, shard: Path) -> Iterator[tuple[int, StoredCall]]:
        """The calls of a shard without content, each with its offset in bytes."""
        if reason := files.irregular(shard):
            raise ValueError(f"{shard}: {reason}")
        with shard.open("rb") as file:
            first = file.readline(_LINE)
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if first else b""
        self._content.append(content)
        if first.endswith(b"\n") or len(first) == _LINE:
            try:
                header = json.loads(first)
                form, run = header["format"], str(header["run"])
            except (ValueError, TypeError, LookupError, RecursionError) as error:
                raise ValueError(f"{shard}: not a shard of a recording") from error
            if form != FORMAT:
                raise ValueError(f"{shard}: has format {form}, but this version reads {FORMAT}; update megatron-collab")
            self.runs.add(run)
            at = len(first)
        else:
            at = 0
        calls = 0
        while at + _HEAD.size + _CRC.size <= len(content) and at:
            head = content[at : at + _HEAD.size]
            size, time, key, question, name = _HEAD.unpack(head)
            end = at + _HEAD.size + _CRC.size + size
            if _CRC.unpack_from(content, at + _HEAD.size)[0] != zlib.crc32(head) or end > len(content):
                break
            yield at, StoredCall(time, key, question, name, b"")
            at, calls = end, calls + 1
        if at < len(content) or not at:
            self.torn.append(f"{shard}: ends in the middle of a call; complete calls: {calls}")


class _Sorted:
    """Finds the indices of a value in an array."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self._order = np.argsort(values, kind="stable")
        self._values = values[self._order]

    def find(self, value: bytes) -> np.ndarray[Any, Any]:
        """The indices in ascending order."""
        target = np.array(value, self._values.dtype)
        low, high = (np.searchsorted(self._values, target, side) for side in ("left", "right"))
        return self._order[low:high]


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST).digest()


def _compressed(call: Call) -> bytes:
    content = json.dumps({**vars(call), "taken": asdict(call.taken)}).encode()
    return _COMPRESSOR.compress(content)
