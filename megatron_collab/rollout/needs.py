"""What the metrics and users of a run need of a task, which can be told before any conversation about it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from megatron_collab.config import Config, ConfigError
from megatron_collab.data.survey import Needs
from megatron_collab.reward import metrics
from megatron_collab.rollout.users import User, resolve_user
from megatron_collab.rollout.users.named import user_of
from megatron_collab.types import Task

USER = "user"  # what the need of the users is called; those of metrics as their settings
WEIGHTS = "reward.weights."


def needs(config: Config) -> Needs:
    """By setting what a task lacks that a metric or its user needs. Without metrics that apply to every task."""
    of_metrics = metrics.lacks(config.reward)
    return {**{f"{WEIGHTS}{name}": lacks for name, lacks in of_metrics.items()}, USER: _lacks_for_user(config)}


def applying(config: Config) -> Callable[[Task], set[str]]:
    """The metrics of reward.weights that apply to a task, as far as that can be told before a conversation."""
    names, of_metrics = set(config.reward.weights), metrics.lacks(config.reward)
    return lambda task: names - {name for name, lacks in of_metrics.items() if lacks(task)}


def _lacks_for_user(config: Config) -> Callable[[Task], str | None]:
    """None also for a task whose user does not exist, which `users.check_user` refuses."""

    @cache
    def kind(name: str) -> type[User]:
        try:
            return resolve_user(name, config)[0]
        except ConfigError:
            return User

    return lambda task: kind(user_of(task, config)).lacks(task)
