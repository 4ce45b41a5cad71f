"""Requirements of metrics, users and tools on a task, checked before the run starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from typing import Any, NamedTuple

from megatron_collab.algo.teacher_prompts import CONTEXT, lacks
from megatron_collab.data.evaluation import EvaluationSet
from megatron_collab.data.sources import Source
from megatron_collab.data.survey import Step, TaskRequirements
from megatron_collab.reward.metrics import ScoredMetric
from megatron_collab.rollout.player import PlaySpec
from megatron_collab.rollout.users import DEFAULT, ResolvedUser, User, UserDirectory
from megatron_collab.settings import ConfigError, named_files
from megatron_collab.types import Task

USER = "user"  # the name of the users' requirement; those of metrics have the names of their options
WEIGHTS = "reward.weights."
_TOOLS = "rollout.tools"


class _Requirement(NamedTuple):
    """What one metric, user or tool requires: `owner` and `kind` name it in messages; `lacks` is None for tools."""

    setting: str
    owner: str
    kind: str
    check_task: Callable[[Task], None]
    lacks: Callable[[Task], str | None] | None = None

    def missing(self, task: Task, step: Step) -> str | None:
        """What the task lacks. Raises ValueError if it cannot be read."""
        try:
            step(f"{self.owner}: check_task() of {self.kind}")
            self.check_task(task)
            step(f"{self.owner}: lacks() of {self.kind}")
            return self.lacks(task) if self.lacks else None
        except MemoryError:  # for another row it would take as long
            raise
        except BaseException as error:  # a custom class may raise anything
            reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise ValueError(f"{self.owner} cannot read it: {reason}") from error


def task_requirements(play: PlaySpec, source: Source) -> TaskRequirements:
    """The requirements of users, metrics and tools on a source's tasks."""
    play = play.for_set(source) if isinstance(source, EvaluationSet) else play
    metrics, directory = play.reward.metrics, play.users
    of_user = cache(partial(_of_user, directory))
    shared = [
        _Requirement(
            *(f"{WEIGHTS}{name}", f"{WEIGHTS}{name}", metric.kind.__name__, metric.check_task),
            metric.lacks if metric.selective else None,
        )
        for name, metric in metrics.items()
    ]
    shared += [
        _Requirement(_TOOLS, f"tool {type(tools).__name__}", type(tools).__name__, tools.check_task)
        for tools in play.tools.toolsets
    ]

    if context := play.teacher_context:
        of_teacher = CONTEXT, CONTEXT, "the teacher", lambda task: None, partial(lacks, context)
        shared.append(_Requirement(*of_teacher))

    def missing(task: Task, step: Step) -> dict[str, str]:
        requirements = [of_user(directory.name_of(task)), *shared]
        return {entry.setting: lack for entry in requirements if (lack := entry.missing(task, step))}

    settings = {name: metric.settings for name, metric in metrics.items() if metric.settings}
    inputs: dict[str, Any] = {"weights": [*play.reward.weights], "metrics": settings, "users": directory.named}
    inputs |= {"user": asdict(directory.user), "seed": directory.seed}
    inputs |= {"tools": play.tools.names, "options": play.tools.options}
    inputs |= {"teacher": context} if context else {}
    changes = [(name, path.stat().st_mtime_ns) for name, path in named_files(inputs) if path.exists()]
    selective = [entry.setting for entry in shared if entry.lacks]
    return TaskRequirements([*selective, USER], missing, depends_on=[inputs, changes])


def requirements_at_start(play: PlaySpec, source: Source) -> TaskRequirements:
    """As `task_requirements`, with the trials of metrics, and all in a child process."""
    play_of_source = play.for_set(source) if isinstance(source, EvaluationSet) else play
    metrics = {name: metric for name, metric in play_of_source.reward.metrics.items() if metric.tries_tasks}
    trials = {f"{WEIGHTS}{name}": partial(_unscorable, f"{WEIGHTS}{name}", metric) for name, metric in metrics.items()}
    return replace(task_requirements(play, source), trials=trials, in_child=True)


def _unscorable(setting: str, metric: ScoredMetric, tasks: Sequence[Task], step: Step) -> Mapping[int, str]:
    call = f"{setting}: unscorable() of {metric.kind.__name__}, which tries {len(tasks)} tasks before the start,"
    step(call)
    try:
        return metric.unscorable(tasks)
    except ValueError as error:
        raise ValueError(f"{call} fails (ValueError: {error}); mend it, or leave it out") from error


def applicable_metrics(metrics: Mapping[str, ScoredMetric]) -> Callable[[Task], set[str]]:
    """A function that gives the metrics that apply to a task, judged before any conversation."""
    return lambda task: {name for name, metric in metrics.items() if not metric.lacks(task)}


def _of_user(users: UserDirectory, name: str) -> _Requirement:
    """The requirements of the users with that name; none if they do not exist, since that is refused elsewhere."""
    try:
        user = users.find(name)
    except ConfigError:
        user = ResolvedUser(name, User, "", users.user)

    def check_task(task: Task) -> None:
        if task.unopened and not user.kind.opens:
            raise ValueError("it has no message, and this user cannot send the first; add one or choose another user")
        user.kind.check_task(task, user.argument, user.settings)

    return _Requirement(USER, f"{USER} {name or DEFAULT}", user.kind.__name__, check_task, user.kind.lacks)
