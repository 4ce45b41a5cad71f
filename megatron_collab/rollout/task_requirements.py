"""Requirements of metrics, users and tools on a task, checked before the run starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import cache
from typing import Any

from megatron_collab.config import ConfigError, named_files
from megatron_collab.data.evaluation import EvaluationSet
from megatron_collab.data.sources import Source
from megatron_collab.data.survey import TaskRequirements
from megatron_collab.reward.metrics import ScoredMetric
from megatron_collab.rollout.player import PlaySpec
from megatron_collab.rollout.users import ResolvedUser, User, UserDirectory
from megatron_collab.types import Task

USER = "user"  # the name of the users' requirement; those of metrics have the names of their options
WEIGHTS = "reward.weights."


def task_requirements(play: PlaySpec, source: Source) -> TaskRequirements:
    """The requirements on a source's tasks: by setting, what a metric or user lacks, and checks that it can be read."""
    play = play.for_set(source) if isinstance(source, EvaluationSet) else play
    users, metrics, directory = _UserRequirements(play.users), play.reward.metrics, play.users
    lacks = {f"{WEIGHTS}{name}": metric.lacks for name, metric in metrics.items() if metric.selective}
    lacks[USER] = users.lacks
    checks: list[tuple[str, Callable[[Task], None]]] = [(USER, users.check)]
    checks += [(f"{WEIGHTS}{name}", metric.check_task) for name, metric in metrics.items()]
    checks += [(f"tool {type(tools).__name__}", tools.check_task) for tools in play.tools.toolsets]

    def check(task: Task) -> None:
        for name, task_check in checks:
            try:
                task_check(task)
            except BaseException as error:  # a custom class may raise anything
                reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
                owner = f"{name} {play.users.name_of(task) or 'llm'}" if name == USER else name
                raise ValueError(f"{owner} cannot read it: {reason}") from error

    settings = {name: metric.settings for name, metric in metrics.items() if metric.settings}
    inputs: dict[str, Any] = {"weights": [*play.reward.weights], "metrics": settings, "users": directory.named}
    inputs |= {"user": asdict(directory.user), "seed": directory.seed}
    inputs |= {"tools": play.tools.names, "options": play.tools.options}
    changes = [(name, path.stat().st_mtime_ns) for name, path in named_files(inputs) if path.exists()]
    return TaskRequirements(lacks, check, depends_on=[inputs, changes])


def requirements_at_start(play: PlaySpec, source: Source) -> TaskRequirements:
    """As `task_requirements`, with the trials of metrics."""
    play_of_source = play.for_set(source) if isinstance(source, EvaluationSet) else play
    metrics = {name: metric for name, metric in play_of_source.reward.metrics.items() if metric.tries_tasks}
    trials = {f"{WEIGHTS}{name}": metric.unscorable for name, metric in metrics.items()}
    return replace(task_requirements(play, source), trials=trials)


def applicable_metrics(metrics: Mapping[str, ScoredMetric]) -> Callable[[Task], set[str]]:
    """A function that gives the metrics that apply to a task, judged before any conversation."""
    return lambda task: {name for name, metric in metrics.items() if not metric.lacks(task)}


class _UserRequirements:
    """Requirements of users on tasks; none if the user does not exist, since that is refused elsewhere."""

    def __init__(self, users: UserDirectory) -> None:
        self._users, self._find = users, cache(self._known)

    def lacks(self, task: Task) -> str | None:
        return self._find(self._users.name_of(task)).kind.lacks(task)

    def check(self, task: Task) -> None:
        user = self._find(self._users.name_of(task))
        if task.unopened and not user.kind.opens:
            raise ValueError("it has no message, and this user cannot send the first; add one or choose another user")
        user.kind.check_task(task, user.argument, user.settings)

    def _known(self, name: str) -> ResolvedUser:
        try:
            return self._users.find(name)
        except ConfigError:
            return ResolvedUser(name, User, "", self._users.user)
