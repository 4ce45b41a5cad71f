"""Resuming a run with other settings: what has changed, and which changes are allowed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from megatron_collab.config.programs import Config, PlayConfig
from megatron_collab.observability.run_record import SETTINGS, Change, RunRecord
from megatron_collab.settings.documents import parse_json
from megatron_collab.settings.option import declared, require
from megatron_collab.settings.schema import ServedConfig
from megatron_collab.settings.values import leaves

# Earlier versions located every metric by its name alone; their runs resume with the same metric from another module.
_METRIC_BY_NAME = re.compile(r"reward\.metrics\.\w+\.metric")
_OF_USERS = re.compile(r"^users\.[^.]+\.")
_OF_ASSISTANTS = re.compile(r"^build\.assistants\.[^.]+\.")
_OF_SERVERS = re.compile(r"^servers\.[^.]+\.")
_PROGRAM = "program"  # its key for the program, missing in earlier versions


def recorded(config: PlayConfig) -> dict[str, Any]:
    """The content of SETTINGS: program and settings."""
    return {_PROGRAM: config.program, **asdict(config)}


def run_record(config: PlayConfig) -> RunRecord:
    """What the folder run.dir records of a start with these settings. Raises ConfigError as `changes`."""
    return RunRecord(config.run, recorded(config), changes(config))


def read_settings(run_dir: Path) -> dict[str, Any] | None:
    """The content of SETTINGS in `run_dir`; None if there is no such file. Raises ConfigError if it is invalid."""
    file = run_dir / SETTINGS
    if not file.exists():
        return None
    try:
        settings = parse_json(file.read_text())
    except (OSError, ValueError):
        settings = None
    require(isinstance(settings, dict), f"{file}: contains no run settings; restore it, or choose another run.dir")
    return settings


def recorded_values(run_dir: Path, program: type[PlayConfig] = Config) -> dict[str, Any]:
    """Values of `program`'s options at the last start of the run in `run_dir`. Raises ConfigError if there is none."""
    settings = read_settings(run_dir)
    require(settings is not None, f"{run_dir}: has no {SETTINGS}; give the folder of a run")
    return {name: recorded_value(settings, name, default) for name, default, _ in declared(program)}


def recorded_value(settings: Any, name: str, default: Any) -> Any:
    """An option's value in the result of `read_settings`; `default` if an earlier version recorded none."""
    for key in name.split("."):
        if not isinstance(settings, Mapping) or key not in settings:
            return default
        settings = settings[key]
    return settings


def changes(config: PlayConfig) -> list[Change]:
    """Changes to the settings of the run in run.dir, if there is one.

    Raises ConfigError if they cannot be read, or are those of another program.
    """
    settings = read_settings(Path(config.run.dir))
    if settings is None:
        return []
    program = settings.get(_PROGRAM, config.program)
    message = f"run.dir={config.run.dir}: holds a run of `megatron-collab {program}`; choose another run.dir"
    require(program == config.program, message)
    before = _flat(settings)
    after = _flat(asdict(config))
    if credit := re.fullmatch(r"reward_to_go\((.+)\)", str(before.get("reward.turn_credit"))):  # of earlier versions
        before |= {"reward.turn_credit": "reward_to_go", "reward.turn_gamma": float(credit[1])}
    rules = {f"servers.NAME.{name}": (default, rule) for name, default, rule in declared(ServedConfig)}
    rules |= {name: (default, rule) for name, default, rule in declared(type(config))}
    differences = []
    for name in sorted(before.keys() | after.keys()):
        # The rule of a `user` setting also applies to named users; likewise for servers and assistants.
        canonical = _OF_ASSISTANTS.sub("assistant.", _OF_SERVERS.sub("servers.NAME.", _OF_USERS.sub("user.", name)))
        owner = canonical if canonical in rules else _owner(canonical, rules) or _owner(name, rules)
        if owner is None:
            continue  # an option that no longer exists
        default, rule = rules[owner]
        # A run of an earlier version may not have an option yet.
        old = before.get(name, default if name == owner and default != MISSING else None)
        new = after.get(name)
        if old == new or (old is None and _METRIC_BY_NAME.fullmatch(name)):
            continue
        if name == "model.path" and not new:
            continue  # an evaluation of assistant.model; earlier versions recorded a name
        # An entry of an option, e.g. the weight of a metric, may change, but usually not be added or removed.
        stays = canonical == owner or rule.entries_may_change or None not in (old, new)
        differences.append(Change(name, old, new, rule.may_change and stays))
    return differences


def _owner(name: str, options: Iterable[str]) -> str | None:
    return next((option for option in options if f"{name}.".startswith(f"{option}.")), None)


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in leaves(tree) if value != {}}
