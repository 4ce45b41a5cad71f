"""Going on with a run under other settings: which may change, and what has changed."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import MISSING

from megatron_collab.config.load import leaves
from megatron_collab.config.option import ConfigError, declared, require
from megatron_collab.config.prompt import SUFFIX
from megatron_collab.config.schema import Config, ServedConfig

# Earlier versions found every metric by its name alone; a run of them goes on with the same metric from another module.
_NAMED = re.compile(r"reward\.metrics\.\w+\.metric")
_OF_USERS = re.compile(r"^users\.[^.]+\.")
_OF_ASSISTANTS = re.compile(r"^build\.assistants\.[^.]+\.")
_OF_SERVERS = re.compile(r"^servers\.[^.]+\.")
SETTINGS = "config.json"  # in run.dir: the settings that the run was last started with
_PROMPTS = "prompts"  # in it: the prompts that the settings name, with their text


class Change(NamedTuple):
    """Another value of a setting; `allowed` if it extends the run or leaves its results as they are."""

    setting: str
    before: Any
    after: Any
    allowed: bool


def recorded(config: Config) -> dict[str, Any]:
    """What SETTINGS holds: the settings, and by the setting that names it each prompt's SHA-256 and text."""
    return {**asdict(config), _PROMPTS: _prompts(asdict(config))}


def read_settings(run_dir: Path) -> dict[str, Any] | None:
    """What SETTINGS of the run in `run_dir` holds; None without one. ConfigError where it is torn or another thing."""
    file = run_dir / SETTINGS
    if not file.exists():
        return None
    try:
        found = json.loads(file.read_text())
        whole = isinstance(found, dict) and all("sha256" in prompt for prompt in found.get(_PROMPTS, {}).values())
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise _torn(file) from error
    if not whole:
        raise _torn(file)
    return found


def recorded_values(run_dir: Path) -> dict[str, Any]:
    """By option what the run in `run_dir` was last started with. ConfigError where there is no run."""
    settings = read_settings(run_dir)
    require(settings is not None, f"{run_dir}: has no {SETTINGS}; give the folder of a run")
    return {name: recorded_value(settings, name, default) for name, default, _ in declared(Config)}


def recorded_value(settings: Any, name: str, default: Any) -> Any:
    """The value of an option in what `read_settings` gives; `default` where an earlier version has recorded none."""
    for key in name.split("."):
        if not isinstance(settings, Mapping) or key not in settings:
            return default
        settings = settings[key]
    return settings


def _torn(file: Path) -> ConfigError:
    return ConfigError(f"{file}: holds no settings of a run; restore it, or choose another run.dir")


def changes(config: Config) -> list[Change]:
    """What differs from the settings of the run in run.dir, if there is one; ConfigError where they cannot be read."""
    settings = read_settings(Path(config.run.dir))
    if settings is None:
        return []
    before = _flat(settings)
    prompts = settings.get(_PROMPTS, {})  # earlier versions recorded none
    after = _flat(asdict(config))
    if credit := re.fullmatch(r"reward_to_go\((.+)\)", str(before.get("reward.turn_credit"))):  # of earlier versions
        before |= {"reward.turn_credit": "reward_to_go", "reward.turn_gamma": float(credit[1])}
    rules = {f"servers.NAME.{name}": (default, rule) for name, default, rule in declared(ServedConfig)}
    rules |= {name: (default, rule) for name, default, rule in declared(Config)}
    found = []
    for name in sorted(before.keys() | after.keys()):
        # Settings of a named user may change where those of `user` may; so it is with assistants.
        alike = _OF_ASSISTANTS.sub("assistant.", _OF_SERVERS.sub("servers.NAME.", _OF_USERS.sub("user.", name)))
        owner = alike if alike in rules else _owner(alike, rules) or _owner(name, rules)
        if owner is None:
            continue  # an option that is gone
        default, rule = rules[owner]
        # A run of an earlier version may not have an option yet.
        had = before.get(name, default if name == owner and default != MISSING else None)
        has = after.get(name)
        if had == has or (had is None and _NAMED.fullmatch(name)):
            continue
        # An entry of an option, as the weight of a metric, may change, but mostly not come or go.
        stays = alike == owner or rule.comes or None not in (had, has)
        found.append(Change(name, had, has, rule.may_change and stays))
    for name, prompt in _prompts(asdict(config)).items():
        if prompt["sha256"] != prompts.get(name, prompt)["sha256"] and before.get(name) == after[name]:
            had, has = (f"{after[name]} with SHA-256 {each['sha256'][:12]}…" for each in (prompts[name], prompt))
            found.append(Change(name, had, has, allowed=False))
    return found


def _prompts(tree: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    files = {name: Path(value) for name, value in leaves(tree) if isinstance(value, str) and value.endswith(SUFFIX)}
    contents = {name: file.read_bytes() for name, file in files.items() if file.is_file()}
    return {
        name: {"sha256": hashlib.sha256(content).hexdigest(), "text": content.decode(errors="replace")}
        for name, content in contents.items()
    }


def _owner(name: str, options: Iterable[str]) -> str | None:
    return next((option for option in options if f"{name}.".startswith(f"{option}.")), None)


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in leaves(tree) if value != {}}
