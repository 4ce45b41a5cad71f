from __future__ import annotations

import pytest

from megatron_collab.config import BuildDatasetConfig
from megatron_collab.data.evaluation import evaluation_sets
from megatron_collab.settings import ConfigError
from megatron_collab.synthesis.settings import check_building


def test_sets_that_conversations_are_built_for_are_not_compared() -> None:
    config = BuildDatasetConfig()
    config.rollout.max_messages, config.reward.weights = 14, {"accuracy": 1.0}
    check_building(config, evaluation_sets(["goals.jsonl", "users.jsonl"], 4))
    sets = evaluation_sets(["goals.jsonl", {"source": "users.jsonl", "against": "goals"}], 4)
    with pytest.raises(ConfigError, match=r"^data.eval\[users\].against: nothing is evaluated; remove it$"):
        check_building(config, sets)
