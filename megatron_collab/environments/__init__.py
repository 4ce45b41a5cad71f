"""Shipped worlds: each makes a small random model and its data on the spot.

A world is a module with `make(folder, seed, source)`, which writes model/ and JSONL files. One with a user of its own
scripts it in `reply(goal, messages)`, the user `scripted/WORLD`. `RESULT_NAMES` says what result.json calls those of
its metrics that a run is about.
"""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from filelock import FileLock

from megatron_collab.config import Config


def prepare(config: Config) -> None:
    """Make `data.world` in `data.dir` unless it is there already; safe when several processes call it at once.

    Raises ValueError where `data.dir` is not set or holds another world, FileNotFoundError where the world's source
    (`data.path`) is not there.
    """
    if config.data.world is None:
        return
    if config.data.dir is None:
        raise ValueError("data.dir: not set; give the folder where data.world is to be made")
    folder = Path(config.data.dir)
    identity = {"world": config.data.world, "seed": config.run.seed}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if not folder.exists():
            world = importlib.import_module(f"{__name__}.{config.data.world}")
            unfinished = folder.with_name(f".{folder.name}.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            world.make(unfinished, config.run.seed, config.data.path)
            (unfinished / "world.json").write_text(json.dumps(identity) + "\n")
            unfinished.rename(folder)
    marker = folder / "world.json"
    found = json.loads(marker.read_text()) if marker.is_file() else "something else"
    if found != identity:
        raise ValueError(f"data.dir={folder}: holds {found}, not {identity}; choose another data.dir, or remove it")


def result_names(config: Config) -> Mapping[str, str]:
    """What result.json calls metrics of the run's world, by its name for each."""
    if config.data.world is None:
        return {}
    return importlib.import_module(f"{__name__}.{config.data.world}").RESULT_NAMES
