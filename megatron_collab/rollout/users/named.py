"""Users that the configuration names, e.g. `users: {patient: {class: llm, model: …}}`, and the user of a task.

Each has a class (a kind of user; default llm), a weight, and the settings of `user`, whose values are its defaults;
only `options`, which belong to a class, are not inherited.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from megatron_collab.config import PlayConfig, UserConfig, build, nearest, require
from megatron_collab.types import Task

_SETTINGS = tuple(spec.name for spec in fields(UserConfig) if spec.name != "name")


def user_of(task: Task, config: PlayConfig) -> str:
    """The name of the user of `task`: user.name, or the task's user, or one of `users` drawn by weight, or empty.

    A name with a trailing ? applies if it is one of `users`. The draw is seeded with run.seed and the task's id.
    """
    name = config.user.name or task.user
    requested = name.removesuffix("?")
    if name and (requested == name or requested in config.users):
        return requested
    weights = {name: weight_of(name, settings) for name, settings in sorted(config.users.items())}
    if not any(weights.values()):
        return ""
    return random.Random(f"{config.run.seed}/{task.id}/user").choices(list(weights), list(weights.values()))[0]


def weight_of(name: str, settings: Mapping[str, Any]) -> float:
    """The weight of a named user in the draw for tasks without a user. Raises ConfigError."""
    weight = settings.get("weight", 1.0)
    fits = isinstance(weight, int | float) and not isinstance(weight, bool) and 0 <= weight < float("inf")
    require(fits, f"users.{name}.weight={weight}: must be a number of at least 0")
    return float(weight)


def _named_settings(config: PlayConfig, name: str) -> UserConfig:
    """The settings of a named user, with its class as `name`. Raises ConfigError naming the invalid setting."""
    settings = dict(config.users[name] or {})
    for setting in settings:
        known = ("class", "weight", *_SETTINGS)
        choices = f"there are {', '.join(known)}"
        require(setting in known, f"users.{name}.{setting}: no such setting{nearest(setting, known)}; {choices}")
    weight_of(name, settings)
    values = {setting: getattr(config.user, setting) for setting in _SETTINGS if setting != "options"}
    overrides = {setting: value for setting, value in settings.items() if setting in _SETTINGS}
    user = build(UserConfig, {**values, **overrides}, f"users.{name}.")
    return replace(user, name=settings.get("class") or "llm")


def user_settings(config: PlayConfig) -> dict[str, UserConfig]:
    """The settings of all users by option group: `user`, and `users.NAME` for named users. Raises ConfigError."""
    for name in config.users:
        require(re.fullmatch(r"[\w-]+", name) is not None, f"users.{name}: name it with letters, digits, - and _")
    return {"user": config.user, **{f"users.{name}": _named_settings(config, name) for name in config.users}}
