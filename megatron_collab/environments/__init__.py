"""Worlds that generate a small random model and its data, by name or as package.module:Class."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from filelock import FileLock

from megatron_collab.runtime import files
from megatron_collab.settings import ConfigError, Extension, lookup, make, require
from megatron_collab.settings.documents import parse_json
from megatron_collab.settings.schema import DataConfig
from megatron_collab.types import Message

WORLDS = {
    "booking": f"{__name__}.booking:Booking",
    "desk": f"{__name__}.desk:Desk",
    "gsm8k": f"{__name__}.gsm8k:Gsm8k",
}
WITH_OPTIONS = ("desk",)
SCRIPTS = {"booking": f"{__name__}.booking:reply"}
GOAL_CHECKS = {"booking": f"{__name__}.booking:check_goal"}


class World(Extension):
    """Base class of worlds. `result_names`: metrics of the world, by their names in result.json."""

    result_names: ClassVar[Mapping[str, str]] = {}

    def make(self, folder: Path, seed: int, source: str | None) -> None:
        """Write model/ (a Hugging Face model) and JSONL files into `folder`; `source` is data.path.

        Raises ValueError or FileNotFoundError if the source lacks the data that the world is made from.
        """
        raise NotImplementedError


class Script:
    """A function from a task's goal and the conversation to the user's next message.

    There are no messages if the user opens the conversation.
    """

    def __call__(self, goal: str, messages: Sequence[Message]) -> str:
        raise NotImplementedError


class GoalCheck:
    """A function that raises ValueError, with a remedy, for a goal that the script of a world cannot read."""

    def __call__(self, goal: str) -> None:
        raise NotImplementedError


def find_world(name: str) -> type[World]:
    """The world `name`: one of WORLDS, or package.module:Class. Raises ConfigError."""
    return lookup(name, "data.world", WORLDS, World)


def find_script(name: str) -> Script:
    """The script of the user `scripted/NAME`: one of SCRIPTS, or package.module:function. Raises ConfigError."""
    return lookup(name, "scripted", SCRIPTS, Script)


def find_goal_check(name: str) -> GoalCheck | None:
    """The check of the goals of the script `name`, or None."""
    return lookup(name, "scripted", GOAL_CHECKS, GoalCheck) if name in GOAL_CHECKS else None


def prepare(data: DataConfig, seed: int) -> None:
    """Makes `data.world` in `data.dir`, from `seed`, unless it exists; safe if several processes call it at once.

    Raises ConfigError for an unknown world, or if `data.dir` is not set or holds another world; FileNotFoundError if
    the source of the world (`data.path`) does not exist.
    """
    if data.world is None:
        return
    name, options = data.world, data.world_options
    if name not in WORLDS:  # importing those takes seconds
        find_world(name)
    require(data.dir is not None, "data.dir: not set; give the folder for data.world")
    folder = Path(data.dir or "")
    identity = {"world": name, "seed": seed} | ({"options": options} if options else {})
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if not folder.exists():
            world = make(WORLDS.get(name, name), "data.world", World, options, "data.world_options.")
            unfinished = folder.with_name(f".{folder.name}.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            try:
                world.make(unfinished, seed, data.path)
            except (OSError, ValueError):
                raise
            except Exception as error:  # a user's world may raise anything
                fault = " ".join(f"{type(error).__name__}: {error}".split())
                raise ConfigError(f"data.world={name}: its make fails ({fault}); mend it") from error
            (unfinished / "world.json").write_text(json.dumps(identity) + "\n")
            unfinished.rename(folder)
    marker = folder / "world.json"
    existing: Any = "something else"
    with suppress(ValueError):
        existing = parse_json(files.read_text(marker)) if marker.is_file() else existing
    message = f"data.dir={folder}: holds {existing}, not {identity}; choose another data.dir, or remove it"
    require(existing == identity, message)


def result_names(data: DataConfig) -> Mapping[str, str]:
    """The metrics of the run's world, by their names in result.json."""
    return find_world(data.world).result_names if data.world else {}
