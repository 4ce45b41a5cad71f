"""Users that the configuration names, e.g. `users: {patient: {class: llm, model: …}}`, and their settings.

Each has a class (a kind of user; default llm), a weight, and the settings of `user`, whose values are its defaults;
only `options`, which belong to a class, are not inherited.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from megatron_collab.config import UserConfig, build, nearest, require

_SETTINGS = tuple(spec.name for spec in fields(UserConfig) if spec.name != "name")


def weight_of(name: str, settings: Mapping[str, Any]) -> float:
    """The weight of a named user in the draw for tasks without a user. Raises ConfigError."""
    weight = settings.get("weight", 1.0)
    fits = isinstance(weight, int | float) and not isinstance(weight, bool) and 0 <= weight < float("inf")
    require(fits, f"users.{name}.weight={weight}: must be a number of at least 0")
    return float(weight)


def named_settings(name: str, settings: Mapping[str, Any], user: UserConfig) -> UserConfig:
    """All settings of a named user, with its class as `name`; `user`: the defaults. Raises ConfigError."""
    require(re.fullmatch(r"[\w-]+", name) is not None, f"users.{name}: name it with letters, digits, - and _")
    for setting in settings:
        known = ("class", "weight", *_SETTINGS)
        choices = f"there are {', '.join(known)}"
        require(setting in known, f"users.{name}.{setting}: no such setting{nearest(setting, known)}; {choices}")
    weight_of(name, settings)
    values = {setting: getattr(user, setting) for setting in _SETTINGS if setting != "options"}
    overrides = {setting: value for setting, value in settings.items() if setting in _SETTINGS}
    return replace(build(UserConfig, {**values, **overrides}, f"users.{name}."), name=settings.get("class") or "llm")
