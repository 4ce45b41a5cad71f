"""Who gives which candidate, by build.assistants."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_collab.config import Config, ConfigError
from megatron_collab.data.assistants import Dealt, dealt, named, written_out
from tests.helpers import configured


def given(assistants: Any, **settings: Any) -> Config:
    named = {name.replace("__", "."): value for name, value in settings.items()}
    return configured(Config(), {"build.assistants": assistants, "model.path": "/models/small", **named})


def test_candidates_are_dealt_in_turn_and_the_first_share_is_proactive() -> None:
    config = given({"ours": "policy", "other": "served/other"}, train__rollouts_per_prompt=5, build__proactive=0.4)
    assert dealt(config) == [
        Dealt("ours", True),
        Dealt("other", True),
        *(Dealt("ours", False), Dealt("other", False), Dealt("ours", False)),
    ]
    alone = given({}, train__rollouts_per_prompt=2)
    assert dealt(alone) == [Dealt("small", False)] * 2


def test_an_entry_has_the_settings_of_assistant_where_it_sets_none_and_keeps_them() -> None:
    entries = {"cold": {"model": "openai/m", "temperature": 0.1}, "warm": "openai/m", "policy": "policy"}
    config = given(entries, assistant__max_tokens=77)
    found = named(config)
    cold, warm = found["cold"], found["warm"]
    assert found["policy"] is None and cold and warm and (cold.temperature, warm.temperature) == (0.1, 1.0)
    assert cold.max_tokens == 77 and cold.model == warm.model == "openai/m"
    config.build.assistants = written_out(found)
    config.assistant = cold
    assert named(config) == found


@pytest.mark.parametrize(
    ("assistants", "said"),
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
def test_what_cannot_be_is_refused_in_a_line(assistants: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        named(given(assistants))
    assert "\n" not in str(refused.value)
