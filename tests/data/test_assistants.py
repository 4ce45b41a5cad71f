"""Which assistant gives which candidate, by build.assistants."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_collab.config import BuildDatasetConfig
from megatron_collab.data.assistants import (
    CandidateAssistant,
    assistant_configs,
    candidate_assistants,
    with_all_settings,
)
from megatron_collab.settings import ConfigError
from tests.helpers import configured


def config_with(assistants: Any, **settings: Any) -> BuildDatasetConfig:
    named = {name.replace("__", "."): value for name, value in settings.items()}
    return configured(BuildDatasetConfig(), {"build.assistants": assistants, "model.path": "/models/small", **named})


def test_candidates_are_dealt_in_turn_and_the_first_share_is_proactive() -> None:
    assert candidate_assistants(["ours", "other"], 5, 0.4) == [
        CandidateAssistant("ours", True),
        CandidateAssistant("other", True),
        *(CandidateAssistant("ours", False), CandidateAssistant("other", False), CandidateAssistant("ours", False)),
    ]
    assert candidate_assistants(["small"], 2, 0.0) == [CandidateAssistant("small", False)] * 2


def test_an_entry_inherits_the_settings_of_assistant_and_keeps_them() -> None:
    entries = {"cold": {"model": "openai/m", "temperature": 0.1}, "warm": "openai/m", "policy": "policy"}
    config = config_with(entries, assistant__max_tokens=77)
    configs = assistant_configs(config.build.assistants, config.assistant)
    cold, warm = configs["cold"], configs["warm"]
    assert configs["policy"] is None and cold and warm and (cold.temperature, warm.temperature) == (0.1, 1.0)
    assert cold.max_tokens == 77 and cold.model == warm.model == "openai/m"
    config.build.assistants = with_all_settings(configs)
    config.assistant = cold
    assert assistant_configs(config.build.assistants, config.assistant) == configs


@pytest.mark.parametrize(
    ("assistants", "message"),
    [
        ({"a": 3}, r"build.assistants.a=3: names no model; give policy or a model"),
        ({"a": {}}, r"build.assistants.a=\{\}: names no model"),
        ({"a b": "policy"}, r"build.assistants.a b: name it with letters, digits, - and _"),
        (
            {"a": {"model": "policy", "temperature": 0}},
            r"build.assistants.a: policy is model.path and takes no settings",
        ),
        ({"a": {"model": "openai/m", "temprature": 0}}, r"build.assistants.a.temprature: no such setting"),
        ({"a": {"model": "openai/m", "temperature": -1}}, r"build.assistants.a.temperature"),
    ],
)
def test_bad_entries_are_refused_in_one_line(assistants: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        config = config_with(assistants)
        assistant_configs(config.build.assistants, config.assistant)
    assert "\n" not in str(refused.value)
