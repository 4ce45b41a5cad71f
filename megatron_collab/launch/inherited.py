"""Settings that an evaluation inherits from the run of its checkpoint: how conversations are played and scored."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron_collab import config
from megatron_collab.checkpoint import storage
from megatron_collab.config import COMMAND_LINE, EvaluateConfig, layers, recorded_value
from megatron_collab.observability.run_record import SETTINGS
from megatron_collab.runtime.process import LAUNCHER, global_rank
from megatron_collab.settings import ConfigError, EndpointConfig, declared
from megatron_collab.settings.documents import parse_json
from megatron_collab.settings.values import leaves

logger = logging.getLogger(__name__)

_INHERITED = (
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
    *("data.eval", "data.format", "data.format_options", "data.max_prompt_tokens", "train.eval_tasks"),
)
_ENDPOINT = [spec.name for spec in fields(EndpointConfig)]
# If the first is set, it is another model, reward or data set, to which the run's values of the others do not apply.
_SET_TOGETHER = {
    "user.model": [f"user.{name}" for name in _ENDPOINT],
    "reward.judge.model": [f"reward.judge.{name}" for name in _ENDPOINT],
    "reward.mode": ["reward.mode_options", "reward.clamp"],
    "reward.weights": ["reward.metrics", "reward.clamp"],
    "data.eval": ["data.format", "data.format_options", "data.max_prompt_tokens", "train.eval_tasks"],
}


@contextmanager
def settings(arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The settings of the run that model.path names, except those set by `arguments` or the files that they compose.

    Values of options by dotted name, also printed. A ConfigError raised inside the context names the run's file if its
    setting is inherited. Entries of a dict on the command line are added to the run's. Raises ConfigError.
    """
    file, values = _run_settings(arguments)
    if values and LAUNCHER not in os.environ and global_rank() == 0:
        logger.info(f"settings from {file}, unless overridden: {', '.join(values)}")
    try:
        yield values
    except ConfigError as error:
        mentioned = (name for name, value in [*leaves(values), *values.items()] if _mentions(str(error), name, value))
        name = next(mentioned, None)
        if name is None:
            raise
        raise ConfigError(f"{error} ({name} is from {file}; set it to override)") from error


def _mentions(message: str, name: str, value: Any) -> bool:
    """Whether `message` is about this setting; messages about named users contain only the last part of its name."""
    mentioned = any(f"{name}{end}" in message for end in (":", "=", "."))
    return mentioned or f": {name.rpartition('.')[2]}={value}: " in message


def _run_settings(arguments: Sequence[str]) -> tuple[Path, dict[str, Any]]:
    """The file of the run's settings, and the inherited ones; empty if model.path names no run."""
    composed = {name: value for name, value, _ in config.settings(arguments, EvaluateConfig)}
    path = composed["model.path"]
    run = None if composed["assistant.model"] or not path else storage.run_of(Path(path))
    file = (run or Path()) / SETTINGS
    if run is None or not file.is_file():
        return file, {}
    try:
        recorded = parse_json(file.read_text())
        played = recorded["train"]["stage"] == "rl"
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"model.path={path}: {file} contains no run settings; restore it") from error
    excluded = _set_by_arguments(arguments, composed)
    excluded |= {name for option in excluded for name in _SET_TOGETHER.get(option, [])}
    if not played:  # the run's data are not tasks
        excluded |= {"data.eval", *_SET_TOGETHER["data.eval"]}
    values = {}
    for name, default, _ in declared(EvaluateConfig):
        if name not in excluded and any(f"{name}.".startswith(f"{inherited}.") for inherited in _INHERITED):
            value = recorded_value(recorded, name, default)
            if value != default:
                values[name] = value
    return file, values


def _set_by_arguments(arguments: Sequence[str], composed: Mapping[str, Any]) -> set[str]:
    """The options set by a file under conf/ or by the command line; dicts on the command line do not count."""
    options = set()
    for source, names in layers(arguments):
        for option, default, _ in declared(EvaluateConfig):
            has_parts = any(f"{name}.".startswith(f"{option}.") for name in names)
            is_part = any(f"{option}.".startswith(f"{name}.") for name in names) and composed.get(option) != default
            if (has_parts or is_part) and not (source == COMMAND_LINE and isinstance(default, dict)):
                options.add(option)
    return options
