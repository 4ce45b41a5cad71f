"""What the metrics, users and tools of a run need of a task, which can be told before any conversation about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from megatron_collab.config import SUFFIX, Config, ConfigError
from megatron_collab.data.survey import Needs
from megatron_collab.reward import metrics
from megatron_collab.rollout.tools.toolbox import make_tools
from megatron_collab.rollout.users import User, resolve_user
from megatron_collab.rollout.users.named import user_of
from megatron_collab.types import Task

USER = "user"  # what the need of the users is called; those of metrics as their settings
WEIGHTS = "reward.weights."


def needs(config: Config) -> Needs:
    """What a task lacks that a metric or its user needs, by setting, and what it must be read by."""
    users, of_metrics = _Users(config), metrics.lacks(config.reward)
    lacks = {**{f"{WEIGHTS}{name}": lacks for name, lacks in of_metrics.items()}, USER: users.lacks}
    checks: list[tuple[str, Callable[[Task], None]]] = [(USER, users.check)]
    checks += [(f"{WEIGHTS}{name}", check) for name, check in metrics.task_checks(config.reward).items()]
    checks += [(f"tool {type(tools).__name__}", tools.check_task) for tools in make_tools(config.rollout)]

    def check(task: Task) -> None:
        for name, one in checks:
            try:
                one(task)
            except Exception as error:  # of a class from anywhere
                reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
                who = f"{name} {user_of(task, config) or 'llm'}" if name == USER else name
                raise ValueError(f"{who} cannot read it: {reason}") from error

    rollout, reward = config.rollout, config.reward
    decides = [reward.weights, reward.metrics, asdict(config.user), config.users, config.run.seed]
    decides += [rollout.tools, rollout.tool_options]
    return Needs(lacks, check, [decides, _changed(decides)])


def applying(config: Config) -> Callable[[Task], set[str]]:
    """The metrics of reward.weights that apply to a task, as far as that can be told before a conversation."""
    names, of_metrics = set(config.reward.weights), metrics.lacks(config.reward)
    return lambda task: names - {name for name, lacks in of_metrics.items() if lacks(task)}


class _Users:
    """What users say of tasks; nothing of one whose user does not exist, which `users.check_user` refuses."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._kind = cache(self._resolved)

    def lacks(self, task: Task) -> str | None:
        return self._kind(user_of(task, self._config))[0].lacks(task)

    def check(self, task: Task) -> None:
        kind, argument, config = self._kind(user_of(task, self._config))
        if task.unopened and not kind.opens:
            raise ValueError("it has no message, and this user opens no conversation; give it one, or another user")
        kind.check_task(task, argument, config)

    def _resolved(self, name: str) -> tuple[type[User], str, Config]:
        try:
            return resolve_user(name, self._config)[:3]
        except ConfigError:
            return User, "", self._config


def _changed(settings: Any) -> list[tuple[str, int]]:
    """The prompts that settings name, and when each was last changed (ns)."""
    if isinstance(settings, Mapping):
        settings = list(settings.values())
    if isinstance(settings, str):
        there = settings.endswith(SUFFIX) and Path(settings).is_file()
        return [(settings, Path(settings).stat().st_mtime_ns)] if there else []
    listed = settings if isinstance(settings, Sequence) else ()
    return [found for entry in listed for found in _changed(entry)]
