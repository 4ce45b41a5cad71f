"""The language models that a run asks, by the settings that name them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from megatron_collab.config import Config, EndpointConfig, require
from megatron_collab.data import assistants
from megatron_collab.data.evaluation import evaluation_sets
from megatron_collab.llm.endpoint import POLICY
from megatron_collab.reward import metrics
from megatron_collab.rollout import users


@dataclass(frozen=True)
class AskedModel:
    """A language model: `setting` names it, and its other settings are those of `group`."""

    setting: str
    group: str
    endpoint: EndpointConfig


def of_judges(config: Config) -> list[AskedModel]:
    """The judge and the metrics' own models, as far as the metrics of reward.weights ask them. Raises ConfigError."""
    reward, found = config.reward, dict[str, AskedModel]()
    for name in reward.weights:
        kind, options = metrics.split(name, reward.metrics.get(name, {}))
        own = getattr(options, "model", None)
        if kind.judged(options) and (own or reward.judge.model):
            setting = f"reward.metrics.{name}.model" if own else "reward.judge.model"
            message = f"{setting}={POLICY}: the policy plays users, and judges nothing; choose another model"
            require((own or reward.judge.model) != POLICY, message)
            found[setting] = AskedModel(setting, "reward.judge", replace(reward.judge, model=own or reward.judge.model))
    return list(found.values())


def of_users(config: Config, names: Iterable[str]) -> list[AskedModel]:
    """What the users of these names ask, as tasks give them; there must be such users."""
    found = dict[str, AskedModel]()
    for name in names:
        kind, argument, own, group = users.resolve_user(name, config)
        if endpoint := kind.asks(argument, own):
            setting = f"user={name}: the model" if argument and name not in config.users else f"{group}.model"
            found[setting] = AskedModel(setting, group, endpoint)
    return list(found.values())


def of_assistant(config: Config) -> list[AskedModel]:
    """The models that play the assistant in place of the policy, if any, as each set of data.eval asks them."""
    setting, asked = "assistant.model", config.assistant
    if config.build.assistants:
        entries = assistants.named(config).items()
        groups = ((f"build.assistants.{name}", endpoint) for name, endpoint in entries if endpoint)
        return [AskedModel(f"{group}.model", group, endpoint) for group, endpoint in groups]
    if not asked.model:
        return []
    message = f"{setting}={POLICY}: the policy is evaluated as model.path; remove it"
    require(asked.model != POLICY, message)
    by_sets = [
        AskedModel(setting, one.setting, replace(asked, temperature=one.temperature))
        for one in evaluation_sets(config)
        if one.temperature is not None
    ]
    return [AskedModel(setting, "assistant", asked), *by_sets]
