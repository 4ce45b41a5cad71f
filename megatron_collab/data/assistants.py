"""Which assistant gives which candidate where conversations are built: those of build.assistants, dealt in turn."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

from megatron_collab.config import Config, build, require
from megatron_collab.config.schema import AssistantConfig

POLICY = "policy"  # model.path
_SETTINGS = tuple(spec.name for spec in fields(AssistantConfig))


class Dealt(NamedTuple):
    """Who gives a candidate, and its futures; `proactive`: asked by build.prompt to involve the user."""

    assistant: str
    proactive: bool


def named(config: Config) -> dict[str, AssistantConfig | None]:
    """The entries of build.assistants, None for the policy. Raises ConfigError naming what is refused.

    What an entry does not set it has from `assistant`.
    """
    found = dict[str, AssistantConfig | None]()
    defaults = {setting: getattr(config.assistant, setting) for setting in _SETTINGS}
    for name, entry in config.build.assistants.items():
        group = f"build.assistants.{name}"
        require(re.fullmatch(r"[\w-]+", name) is not None, f"{group}: name it with letters, digits, - and _")
        own = dict(entry) if isinstance(entry, Mapping) else {"model": entry}
        model = own.get("model")
        require(isinstance(model, str) and bool(model), f"{group}={entry}: names no model; give policy or a model")
        message = f"{group}: policy is model.path and takes no settings; set those of rollout"
        require(model != POLICY or own.keys() == {"model"}, message)
        found[name] = None if model == POLICY else build(AssistantConfig, {**defaults, **own}, f"{group}.")
    return found


def written_out(assistants: Mapping[str, AssistantConfig | None]) -> dict[str, Any]:
    """build.assistants with all settings of each, which are then no matter of `assistant` any more."""
    return {name: asdict(each) if each else {"model": POLICY} for name, each in assistants.items()}


def dealt(config: Config) -> list[Dealt]:
    """Of each candidate by its number who gives it; the first share of build.proactive is proactive."""
    names = list(named(config)) or [config.assistant.model or Path(config.model.path).name]
    count = config.train.rollouts_per_prompt
    under = round(config.build.proactive * count)
    return [Dealt(names[number % len(names)], number < under) for number in range(count)]
