from __future__ import annotations

from typing import Any

import pytest

from megatron_collab.config import Config, ConfigError
from megatron_collab.data.evaluation import EvaluationSet, evaluation_sets, settings_of


def config_with(sets: Any, eval_tasks: int = 8) -> Config:
    config = Config()
    config.data.eval, config.train.eval_tasks = sets, eval_tasks
    return config


def test_a_single_source_is_one_set_without_a_name() -> None:
    assert evaluation_sets(config_with("e.jsonl")) == (EvaluationSet("e.jsonl", tasks=8),)
    assert evaluation_sets(config_with({"source": "e.jsonl", "name": "math"})) == (
        EvaluationSet("e.jsonl", "math", tasks=8),
    )
    assert evaluation_sets(config_with({"source": "e.jsonl", "tasks": 3})) == (EvaluationSet("e.jsonl", tasks=3),)
    assert evaluation_sets(config_with("e.jsonl", eval_tasks=0)) == evaluation_sets(config_with(None)) == ()


def test_entries_have_names_and_limits_of_their_own() -> None:
    entries = ["math.jsonl", {"source": "hard.jsonl", "name": "hard-1", "tasks": 3, "temperature": 0, "samples": 4}]
    first, second = evaluation_sets(config_with(entries))
    assert (first.name, first.tasks, first.setting) == ("math", 8, "data.eval[math]")
    assert (second.name, second.tasks, second.temperature, second.samples) == ("hard-1", 3, 0.0, 4)
    assert [entry.name for entry in evaluation_sets(config_with(entries, eval_tasks=0))] == ["hard-1"]


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ([{"source": "a.jsonl", "sample": 2}], r"data.eval\[0\].sample: no such setting; the nearest is samples"),
        ([{"source": "a.jsonl"}, {"source": "b/a.jsonl"}], "two sets are named a; rename one"),
        ([{"name": "a"}], r"data.eval\[0\].source: not set"),
        ([{"source": "a.jsonl", "name": "a/b"}], r"data.eval\[0\].name=a/b: use letters"),
        ({"source": "a.jsonl", "name": "a/b"}, r"data.eval.name=a/b: use letters"),
        ([{"source": "a.jsonl", "temperature": -1}], r"data.eval\[0\].temperature=-1.0: must be at least 0"),
        ([], r"data.eval=\[\]: names no source"),
    ],
)
def test_bad_sets_are_refused_in_one_line(sets: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        evaluation_sets(config_with(sets))
    assert "\n" not in str(error.value)


def test_a_set_has_its_budgets_or_those_of_training() -> None:
    config = config_with("e.jsonl")
    config.rollout.turn.max_new_tokens, config.rollout.max_user_turns, config.user.name = 100, 5, "reveal"
    same = settings_of(config, EvaluationSet("e.jsonl"))
    assert (same.rollout.turn, same.rollout.future) == (config.rollout.turn, config.rollout.future)
    assert (same.rollout.max_user_turns, same.user.name, same.train.rollouts_per_prompt) == (5, "reveal", 1)
    assert same.reward.malformed is None and same.rollout.futures == 1
    changed = settings_of(
        config, EvaluationSet("e.jsonl", samples=4, temperature=0, user="llm", max_user_turns=1, max_new_tokens=7)
    )
    assert (changed.rollout.turn.temperature, changed.rollout.future.max_new_tokens) == (0, 7)
    assert (changed.rollout.max_user_turns, changed.user.name, changed.train.rollouts_per_prompt) == (1, "llm", 4)
    assert (config.rollout.turn.max_new_tokens, config.user.name, config.reward.malformed) == (100, "reveal", -1.0)
