"""Reads all rows of a run before it starts, and checks their users, metrics and language models."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_collab.algo.teacher_prompts import CONTEXT
from megatron_collab.config import Config, PlayConfig
from megatron_collab.data.evaluation import EvaluationSet
from megatron_collab.data.survey import TaskRequirements
from megatron_collab.launch import endpoints
from megatron_collab.launch.objective import check_steps
from megatron_collab.launch.remarks import forms_without_effect
from megatron_collab.launch.spec import RunSpec
from megatron_collab.llm.endpoint import POLICY
from megatron_collab.rollout.task_requirements import USER, WEIGHTS, requirements_at_start
from megatron_collab.rollout.users import User, UserDirectory
from megatron_collab.runtime.process import first_on_node, global_rank
from megatron_collab.settings import ConfigError, replaced, require
from megatron_collab.settings.extension import NoOptions
from megatron_collab.types import Task

if TYPE_CHECKING:
    from megatron_collab.data.datasets import SurveyedSources
    from megatron_collab.data.survey import Survey

logger = logging.getLogger(__name__)


def read_data(
    config: Config, spec: RunSpec, schemas: Sequence[Mapping[str, Any]]
) -> tuple[Config, list[SurveyedSources[Any]]]:
    """Read and check every row of data.train and data.eval (see `check_data`).

    Returns the settings with train.steps, which the rows decide if train.epochs is set, and the data. `schemas`: the
    tools that the policy's prompt lists.
    Raises ConfigError, and ValueError or RunStopped for unreadable data.
    """
    from megatron_collab.data import datasets

    requirements = partial(requirements_at_start, spec.play) if spec.play else lambda source: TaskRequirements()
    training = datasets.TrainingData[Any](spec.data, schemas, requirements)
    config = replaced(config, {"train.steps": training.steps})
    check_steps(config)
    data: list[SurveyedSources[Any]] = [training]
    if sets := spec.data.eval_sets:
        data.append(datasets.SurveyedSources(spec.data, "data.eval", sets, schemas, requirements))
    if spec.play:
        check_data(config, spec, data)
    return config, data


def check_data(config: PlayConfig, spec: RunSpec, data: Sequence[SurveyedSources[Any]]) -> None:
    """Check the users and metrics of all tasks, and the language models in use. Raises ConfigError."""
    assert spec.play and spec.serving
    endpoints.check_recordings(config.llm, Path(config.run.dir))
    users = spec.play.users
    surveyed = [source for dataset in data for source in _surveys(users, dataset)]
    examples = users_of_tasks(users, surveyed)
    if not plays_users(config, data):
        examples = {name: example for name, example in examples.items() if name in users.named or acts(users, name)}
    check_users(users, examples)
    for dataset in data:
        check_needs(config, dataset, trained=dataset.setting == "data.train")
    called = spec.endpoints_of(examples)
    for user in called if not spec.serving.policy.placement.replicas else ():
        message = f"{user.setting}={POLICY}: is not served if assistant.model is set; choose another"
        require(user.endpoint.model != POLICY, message)
    if isinstance(config, Config) and config.rollout.max_staleness and config.rollout.server.colocated:
        ahead = f"rollout.max_staleness={config.rollout.max_staleness}: its servers pause in the middle of its messages"
        for user in called:
            message = f"{user.setting}={POLICY}: {ahead}; set rollout.server.colocated=false, or max_staleness to 0"
            require(user.endpoint.model != POLICY, message)
    if first_on_node():  # LiteLLM is slow to import
        language_models = [*called, *spec.judges, *spec.assistants]
        endpoints.check_served(config, language_models)
        unpriced = endpoints.check_prices(config, language_models)
        endpoints.check_support(config, language_models)
        for line in [*unpriced, *forms_without_effect(users, examples)] if global_rank() == 0 else ():
            logger.warning(line)


def plays_users(config: PlayConfig, data: Sequence[SurveyedSources[Any]]) -> bool:
    """Whether a user writes a message: not if the policy has one turn and the tasks of all sources are opened."""
    turns = [config.rollout.max_assistant_turns]
    turns += [getattr(source, "max_assistant_turns", None) or 1 for dataset in data for source in dataset.sources]
    return max(turns) > 1 or any(survey.unopened for dataset in data for survey in dataset.surveys)


def acts(users: UserDirectory, name: str) -> bool:
    """Whether users with that name do something even if they write no message. It is so if they do not exist."""
    try:
        kind = users.find(name).kind
    except ConfigError:  # a conversation could not start
        return True
    return kind.start is not User.start or kind.finish is not User.finish


def users_of_tasks(users: UserDirectory, surveyed: Iterable[tuple[UserDirectory, str, Survey]]) -> dict[str, str]:
    """The names of the users in the settings and in the tasks, each with an example.

    `surveyed`: of each source, the users it is played with, its name in messages, and its survey.
    """
    examples: dict[str, str] = {name: f"users.{name}" for name in users.named}
    for source_users, place, survey in surveyed:
        for user, task in survey.users.items():
            name = source_users.name_of(Task(task, (), "", "", user))
            examples[name] = f"{place}, task {task}"
    return examples


def check_users(users: UserDirectory, examples: Mapping[str, str]) -> None:
    """Raises ConfigError if a user of the tasks or of user.name cannot be used. `examples`: task by user."""
    for name, example in examples.items():
        reason = users.fault(name)
        require(reason is None, f"{example}: {reason}")
    takes = any(users.find(name).kind.Options is not NoOptions for name in examples)
    require(takes or not users.user.options, "user.options: no user of the tasks has options; remove them")


def check_needs(config: PlayConfig, data: SurveyedSources[Any], trained: bool) -> None:
    """Raises ConfigError if a source has no task that its user can play, or no `trained` source fits a weighted metric.

    Sources share the weights, and each metric picks its tasks (docs/decisions/0006-not-applying-is-not-missing.md).
    """
    surveyed = list(zip(data.sources, data.sets, data.surveys, strict=True))
    # By setting: the sources in which no task meets its requirements, with what the tasks lack.
    unmet: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for source, tasks, survey in surveyed:
        for setting, (count, tried, example) in survey.unscorable.items():
            weight = config.reward.weights.get(setting.removeprefix(WEIGHTS), 0)
            message = f"{setting}={weight:g}: gives no task of {data.setting}={source.source} a score ({tried} tried)"
            scores = count < tried or (trained and not weight)
            require(scores, f"{message}; {example}, or give other tasks or another metric")
        for setting, lacking in survey.lacking.items():
            if sum(lacking.values()) == len(tasks):
                unmet[setting].append((source.source, " or ".join(lacking)))
    for setting, places in unmet.items():
        place, requirement = places[0]
        message = f"{data.setting}={place}: none of its tasks has {requirement}"
        require(setting != USER, f"{message}, which its user needs; give tasks that have it, or another user.name")
        refusal = f"{message}, which the teacher is to be told; give tasks that have it, or another {CONTEXT}"
        require(setting != CONTEXT or len(places) < len(surveyed), refusal)
        weight = config.reward.weights.get(setting.removeprefix(WEIGHTS), 0)
        require(
            not trained or len(places) < len(surveyed) or not weight,
            f"{setting}={weight:g}: {message}, without which the metric does not apply; give tasks that have it, or "
            f"set {setting}=0",
        )


def _surveys(users: UserDirectory, data: SurveyedSources[Any]) -> Iterable[tuple[UserDirectory, str, Survey]]:
    for source, survey in zip(data.sources, data.surveys, strict=True):
        is_set = isinstance(source, EvaluationSet)
        setting = source.setting if is_set else data.setting
        yield users.for_set(source.user) if is_set else users, f"{setting}={source.source}", survey
