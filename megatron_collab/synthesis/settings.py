"""The settings of a data set build: those of an evaluation, and `build`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_collab.config import BuildDatasetConfig
from megatron_collab.data.assistants import assistant_configs, with_all_settings
from megatron_collab.launch import evaluation
from megatron_collab.launch.data_specs import evaluation_data
from megatron_collab.launch.spec import building_assistants, building_spec
from megatron_collab.runtime import hub
from megatron_collab.settings import replaced, require


def load(arguments: Sequence[str], defaults: Mapping[str, Any] = {}) -> BuildDatasetConfig:
    """The settings of a build; see `evaluation.load`. Raises ConfigError."""
    config = _with_assistants(evaluation.compose_absolute(BuildDatasetConfig, arguments, defaults))
    if config.build.push_to_hub is not None:
        hub.check_upload(config.build.push_to_hub, "build.push_to_hub")
    assistants = building_assistants(config, evaluation_data(config).eval_sets)
    return evaluation.checked_evaluation(config, assistants, building_spec)


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
