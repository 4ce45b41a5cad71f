"""Fingerprints of the local files that a run reads, by which a resume notices that their content has changed.

They are files of data.train and data.eval, models with tokenizer and template, prompts, personas, modules of class
paths, and any other file that a setting names. Modules that these import are not followed; names of the Hub are pinned
to commits (hub.json). The first process of a start compares them and drafts their record, which is in force when
rank 0 has begun the run, so that data may be corrected after a start that failed.

A file whose size, mtime and ctime are the recorded ones is not read. Any other is hashed, since a copied run has other
times: whole, as its rows are then parsed again anyway. Weights, which a start does not read whole, are sampled above
WHOLE bytes in blocks that are spread evenly, because training changes weights everywhere.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_collab.config import Config, PlayConfig
from megatron_collab.data.rows import chosen_files
from megatron_collab.data.spec import DataSpec
from megatron_collab.runtime import files, hub
from megatron_collab.runtime.process import LAUNCHER, global_rank
from megatron_collab.settings import SUFFIX, ConfigError, declared, named_files, require
from megatron_collab.settings.documents import parse_json
from megatron_collab.settings.values import leaves

INPUTS = "inputs.json"  # in run.dir: by setting and file, size, times and SHA-256; of prompts also the text
_DRAFT = f".{INPUTS}"  # of a start whose run has not begun
WHOLE = 1 << 26  # bytes
_BLOCKS, _BLOCK = 256, 1 << 14  # blocks of a weight file, and bytes of each
_TIMES = ("size", "mtime_ns", "ctime_ns")

_Fingerprints = dict[str, dict[str, dict[str, Any]]]


def check_inputs(config: PlayConfig, data: DataSpec) -> None:
    """Raises ConfigError if a file has other content than when the run in run.dir began.

    Does nothing in processes that start after the one that has checked, as `draft_inputs`.
    """
    folder = Path(config.run.dir)
    if not _is_first() or not (recorded := _read(folder / INPUTS)):
        return
    current = _current(config, data, recorded)
    for name in sorted(recorded.keys() & current.keys()):
        for file in sorted(recorded[name].keys() | current[name].keys()):
            old, new = (version[name].get(file, {}).get("sha256") for version in (recorded, current))
            reason = "is new" if old is None else "is missing" if new is None else "has changed"
            out = "restore it, or choose another run.dir"
            out += f" (run.from={folder} continues from its checkpoint there)" if isinstance(config, Config) else ""
            require(old == new, f"run.dir={folder}: {name}: {file} {reason} since the run began; {out}")


def draft_inputs(config: PlayConfig, data: DataSpec) -> None:
    """Write the draft of the record, when all else is checked. Raises ConfigError if a file cannot be read."""
    if _is_first():
        folder = Path(config.run.dir)
        recorded, draft = _read(folder / INPUTS), _read(folder / _DRAFT)
        current = _current(config, data, draft | recorded)
        folder.mkdir(parents=True, exist_ok=True)
        files.replace(folder / _DRAFT, json.dumps(recorded | current, indent=1) + "\n")


def _is_first() -> bool:
    return LAUNCHER not in os.environ and global_rank() == 0


def _current(config: PlayConfig, data: DataSpec, known: _Fingerprints) -> _Fingerprints:
    try:
        return {name: _fingerprints(root, paths, known.get(name, {})) for name, root, paths in _inputs(config, data)}
    except (ValueError, OSError) as error:
        raise ConfigError(" ".join(str(error).split())) from error


def record_inputs(run_dir: Path) -> None:
    """Put the draft of this start into force."""
    if (run_dir / _DRAFT).is_file():
        (run_dir / _DRAFT).replace(run_dir / INPUTS)


def _inputs(config: PlayConfig, data: DataSpec) -> Iterator[tuple[str, Path, list[Path]]]:
    """(setting and value, folder, files) of each setting that names local files."""
    for setting, sources in (("data.train", data.train), ("data.eval", data.eval_sets)):
        for source in (source for source in sources if hub.parse(source.source) is None):
            parts = "".join(f" {key}={value}" for key in ("subset", "split") if (value := getattr(source, key)))
            path = Path(source.source)
            if ":" in config.data.format:  # a reader of the user's
                paths = [*path.rglob("*")] if path.is_dir() else [path]
            else:
                paths = [Path(file) for names in chosen_files(source, setting).values() for file in names]
            yield f"{setting}={source.source}{parts}", path if path.is_dir() else path.parent, paths
    # What may change on a resume does not decide the run's numbers.
    skipped = {"data.train", *(name for name, _, rule in declared(type(config)) if rule.may_change)}
    settings = {name: value for name, value in leaves(asdict(config)) if name not in skipped}
    for name, path in named_files(settings | {"reward.weights": [*config.reward.weights]}):
        if path.is_dir():
            yield name, path, [file for pattern in hub.MODEL_FILES for file in path.glob(pattern)]
        else:
            yield name, path.parent, [path]


def _fingerprints(root: Path, paths: Iterable[Path], known: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By name below `root`, the fingerprint of each file; an equal state in `known` spares its hash."""
    result = {}
    for path in filter(Path.is_file, paths):
        file, status = os.path.relpath(path, root), path.stat()
        entry: dict[str, Any] = {key: getattr(status, f"st_{key}") for key in _TIMES}
        same = entry.items() <= known.get(file, {}).items()
        entry["sha256"] = known[file]["sha256"] if same else _digest(path, status.st_size)
        result[file] = entry | ({"text": path.read_text(errors="replace")} if path.suffix == SUFFIX else {})
    return result


def _digest(file: Path, size: int) -> str:
    """SHA-256 of a file, or of blocks of a large file of weights."""
    with file.open("rb") as stream:
        if size <= WHOLE or file.suffix != ".safetensors":
            return hashlib.file_digest(stream, "sha256").hexdigest()
        digest = hashlib.sha256()
        for number in range(_BLOCKS):
            stream.seek((size - _BLOCK) * number // (_BLOCKS - 1))
            digest.update(stream.read(_BLOCK))
        return digest.hexdigest()


def _read(file: Path) -> _Fingerprints:
    try:
        content = parse_json(file.read_text()) if file.is_file() else {}
        valid = all("sha256" in entry for entries in content.values() for entry in entries.values())
    except (OSError, ValueError, TypeError, AttributeError):
        valid = False
    require(valid, f"{file}: contains no fingerprints; restore it, or remove it to resume without a comparison")
    return content
