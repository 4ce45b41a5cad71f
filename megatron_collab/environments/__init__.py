"""Worlds that make a small random model and its data on the spot, by their names or as package.module:Class."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from filelock import FileLock

from megatron_collab.config import Config, Extension, lookup, make, require
from megatron_collab.types import Message

WORLDS = {"booking": f"{__name__}.booking:Booking", "gsm8k": f"{__name__}.gsm8k:Gsm8k"}
SCRIPTS = {"booking": f"{__name__}.booking:reply"}
GOAL_CHECKS = {"booking": f"{__name__}.booking:check_goal"}


class World(Extension):
    """Base of the worlds. `result_names`: what result.json calls metrics of the world, by its name for each."""

    result_names: ClassVar[Mapping[str, str]] = {}

    def make(self, folder: Path, seed: int, source: str | None) -> None:
        """Write model/ (a Hugging Face model) and JSONL files into `folder`; `source` is data.path.

        Raises ValueError or FileNotFoundError where the source does not have what the world is made from.
        """
        raise NotImplementedError


class Script:
    """A function, from a task's goal and the conversation to the user's next message.

    There are no messages where the user opens the conversation.
    """

    def __call__(self, goal: str, messages: Sequence[Message]) -> str:
        raise NotImplementedError


class GoalCheck:
    """A function, which raises ValueError, with the way out, for a goal that the script of a world cannot read."""

    def __call__(self, goal: str) -> None:
        raise NotImplementedError


def find_world(name: str) -> type[World]:
    """One of WORLDS, or package.module:Class. Raises ConfigError."""
    return lookup(name, "data.world", WORLDS, World)


def find_script(name: str) -> Script:
    """The script of the user `scripted/NAME`: one of SCRIPTS, or package.module:function. Raises ConfigError."""
    return lookup(name, "scripted", SCRIPTS, Script)


def find_goal_check(name: str) -> GoalCheck | None:
    """What checks the goals of the script `name`, where there is such a function."""
    return lookup(name, "scripted", GOAL_CHECKS, GoalCheck) if name in GOAL_CHECKS else None


def prepare(config: Config) -> None:
    """Make `data.world` in `data.dir` unless it exists already; safe when several processes call it at once.

    Raises ConfigError for an unknown world, and where `data.dir` is not set or holds another one; FileNotFoundError
    where the world's source (`data.path`) does not exist.
    """
    if config.data.world is None:
        return
    name, options = config.data.world, config.data.world_options
    if name not in WORLDS:  # importing those takes seconds
        find_world(name)
    require(config.data.dir is not None, "data.dir: not set; give the folder for data.world")
    folder = Path(config.data.dir or "")
    identity = {"world": name, "seed": config.run.seed} | ({"options": options} if options else {})
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if not folder.exists():
            world = make(WORLDS.get(name, name), "data.world", World, options, "data.world_options.")
            unfinished = folder.with_name(f".{folder.name}.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            world.make(unfinished, config.run.seed, config.data.path)
            (unfinished / "world.json").write_text(json.dumps(identity) + "\n")
            unfinished.rename(folder)
    marker = folder / "world.json"
    found = json.loads(marker.read_text()) if marker.is_file() else "something else"
    message = f"data.dir={folder}: holds {found}, not {identity}; choose another data.dir, or remove it"
    require(found == identity, message)


def result_names(config: Config) -> Mapping[str, str]:
    """What result.json calls metrics of the run's world, by its name for each."""
    return find_world(config.data.world).result_names if config.data.world else {}
