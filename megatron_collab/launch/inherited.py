"""What an evaluation takes from the run whose checkpoint it evaluates: how its conversations were played and scored."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from megatron_collab import config
from megatron_collab.checkpoint import storage
from megatron_collab.config import (
    COMMAND_LINE,
    SETTINGS,
    Config,
    ConfigError,
    EndpointConfig,
    declared,
    layers,
    recorded_value,
)
from megatron_collab.config.load import leaves
from megatron_collab.runtime.process import LAUNCHER, global_rank

_TAKEN = (
    *("model.chat_template_args", "model.dtype", "user", "users", "servers"),
    *("rollout.max_user_turns", "rollout.max_assistant_turns", "rollout.max_messages"),
    *("rollout.turn", "rollout.future"),
    *("rollout.context_length", "rollout.deadline", "rollout.system_prompt", "rollout.tools", "rollout.tool_options"),
    *(
        "rollout.strip_thoughts",
        "rollout.mcp_servers",
        "rollout.tool_timeout",
        "rollout.tool_parser",
        "rollout.max_tool_calls",
    ),
    *("reward.mode", "reward.mode_options", "reward.weights", "reward.metrics", "reward.clamp", "reward.judge"),
    *("data.eval", "data.format", "data.format_options", "train.eval_tasks"),
)
_ENDPOINT = [spec.name for spec in fields(EndpointConfig)]
# Who gives the first gives another model, reward or data set, to which the settings of the run's own do not belong.
_TOGETHER = {
    "user.model": [f"user.{name}" for name in _ENDPOINT],
    "reward.judge.model": [f"reward.judge.{name}" for name in _ENDPOINT],
    "reward.mode": ["reward.mode_options", "reward.clamp"],
    "reward.weights": ["reward.metrics", "reward.clamp"],
    "data.eval": ["data.format", "data.format_options", "train.eval_tasks"],
}


@contextmanager
def settings(arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What the run that model.path names has set, and `arguments` with the files that they compose do not give.

    Values of options by dotted name, shown on the console; a ConfigError raised within says where its setting is from.
    An entry of a dict on the command line is added to those of the run. Raises ConfigError.
    """
    file, values = _of_run(arguments)
    if values and LAUNCHER not in os.environ and global_rank() == 0:
        print(f"taken from {file}, where nothing else is given: {', '.join(values)}", flush=True)
    try:
        yield values
    except ConfigError as error:
        named = (name for name, value in [*leaves(values), *values.items()] if _names(str(error), name, value))
        name = next(named, None)
        if name is None:
            raise
        raise ConfigError(f"{error} ({name} is taken from {file}, unless it is given)") from error


def _names(message: str, name: str, value: Any) -> bool:
    """Whether it is about this setting, which a named user's message calls by the last part of its name."""
    said = any(f"{name}{end}" in message for end in (":", "=", "."))
    return said or f": {name.rpartition('.')[2]}={value}: " in message


def _of_run(arguments: Sequence[str]) -> tuple[Path, dict[str, Any]]:
    """The file of the run's settings, and of these the ones that are taken; none where model.path names no run."""
    composed = {name: value for name, value, _ in config.settings(arguments)}
    path = composed["model.path"]
    run = None if composed["assistant.model"] or path == MISSING else storage.run_of(Path(path))
    file = (run or Path()) / SETTINGS
    if run is None or not file.is_file():
        return file, {}
    try:
        recorded = json.loads(file.read_text())
        played = recorded["train"]["stage"] == "rl"
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"model.path={path}: {file} holds no settings of a run; restore it") from error
    left = _given(arguments, composed)
    left |= {name for option in left for name in _TOGETHER.get(option, [])}
    if not played:  # its data are no tasks
        left |= {"data.eval", *_TOGETHER["data.eval"]}
    values = {}
    for name, default, _ in declared(Config):
        if name not in left and any(f"{name}.".startswith(f"{taken}.") for taken in _TAKEN):
            value = recorded_value(recorded, name, default)
            if value != default:
                values[name] = value
    return file, values


def _given(arguments: Sequence[str], composed: Mapping[str, Any]) -> set[str]:
    """The options that a file under conf/ or the command line sets; of the latter none that is a dict."""
    found = set()
    for source, names in layers(arguments):
        for option, default, _ in declared(Config):
            within = any(f"{name}.".startswith(f"{option}.") for name in names)
            around = any(f"{option}.".startswith(f"{name}.") for name in names) and composed.get(option) != default
            if (within or around) and not (source == COMMAND_LINE and isinstance(default, dict)):
                found.add(option)
    return found
