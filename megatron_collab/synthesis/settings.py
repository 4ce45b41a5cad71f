"""The settings of a data set build: those of an evaluation, and `build`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_collab.config import BuildDatasetConfig
from megatron_collab.data.assistants import assistant_configs, with_all_settings
from megatron_collab.data.evaluation import EvaluationSet
from megatron_collab.launch import evaluation
from megatron_collab.launch.data_specs import evaluation_data
from megatron_collab.launch.spec import building_assistants, building_spec
from megatron_collab.runtime import hub
from megatron_collab.settings import read_prompt, replaced, require

_SET_OPTIONS = (
    "samples",
    "temperature",
    "user",
    "max_user_turns",
    "max_assistant_turns",
    "max_messages",
    "max_new_tokens",
)


def load(arguments: Sequence[str], defaults: Mapping[str, Any] = {}) -> BuildDatasetConfig:
    """The settings of a build; see `evaluation.load`. Raises ConfigError."""
    config = _with_assistants(evaluation.compose_absolute(BuildDatasetConfig, arguments, defaults))
    eval_sets = evaluation_data(config).eval_sets
    check_building(config, eval_sets)
    return evaluation.checked_evaluation(config, building_assistants(config, eval_sets), building_spec)


def check_building(config: BuildDatasetConfig, eval_sets: Sequence[EvaluationSet]) -> None:
    """Raises ConfigError if conversations cannot be built with these settings."""
    rollout = config.rollout
    require(rollout.max_messages is not None, "rollout.max_messages: not set; give the longest conversation, e.g. 14")
    require(rollout.futures > 0, "rollout.futures=0: the user's next message comes from a future; set 1 or more")
    message = "plays no futures, which supply the user's next message; choose another"
    require(config.reward.mode != "single_turn", f"reward.mode=single_turn: {message}")
    require(bool(config.reward.weights), "reward.weights: not set; give the metrics that rank the candidates")
    for eval_set in eval_sets:
        for name in _SET_OPTIONS:
            message = "conversations are built with the settings of rollout and user; set those"
            require(getattr(eval_set, name) == getattr(EvaluationSet, name), f"{eval_set.setting}.{name}: {message}")
        require(eval_set.against is None, f"{eval_set.setting}.against: nothing is evaluated; remove it")
    if config.build.push_to_hub is not None:
        hub.check_upload(config.build.push_to_hub, "build.push_to_hub")
    read_prompt("build.prompt", config.build.prompt, "collaborator", ())


def _with_assistants(config: BuildDatasetConfig) -> BuildDatasetConfig:
    """The settings with every entry of build.assistants complete; if the policy is not among them, the first one
    becomes config.assistant. Raises ConfigError.
    """
    by_name = assistant_configs(config.build.assistants, config.assistant)
    if not by_name:
        return config
    message = f"assistant.model={config.assistant.model}: not used with build.assistants; add it to them"
    require(config.assistant.model is None, message)
    config = replaced(config, {"build.assistants": with_all_settings(by_name)})
    endpoints = [endpoint for endpoint in by_name.values() if endpoint]
    return config if len(endpoints) < len(by_name) else replace(config, assistant=endpoints[0])
