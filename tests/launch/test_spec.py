"""Settings that are settled before a program starts."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_collab.config import BuildDatasetConfig
from megatron_collab.launch.spec import building_spec
from megatron_collab.settings import ConfigError

AGAINST = [{"source": "goals.jsonl"}, {"source": "users.jsonl", "against": "goals"}]


def building(sets: list[Any], most_messages: int | None) -> BuildDatasetConfig:
    config = BuildDatasetConfig()
    config.model.path, config.data.eval, config.train.eval_tasks = "model", sets, 4
    config.rollout.max_messages, config.reward.weights = most_messages, {"token_amount": 1.0}
    return config


@pytest.mark.parametrize(
    ("sets", "most_messages", "message"),
    [
        (AGAINST, 14, r"data.eval\[users\].against: nothing is evaluated; remove it"),
        (["goals.jsonl"], None, "rollout.max_messages: not set; give the longest conversation, e.g. 14"),
    ],
)
def test_settings_with_which_no_conversation_can_be_built(
    sets: list[Any], most_messages: int | None, message: str
) -> None:
    assert building_spec(building(["goals.jsonl", "users.jsonl"], 14)).play
    with pytest.raises(ConfigError, match=f"^{message}$"):
        building_spec(building(sets, most_messages))
