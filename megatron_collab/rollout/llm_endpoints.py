"""The language models that a run calls, with the settings that name them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megatron_collab.data.evaluation import EvaluationSet
from megatron_collab.llm.endpoint import POLICY
from megatron_collab.reward.spec import RewardSpec
from megatron_collab.rollout.users import UserDirectory
from megatron_collab.settings import EndpointConfig, require
from megatron_collab.settings.schema import AssistantConfig


@dataclass(frozen=True)
class NamedEndpoint:
    """A language model: `setting` is the option that names it, `group` the group of its other options."""

    setting: str
    group: str
    endpoint: EndpointConfig


def judge_endpoints(reward: RewardSpec) -> list[NamedEndpoint]:
    """The judge and models of single metrics, if metrics use them. Raises ConfigError."""
    endpoints = dict[str, NamedEndpoint]()
    for name, metric in reward.metrics.items():
        first = f"reward.metrics.{name}.model" if metric.judge_model else "reward.judge.model"
        models = [(first, metric.judge_model or reward.judge.model)] if metric.judged else []
        models += [(f"reward.metrics.{name}.panel[{place}]", model) for place, model in enumerate(metric.panel)]
        names = [model for _, model in models]
        for place, (setting, model) in enumerate(models):
            fault = "is a judge of this metric already, with the same answer; name another model, or remove it"
            require(model not in names[:place], f"{setting}={model}: {fault}")
            require(model != POLICY, f"{setting}={POLICY}: the policy cannot be a judge; choose another model")
            if model:
                endpoints[setting] = NamedEndpoint(setting, "reward.judge", replace(reward.judge, model=model))
    return list(endpoints.values())


def user_endpoints(users: UserDirectory, names: Iterable[str]) -> list[NamedEndpoint]:
    """The models of the users with these names, as tasks name them. Raises ConfigError if there is no such user."""
    endpoints = dict[str, NamedEndpoint]()
    for name in names:
        user = users.find(name)
        if endpoint := user.kind.asks(user.argument, user.settings):
            setting = f"user={name}: the model" if user.argument and user.group == "user" else f"{user.group}.model"
            endpoints[setting] = NamedEndpoint(setting, user.group, endpoint)
    return list(endpoints.values())


def assistant_endpoints(assistant: AssistantConfig, eval_sets: Sequence[EvaluationSet]) -> list[NamedEndpoint]:
    """The model that replaces the policy as assistant, if any, with the temperatures of data.eval sets."""
    setting = "assistant.model"
    if not assistant.model:
        return []
    message = f"{setting}={POLICY}: to evaluate the policy, set model.path and remove this"
    require(assistant.model != POLICY, message)
    by_sets = [
        NamedEndpoint(setting, eval_set.setting, replace(assistant, temperature=eval_set.temperature))
        for eval_set in eval_sets
        if eval_set.temperature is not None
    ]
    return [NamedEndpoint(setting, "assistant", assistant), *by_sets]
