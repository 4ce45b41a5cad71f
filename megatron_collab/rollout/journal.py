"""Groups that are finished, on disk before they are trained: a run that starts again does not play them again.

A file a step of their slots, to which every group is appended as it is found finished. A group is pickled: that keeps
its floats and kinds to the last bit, and a run trusts its own folder as it trusts its checkpoints. One writer.
"""

from __future__ import annotations

import os
import pickle
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from megatron_collab.types import Conversation, Ending, Group, Missing, Task

_HEAD = struct.Struct(">HQI")  # bytes of the stream's name, bytes of the group, CRC-32 of both
_FILE = re.compile(r"step_(\d+)\.groups")


class Entry(NamedTuple):
    """Where the group of a stream lies: in `file`, the bytes from `start` to `stop`."""

    stream: str
    file: Path
    start: int
    stop: int


class Journal:
    """The finished groups of a run, in `folder`; what is there when it is made is of earlier starts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._found: dict[str, Entry] = {}  # of two of a stream the later
        for file in self._files():
            end = 0
            for entry in entries(file):
                self._found[entry.stream] = entry
                end = entry.stop
            os.truncate(file, end)  # what follows was being written when the process was killed

    def find(self, stream: str, task: Task, version: int) -> Group | None:
        """The group that an earlier start had played on `stream`, where it still serves.

        It has to be of the same task, and sampled by `version` or older ones: weights that are yet to be trained
        may come out differently.
        """
        entry = self._found.get(stream)
        if entry is None:
            return None
        with entry.file.open("rb") as content:
            content.seek(entry.start)
            group: Group = pickle.loads(content.read(entry.stop - entry.start))
        return group if group.task == task and _newest(group) <= version else None

    def write(self, step: int, groups: Mapping[str, Group]) -> None:
        """Append those of `groups`, by stream, that lack nothing; they are on disk when it returns."""
        frames = [_frame(stream, group) for stream, group in groups.items() if whole(group)]
        if frames:
            with (self.folder / f"step_{step}.groups").open("ab") as out:
                out.writelines(frames)
                out.flush()
                os.fsync(out.fileno())

    def forget(self, before: int | None = None) -> None:
        """Remove the groups of the steps `before` that one; none: all."""
        gone = {file for file, step in self._files().items() if before is None or step < before}
        for file in gone:
            file.unlink()
        self._found = {stream: entry for stream, entry in self._found.items() if entry.file not in gone}

    def _files(self) -> dict[Path, int]:
        """The files and their steps."""
        matches = ((file, _FILE.fullmatch(file.name)) for file in self.folder.iterdir())
        return {file: int(match[1]) for file, match in matches if match}


def entries(file: Path) -> Iterator[Entry]:
    """The whole entries of a file, in the order in which they were written."""
    content = file.read_bytes()
    at = 0
    while at + _HEAD.size <= len(content):
        named, size, crc = _HEAD.unpack_from(content, at)
        start = at + _HEAD.size
        stop = start + named + size
        if not named or stop > len(content) or zlib.crc32(content[start:stop]) != crc:
            return
        yield Entry(content[start : start + named].decode(), file, start + named, stop)
        at = stop


def whole(group: Group) -> bool:
    """Whether every rollout has a reward and no conversation ended with an error."""
    rewarded = not any(isinstance(rollout.reward.value, Missing) for rollout in group.rollouts)
    return rewarded and not any(conversation.ending is Ending.ERROR for conversation in conversations(group))


def conversations(group: Group) -> Iterator[Conversation]:
    for rollout in group.rollouts:
        yield rollout.start
        yield from (future.conversation for future in rollout.futures)


def _newest(group: Group) -> int:
    """The newest weights that sampled any of it."""
    turns = (turn for conversation in conversations(group) for turn in conversation.turns)
    return max((version for turn in turns for version in turn.versions), default=0)


def _frame(stream: str, group: Group) -> bytes:
    name, content = stream.encode(), pickle.dumps(group)
    body = name + content
    return _HEAD.pack(len(name), len(content), zlib.crc32(body)) + body
