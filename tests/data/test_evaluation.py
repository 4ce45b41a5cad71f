from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_collab.config import Config
from megatron_collab.data.evaluation import EvaluationSet
from megatron_collab.launch.data_specs import data_spec
from megatron_collab.settings import ConfigError


def config_with(sets: Any, eval_tasks: int = 8) -> Config:
    config = Config()
    config.data.train, config.data.eval, config.train.eval_tasks = "t.jsonl", sets, eval_tasks
    return config


def test_a_single_source_is_one_set_without_a_name() -> None:
    assert data_spec(config_with("e.jsonl")).eval_sets == (EvaluationSet("e.jsonl", tasks=8),)
    assert data_spec(config_with({"source": "e.jsonl", "name": "math"})).eval_sets == (
        EvaluationSet("e.jsonl", "math", tasks=8),
    )
    assert data_spec(config_with({"source": "e.jsonl", "tasks": 3})).eval_sets == (EvaluationSet("e.jsonl", tasks=3),)
    assert data_spec(config_with("e.jsonl", eval_tasks=0)).eval_sets == data_spec(config_with(None)).eval_sets == ()


def test_entries_have_names_and_limits_of_their_own() -> None:
    entries = ["math.jsonl", {"source": "hard.jsonl", "name": "hard-1", "tasks": 3, "temperature": 0, "samples": 4}]
    first, second = data_spec(config_with(entries)).eval_sets
    assert (first.name, first.tasks, first.setting) == ("math", 8, "data.eval[math]")
    assert (second.name, second.tasks, second.temperature, second.samples) == ("hard-1", 3, 0.0, 4)
    assert [entry.name for entry in data_spec(config_with(entries, eval_tasks=0)).eval_sets] == ["hard-1"]


@pytest.mark.parametrize(
    ("sets", "names"),
    [
        (["gsm8k/test.parquet", "math/test.parquet"], ["test", "math_test"]),
        (["/data/gsm8k/test.parquet", "../math/test.parquet", "aime.parquet"], ["test", "math_test", "aime"]),
        (["a.jsonl", "b/a.jsonl"], ["a", "b_a"]),
        (["x/main/test.jsonl", "y/main/test.jsonl", "y/test.jsonl"], ["test", "y_main_test", "y_test"]),
        (["main/test.jsonl", "x/main/test.jsonl"], ["test", "x_main_test"]),
        (["openai/gsm8k@main", "mine/gsm8k"], ["gsm8k", "mine_gsm8k"]),
        ([{"source": "b/test.jsonl", "name": "test"}, "my data/test.jsonl"], ["test", "my-data_test"]),
        (["test.jsonl", "a/../b/test.jsonl"], ["test", "b_test"]),
        ([{"source": "b/a.jsonl", "name": "hard"}, "c/a.jsonl"], ["hard", "a"]),
    ],
)
def test_sets_with_the_same_last_part_are_named_with_their_folders(sets: Any, names: list[str]) -> None:
    assert [entry.name for entry in data_spec(config_with(sets)).eval_sets] == names
    appended = data_spec(config_with([*sets, "new/test.jsonl", "new/a.jsonl", "new/gsm8k"])).eval_sets
    assert [entry.name for entry in appended][: len(names)] == names


def test_a_place_has_one_name_however_it_is_written() -> None:
    """Else a set would be told from itself by folders that are none."""
    with pytest.raises(ConfigError, match="two sets are named test; rename one"):
        data_spec(config_with(["a/test.jsonl", "a/../a/test.jsonl"]))


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ([{"source": "a.jsonl", "sample": 2}], r"data.eval\[0\].sample: no such setting; the nearest is samples"),
        ([{"source": "b/a.jsonl"}, {"source": "b/a.jsonl", "tasks": 3}], "two sets are named a; rename one"),
        (["c/a.jsonl", {"source": "x.jsonl", "name": "b_a"}, "b/a.jsonl"], "two sets are named b_a; rename one"),
        (["a.jsonl", {"source": "x.jsonl", "name": "a"}], "two sets are named a; rename one"),
        ([{"name": "a"}], r"data.eval\[0\].source: not set"),
        ([{"source": "a.jsonl", "name": "a/b"}], r"data.eval\[0\].name=a/b: use letters"),
        ({"source": "a.jsonl", "name": "a/b"}, r"data.eval.name=a/b: use letters"),
        ([{"source": "a.jsonl", "temperature": -1}], r"data.eval\[0\].temperature=-1.0: must be at least 0"),
        ([], r"data.eval=\[\]: names no source"),
        (
            [{"source": "a.jsonl", "against": "b"}, "b.jsonl"],
            r"data.eval\[0\].against=b: no set .* list that set first",
        ),
        ([{"source": "a.jsonl", "against": "a"}], r"data.eval\[0\].against=a: no set"),
    ],
)
def test_bad_sets_are_refused_in_one_line(sets: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        data_spec(config_with(sets))
    assert "\n" not in str(error.value)


def test_a_set_is_compared_with_an_earlier_one_where_conversations_are_played() -> None:
    config = config_with(["goals.jsonl", {"source": "users.jsonl", "against": "goals"}])
    goals, users = data_spec(config).eval_sets
    assert (goals.against, users.against) == (None, "goals")
    assert users.digest == replace(users, against=None).digest, "it plays the same conversations"
    config.train.stage = "sft"
    with pytest.raises(
        ConfigError, match=r"data.eval\[users\].against=goals: train.stage=sft plays no conversations; rem"
    ):
        data_spec(config)
