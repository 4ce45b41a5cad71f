"""Journal of finished groups and paused turns on disk, so that a restarted run does not sample them again.

There is one file per step, to which each group is appended when it finishes. If colocated servers sample ahead, another
file per step has the turns of the groups that were paused at its end. Groups are pickled: that keeps floats and
types bit-exact, and a run trusts its own folder as it trusts its checkpoints. There is one writer.

A group is preceded by the newest weight version that sampled any of it and that version's digest: a run that resumes
from an older checkpoint reuses version numbers, so the number does not identify the weights.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_collab.runtime import files
from megatron_collab.types import Conversation, Ending, Group, Missing, PausedTurn, Task

_HEAD = struct.Struct(">HQI")  # bytes of the stream's name, bytes of the group, CRC-32 of the body
_WEIGHTS = struct.Struct(">q64s")  # version and digest; followed by name and group
_FILE = re.compile(r"step_(\d+)\.(?:groups|paused)")
_FIRST = "0" * 64  # digest of the run's initial weights


class WeightDigests(dict[int, str]):
    """Digests of the newest `keep` weight versions, which distinguish weights with the same version number.

    A digest is a hash of the previous version's digest and of the metrics of the update. Equal weights have equal
    digests; if a device sums in a different order, the loss or the gradient norm differs, and so does the digest.
    """

    def __init__(self, keep: int, known: Iterable[Sequence[Any]] = ()) -> None:
        """`known`: the `items()` of an earlier start of the run."""
        super().__init__((version, digest) for version, digest in known)
        self.keep = keep

    def begin(self, version: int) -> None:
        """Set the current version; if no digest is known yet, it is the version of the run's initial weights."""
        if not self:
            self[version] = _FIRST

    def learned(self, stats: Mapping[str, float]) -> None:
        """Add the next version, the result of an update with metrics `stats`, which are the same on all ranks."""
        version = max(self)
        content = f"{self[version]} {sorted(stats.items())}"  # repr keeps floats exact
        self[version + 1] = hashlib.sha256(content.encode()).hexdigest()
        for old in [known for known in self if known <= version + 1 - self.keep]:
            del self[old]


class JournalEntry(NamedTuple):
    """A stream's group in bytes `start` to `stop` of `file`, with its newest version and that version's digest."""

    stream: str
    version: int
    digest: str
    file: Path
    start: int
    stop: int


class Journal:
    """The finished groups of a run, in `folder`; groups present at construction are from earlier starts."""

    def __init__(self, folder: Path, digests: WeightDigests) -> None:
        self.folder = folder
        self._digests = digests
        folder.mkdir(parents=True, exist_ok=True)
        self._entries: dict[str, JournalEntry] = {}  # by stream; a later entry replaces an earlier one
        self._paused = {step: file for file, step in self._files().items() if file.suffix == ".paused"}
        for file in self._files().keys() - self._paused.values():
            end = 0
            for entry in entries(file):
                self._entries[entry.stream] = entry
                end = entry.stop
            os.truncate(file, end)  # drop a partial entry of a killed process

    def find(self, stream: str, task: Task) -> Group | None:
        """The group of `task` that an earlier start played on `stream`; None if the weights have changed since."""
        entry = self._entries.get(stream)
        if entry is None or self._digests.get(entry.version) != entry.digest:
            return None
        with entry.file.open("rb") as content:
            content.seek(entry.start)
            pickled = content.read(entry.stop - entry.start)
        try:
            group: Group = pickle.loads(pickled)
            begins = group.task.messages[: len(task.messages)] == task.messages  # the user's opening message may follow
            return group if begins and group.task.original == task.original else None
        except (AttributeError, ImportError, TypeError, ValueError):  # pickled by another version of the package
            return None

    def write(self, step: int, groups: Mapping[str, Group]) -> None:
        """Append the complete groups of `groups` (by stream) to disk. Raises RunStopped if writing fails."""
        frames = []
        for stream, group in groups.items():
            turns = (turn for conversation in conversations(group) for turn in conversation.turns)
            newest = max((version for turn in turns for version in turn.versions), default=0)
            rewarded = not any(isinstance(rollout.reward.value, Missing) for rollout in group.rollouts)
            if rewarded and not failed(group) and newest in self._digests:
                name, content = stream.encode(), pickle.dumps(group)
                body = _WEIGHTS.pack(newest, self._digests[newest].encode()) + name + content
                frames += [_HEAD.pack(len(name), len(content), zlib.crc32(body)), body]
        if frames:
            file = self.folder / f"step_{step}.groups"
            with files.writing(file), file.open("ab") as out:
                out.writelines(frames)
                out.flush()
                os.fsync(out.fileno())

    def pause(self, step: int, turns: Mapping[str, Sequence[PausedTurn]]) -> None:
        """Write the turns, by stream, of the groups that were paused at the end of `step`, before it is trained.

        Raises RunStopped if writing fails.
        """
        files.replace(self.folder / f"step_{step}.paused", pickle.dumps((self._digests[step], dict(turns))))

    def paused(self, step: int) -> Mapping[str, Sequence[PausedTurn]] | None:
        """What an earlier start paused at the end of `step`; None if nothing, or if the weights have changed since."""
        if step not in self._paused:
            return None
        try:
            digest, turns = pickle.loads(self._paused[step].read_bytes())
        except (AttributeError, ImportError, TypeError, ValueError):  # as in `find`
            return None
        return turns if digest == self._digests.get(step) else None

    def forget(self, before: int | None = None) -> None:
        """Remove what a resume at step `before` does not need: groups of earlier steps, and all pauses but the last.

        All if it is None.
        """
        kept = {file for file, step in self._files().items() if before is not None and _needed(file, step, before)}
        removed = self._files().keys() - kept
        for file in removed:
            file.unlink()
        self._entries = {stream: entry for stream, entry in self._entries.items() if entry.file not in removed}
        self._paused = {step: file for step, file in self._paused.items() if file not in removed}

    def _files(self) -> dict[Path, int]:
        matches = ((file, _FILE.fullmatch(file.name)) for file in self.folder.iterdir())
        return {file: int(match[1]) for file, match in matches if match}


def _needed(file: Path, step: int, resumed: int) -> bool:
    """Whether a resume at step `resumed` reads this file, of `step`."""
    return step >= resumed - (file.suffix == ".paused")


def entries(file: Path) -> Iterator[JournalEntry]:
    """The complete entries of a file, in the order in which they were written."""
    content = file.read_bytes()
    at = 0
    while at + _HEAD.size <= len(content):
        named, size, crc = _HEAD.unpack_from(content, at)
        at += _HEAD.size
        start = at + _WEIGHTS.size + named
        stop = start + size
        if not named or stop > len(content) or zlib.crc32(content[at:stop]) != crc:
            return
        version, digest = _WEIGHTS.unpack_from(content, at)
        yield JournalEntry(content[start - named : start].decode(), version, digest.decode(), file, start, stop)
        at = stop


def failed(group: Group) -> bool:
    """Whether a conversation of the group has ended with an error."""
    return any(conversation.ending is Ending.ERROR for conversation in conversations(group))


def scored(group: Group) -> bool:
    """Whether no score of the group is missing."""
    futures = (future for rollout in group.rollouts for future in rollout.futures)
    return not any(isinstance(score, Missing) for future in futures for score in future.scores.values())


def conversations(group: Group) -> Iterator[Conversation]:
    for rollout in group.rollouts:
        yield rollout.start
        yield from (future.conversation for future in rollout.futures)
