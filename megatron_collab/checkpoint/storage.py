"""Checkpoint folders on disk: list, verify, commit and discard them. Files only, no ranks.

A checkpoint is a folder step_N. It is written as step_N.tmp and renamed when it is complete; then the file `latest`
names it. `state.json` is written last in the folder and records size and CRC-32 of every other file.
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_collab.runtime.files import replace
from megatron_collab.runtime.process import BEST, beat
from megatron_collab.settings import ConfigError, require
from megatron_collab.settings.documents import parse_json

LATEST = "latest"
STATE = "state.json"
_FOLDER = re.compile(r"step_(\d+)")
_READ_BYTES = 1 << 20

_PARTS = {"step": int, "ranks": int, "state": dict}  # keys that every state.json has, and their types

Files = dict[str, tuple[int, int]]


def checksums(files: Iterable[Path]) -> Files:
    """Name -> size in bytes and CRC-32 of each file."""
    sums: Files = {}
    for file in files:
        size = crc = 0
        with file.open("rb") as content:
            while block := content.read(_READ_BYTES):
                beat()
                size, crc = size + len(block), zlib.crc32(block, crc)
        sums[file.name] = size, crc
    return sums


def begin(folder: Path, step: int) -> Path:
    """Create an empty step_N.tmp."""
    temporary = folder / f"step_{step}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def commit(temporary: Path, state: Mapping[str, Any], files: Files) -> None:
    """Make step_N.tmp, which contains all `files`, the newest checkpoint: step_N."""
    replace(temporary / STATE, json.dumps({**state, "files": files}))
    final, previous = temporary.with_suffix(""), temporary.with_suffix(".old")
    if final.exists():  # the step is saved again; the old folder is removed only after the new one has replaced it
        final.rename(previous)
    temporary.rename(final)
    replace(final.parent / LATEST, final.name)
    shutil.rmtree(previous, ignore_errors=True)


def discard(folder: Path, step: int, keep: int) -> None:
    """Remove incomplete folders, and all checkpoints before `step` except the newest `keep` - 1 and the best."""
    for leftover in [*folder.glob("step_*.tmp"), *folder.glob("step_*.old")]:
        shutil.rmtree(leftover)
    older = [path for number, path in _folders(folder).items() if number < step and number != best(folder.parent)]
    for path in older[keep - 1 :]:
        shutil.rmtree(path)


def best(run: Path) -> int | None:
    """The step whose checkpoint train.keep_best keeps; None without one. Raises ConfigError if best.json is invalid."""
    file = run / BEST
    try:
        return int(parse_json(file.read_text())["step"]) if file.is_file() else None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file}: contains no step; remove it: the run writes it again, or give RUN@STEP") from error


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that `path` names: RUN (the newest), RUN@STEP, RUN@best, RUN/checkpoints or a step_N folder.

    Raises ConfigError if it does not exist.
    """
    folder, step = split(path)
    run, folder = (folder, folder / "checkpoints") if (folder / "checkpoints").is_dir() else (folder.parent, folder)
    steps = ", ".join(str(number) for number in _folders(folder))
    if step:
        number = best(run) if step == "best" else step
        checkpoint = folder / f"step_{number}"
        hint = f"it keeps those of the steps {steps}" if steps else "it has no checkpoints"
        require(number is not None, f"{path}: the run keeps no best checkpoint; train with train.keep_best, or {hint}")
        require(checkpoint.is_dir(), f"{path}: no checkpoint of that step; {hint}")
        return checkpoint
    checkpoints = [folder] if folder.name.startswith("step_") else candidates(folder)
    hint = "give a run, RUN@STEP, a step_N folder, or the folder that contains them"
    require(bool(checkpoints) and checkpoints[0].is_dir(), f"{path}: contains no checkpoint; {hint}")
    return checkpoints[0]


def split(path: Path) -> tuple[Path, str]:
    """RUN and STEP of RUN@STEP; `path` and "" for any other path. An existing folder may have an @ in its name."""
    name, at, step = path.name.rpartition("@")
    return (path.parent / name, step) if at and step and not path.is_dir() else (path, "")


def run_of(path: Path) -> Path | None:
    """The run folder of the checkpoint that `path` names (see `find_checkpoint`); None if it names something else."""
    folder, _ = split(path)
    if folder.name.startswith("step_"):
        return folder.parent.parent
    if folder.name == "checkpoints":
        return folder.parent
    return folder if (folder / "checkpoints").is_dir() else None


def candidates(folder: Path) -> list[Path]:
    """The checkpoints in `folder`: first the one that `latest` names, then from newest to oldest."""
    latest = folder / LATEST
    name = latest.read_text(errors="replace").strip() if latest.is_file() else None
    return sorted(_folders(folder).values(), key=lambda checkpoint: checkpoint.name != name)


def read_state(checkpoint: Path) -> dict[str, Any] | None:
    """The content of `state.json`; None if it is missing or invalid."""
    try:
        state = parse_json((checkpoint / STATE).read_text())
        files = dict(state.get("files", {})).values()  # earlier versions recorded none
        valid = all(type(state[name]) is kind for name, kind in _PARTS.items())
        return state if valid and all([*map(type, sums)] == [int, int] for sums in files) else None
    except (FileNotFoundError, IsADirectoryError, ValueError, AttributeError, KeyError, TypeError):
        return None


def damage(checkpoint: Path, saved: Mapping[str, Any] | None, rank: int = 0, ranks: int = 1) -> list[str]:
    """Faults of the files that the checkpoint's state `saved` records, a few words each; empty if they are intact.

    Each of the `ranks` checks its part of the files. Checkpoints of earlier versions recorded none.
    """
    if saved is None:
        return [f"no valid {STATE}"] if rank == 0 else []
    faults = []
    for name, (size, crc) in sorted(saved.get("files", {}).items())[rank::ranks]:
        file = checkpoint / name
        if not file.is_file():
            faults.append(f"{name} is missing")
        elif file.stat().st_size != size:
            faults.append(f"{name} has {file.stat().st_size} of {size} bytes")
        elif checksums([file])[name] != (size, crc):
            faults.append(f"{name} is corrupt")
    return faults


def _folders(folder: Path) -> dict[int, Path]:
    """The checkpoints by step, from newest to oldest."""
    by_step = {int(match[1]): path for path in folder.glob("step_*") if (match := _FOLDER.fullmatch(path.name))}
    return dict(sorted(by_step.items(), reverse=True))
