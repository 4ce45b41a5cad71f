"""Users that the configuration names, as `users: {patient: {class: llm, model: …}}`, and which user a task has.

Each has a class (a kind of user; llm where it is not set), a weight, and the settings of `user`, whose values it has
where it sets none; only `options`, which belong to a class, are its own.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from megatron_collab.config import Config, UserConfig, build, nearest, require
from megatron_collab.types import Task

_SETTINGS = tuple(spec.name for spec in fields(UserConfig) if spec.name != "name")


def user_of(task: Task, config: Config) -> str:
    """The name of the user of `task`: user.name, or the task's own, or one of `users` drawn by weight, or empty.

    A task's own name with a ? behind it counts where it is one of `users`. The draw follows from run.seed and the
    task's id.
    """
    name = config.user.name or task.user
    wish = name.removesuffix("?")
    if name and (wish == name or wish in config.users):
        return wish
    weights = {name: weight_of(name, settings) for name, settings in sorted(config.users.items())}
    if not any(weights.values()):
        return ""
    return random.Random(f"{config.run.seed}/{task.id}/user").choices(list(weights), list(weights.values()))[0]


def weight_of(name: str, settings: Mapping[str, Any]) -> float:
    """The weight of a named user among tasks without a user. Raises ConfigError."""
    weight = settings.get("weight", 1.0)
    fits = isinstance(weight, int | float) and not isinstance(weight, bool) and 0 <= weight < float("inf")
    require(fits, f"users.{name}.weight={weight}: must be a number of at least 0")
    return float(weight)


def as_user(config: Config, name: str) -> Config:
    """`config` as the named user sees it: config.user has its settings, and its class in user.name.

    Raises ConfigError naming the setting that is refused.
    """
    given = dict(config.users[name] or {})
    for setting in given:
        known = ("class", "weight", *_SETTINGS)
        there = f"there are {', '.join(known)}"
        require(setting in known, f"users.{name}.{setting}: no such setting{nearest(setting, known)}; {there}")
    weight_of(name, given)
    values = {setting: getattr(config.user, setting) for setting in _SETTINGS if setting != "options"}
    own = {setting: value for setting, value in given.items() if setting in _SETTINGS}
    user = build(UserConfig, {**values, **own}, f"users.{name}.")
    return replace(config, user=replace(user, name=given.get("class") or "llm"))


def user_settings(config: Config) -> dict[str, UserConfig]:
    """The settings of all users by their group: `user`, and `users.NAME` of each named one. Raises ConfigError."""
    for name in config.users:
        require(re.fullmatch(r"[\w-]+", name) is not None, f"users.{name}: name it with letters, digits, - and _")
    return {"user": config.user, **{f"users.{name}": as_user(config, name).user for name in config.users}}
