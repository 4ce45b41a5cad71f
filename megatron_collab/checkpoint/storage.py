"""Folders of checkpoints on disk: listing, verifying, committing and discarding them. Files only, no ranks.

A checkpoint is a folder step_N. It is written as step_N.tmp and renamed when it is whole; then the file `latest`
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

from megatron_collab.config import ConfigError, require
from megatron_collab.runtime.files import replace
from megatron_collab.runtime.process import BEST, beat

LATEST = "latest"
STATE = "state.json"
_FOLDER = re.compile(r"step_(\d+)")
_READ_BYTES = 1 << 20

_PARTS = {"step": int, "ranks": int, "state": dict}  # what every state.json has

Files = dict[str, tuple[int, int]]


def checksums(files: Iterable[Path]) -> Files:
    """Name -> size in bytes and CRC-32 of each file."""
    found: Files = {}
    for file in files:
        size = crc = 0
        with file.open("rb") as content:
            while block := content.read(_READ_BYTES):
                beat()
                size, crc = size + len(block), zlib.crc32(block, crc)
        found[file.name] = size, crc
    return found


def begin(folder: Path, step: int) -> Path:
    """Create an empty step_N.tmp."""
    temporary = folder / f"step_{step}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def commit(temporary: Path, state: Mapping[str, Any], files: Files) -> None:
    """Make step_N.tmp, which contains all `files`, the newest checkpoint: step_N."""
    replace(temporary / STATE, json.dumps({**state, "files": files}))
    final, before = temporary.with_suffix(""), temporary.with_suffix(".old")
    if final.exists():  # a step that is saved again; removed only once the new one stands in its place
        final.rename(before)
    temporary.rename(final)
    replace(final.parent / LATEST, final.name)
    shutil.rmtree(before, ignore_errors=True)


def discard(folder: Path, step: int, keep: int) -> None:
    """Remove incomplete folders, and of the checkpoints before `step` all but the newest `keep` - 1 and the best."""
    for leftover in [*folder.glob("step_*.tmp"), *folder.glob("step_*.old")]:
        shutil.rmtree(leftover)
    older = [found for number, found in _folders(folder).items() if number < step and number != best(folder.parent)]
    for old in older[keep - 1 :]:
        shutil.rmtree(old)


def best(run: Path) -> int | None:
    """The step whose checkpoint train.keep_best keeps. ConfigError where the file does not say it."""
    file = run / BEST
    try:
        return int(json.loads(file.read_text())["step"]) if file.is_file() else None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{file}: names no step; remove it: the run writes it again, or give RUN@STEP") from error


def find_checkpoint(given: Path) -> Path:
    """The checkpoint that RUN (the newest), RUN@STEP, RUN@best, RUN/checkpoints or a step_N folder names.

    Raises ConfigError where there is none.
    """
    folder, step = split(given)
    run, folder = (folder, folder / "checkpoints") if (folder / "checkpoints").is_dir() else (folder.parent, folder)
    there = ", ".join(str(number) for number in _folders(folder))
    if step:
        number = best(run) if step == "best" else step
        found = folder / f"step_{number}"
        hint = f"it keeps those of the steps {there}" if there else "it has no checkpoints"
        require(number is not None, f"{given}: the run keeps no best checkpoint; train with train.keep_best, or {hint}")
        require(found.is_dir(), f"{given}: no checkpoint of that step; {hint}")
        return found
    of_folder = [folder] if folder.name.startswith("step_") else candidates(folder)
    hint = "give a run, RUN@STEP, a step_N folder, or the folder that contains them"
    require(bool(of_folder) and of_folder[0].is_dir(), f"{given}: contains no checkpoint; {hint}")
    return of_folder[0]


def split(given: Path) -> tuple[Path, str]:
    """RUN and STEP of RUN@STEP; `given` and "" for another path, which may have an @ in its folders or be one."""
    name, at, step = given.name.rpartition("@")
    return (given.parent / name, step) if at and not given.is_dir() else (given, "")


def run_of(given: Path) -> Path | None:
    """The run of the checkpoint that `given` names as in `find_checkpoint`; None where it names something else."""
    folder, _ = split(given)
    if folder.name.startswith("step_"):
        return folder.parent.parent
    if folder.name == "checkpoints":
        return folder.parent
    return folder if (folder / "checkpoints").is_dir() else None


def candidates(folder: Path) -> list[Path]:
    """The checkpoints in `folder`: first the one that `latest` names, then from newest to oldest."""
    latest = folder / LATEST
    named = latest.read_text(errors="replace").strip() if latest.is_file() else None
    return sorted(_folders(folder).values(), key=lambda one: one.name != named)


def read_state(checkpoint: Path) -> dict[str, Any] | None:
    """The content of `state.json`; None if it is missing or invalid."""
    try:
        found = json.loads((checkpoint / STATE).read_text())
        files = dict(found.get("files", {})).values()  # earlier versions recorded none
        whole = all(type(found[name]) is kind for name, kind in _PARTS.items())
        return found if whole and all([*map(type, sums)] == [int, int] for sums in files) else None
    except (FileNotFoundError, ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return None


def damage(checkpoint: Path, saved: Mapping[str, Any] | None, rank: int = 0, ranks: int = 1) -> list[str]:
    """What is wrong with the files that its state `saved` records, a few words each; empty if they are intact.

    Each of several `ranks` reads its part of them. Checkpoints of earlier versions recorded none.
    """
    if saved is None:
        return [f"no valid {STATE}"] if rank == 0 else []
    found = []
    for name, (size, crc) in sorted(saved.get("files", {}).items())[rank::ranks]:
        file = checkpoint / name
        if not file.is_file():
            found.append(f"{name} is missing")
        elif file.stat().st_size != size:
            found.append(f"{name} has {file.stat().st_size} of {size} bytes")
        elif checksums([file])[name] != (size, crc):
            found.append(f"{name} is corrupt")
    return found


def _folders(folder: Path) -> dict[int, Path]:
    """The checkpoints by step, from newest to oldest."""
    found = {int(match[1]): one for one in folder.glob("step_*") if (match := _FOLDER.fullmatch(one.name))}
    return dict(sorted(found.items(), reverse=True))
