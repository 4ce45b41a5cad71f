"""Assistants of a data set build: the entries of build.assistants, assigned to candidates in rotation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, NamedTuple

from megatron_collab.settings import build, require
from megatron_collab.settings.schema import AssistantConfig

POLICY = "policy"  # model.path
_SETTINGS = tuple(spec.name for spec in fields(AssistantConfig))


class CandidateAssistant(NamedTuple):
    """Assistant of a candidate and its futures; `proactive`: build.prompt asks it to involve the user."""

    assistant: str
    proactive: bool


def assistant_configs(entries: Mapping[str, Any], assistant: AssistantConfig) -> dict[str, AssistantConfig | None]:
    """The config of each entry of build.assistants by name, None for the policy.

    Settings that an entry leaves out come from `assistant`. Raises ConfigError naming the invalid entry.
    """
    configs = dict[str, AssistantConfig | None]()
    defaults = {setting: getattr(assistant, setting) for setting in _SETTINGS}
    for name, entry in entries.items():
        group = f"build.assistants.{name}"
        require(re.fullmatch(r"[\w-]+", name) is not None, f"{group}: name it with letters, digits, - and _")
        settings = dict(entry) if isinstance(entry, Mapping) else {"model": entry}
        model = settings.get("model")
        require(isinstance(model, str) and bool(model), f"{group}={entry}: names no model; give policy or a model")
        message = f"{group}: policy is model.path and takes no settings; set those of rollout"
        require(model != POLICY or settings.keys() == {"model"}, message)
        configs[name] = None if model == POLICY else build(AssistantConfig, {**defaults, **settings}, f"{group}.")
    return configs


def with_all_settings(assistants: Mapping[str, AssistantConfig | None]) -> dict[str, Any]:
    """build.assistants with all settings of every entry, so that none is taken from `assistant` any more."""
    return {name: asdict(entry) if entry else {"model": POLICY} for name, entry in assistants.items()}


def candidate_assistants(names: Sequence[str], count: int, proactive: float) -> list[CandidateAssistant]:
    """The assistant of each of `count` candidates: `names` in turn. The first share `proactive` is proactive."""
    proactive_count = round(proactive * count)
    return [CandidateAssistant(names[number % len(names)], number < proactive_count) for number in range(count)]
