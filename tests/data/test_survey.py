"""Which rows a run uses: rows that are too long or represented by another row are left out and counted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.config import Config
from megatron_collab.data import datasets
from megatron_collab.data.datasets import SupervisedData, SurveyedSources, TrainingData, render_sample, write_jsonl
from megatron_collab.launch.data_specs import data_spec
from megatron_collab.settings import ConfigError
from tests.helpers import byte_level_tokenizer


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def task(text: str, **more: Any) -> dict[str, Any]:
    return {"prompt": [user(text)], "goal": "g", "user": "replay", **more}


def configured(folder: Path, rows: list[dict], stage: str = "rl", context: int = 64) -> Config:
    if not (folder / "model").exists():
        byte_level_tokenizer(300).save_pretrained(folder / "model")
    write_jsonl(folder / "rows.jsonl", rows)
    config = Config()
    config.run.dir, config.model.path = str(folder / "run"), str(folder / "model")
    config.data.train, config.train.stage, config.rollout.context_length = str(folder / "rows.jsonl"), stage, context
    config.train.prompts_per_step = 2
    return config


def evaluation_sources(config: Config) -> SurveyedSources[Any]:
    data = data_spec(config)
    return SurveyedSources[Any](data, "data.eval", data.eval_sets)


def training_data(config: Config) -> TrainingData[Any]:
    return TrainingData[Any](data_spec(config))


def test_an_unknown_user_of_rows_is_reported(tmp_path: Path) -> None:
    wished = {"prompt": [user("hi")], "extra_info": {"interaction_kwargs": {"name": "collabllm"}}}
    config = configured(tmp_path, [wished, wished])
    config.users = {"collablm": {}}
    message = "rows name the user collabllm, which users lacks; the nearest is collablm"
    assert training_data(config).lines()[1:] == [f"data.train={tmp_path}/rows.jsonl: {message}"]
    for users, name in (({"collabllm": {}}, None), ({}, "replay")):
        config.users, config.user.name = users, name
        assert len(training_data(config).lines()) == 1


def test_overlong_prompts_are_left_out_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [task("hi"), task("x" * 400), task("hello", user="llm"), task("y" * 400), task("yes")]
    config = configured(tmp_path, rows)
    config.train.steps = 10
    data = training_data(config)
    (read,) = data.sets
    assert [row.id for row in read] == ["0", "2", "4"] and read[-1].messages[0].content == "yes"
    (line,) = data.lines()
    assert line.startswith(f"data.train={tmp_path}/rows.jsonl: 3 rows, read as task (it has prompt, goal)")
    assert line.endswith("; left out: 2 of more than 63 tokens")
    assert data.surveys[0].users == {"replay": "0", "llm": "2"}
    ids = [data.at(position, 0).id for position in range(6)]
    assert sorted(ids) == sorted(2 * ["0", "2", "4"])

    def refuse(*_: object) -> None:
        raise AssertionError("the rows were surveyed a second time")

    monkeypatch.setattr(datasets, "survey", refuse)  # other processes of the run find what the first has found
    resurveyed = training_data(config)
    assert [resurveyed.at(position, 0).id for position in range(6)] == ids and resurveyed.lines() == [line]
    config.rollout.context_length = 1024
    with pytest.raises(AssertionError, match="a second time"):
        training_data(config)


def test_the_longest_prompt_may_be_given(tmp_path: Path) -> None:
    config = configured(tmp_path, [task("hi"), task("x" * 400)], context=1024)
    assert len(training_data(config).sets[0]) == 2
    config.data.max_prompt_tokens = 100
    assert training_data(config).lines()[0].endswith("; left out: 1 of more than 100 tokens")
    config.data.max_prompt_tokens = 4096  # prompt and reply still fit rollout.context_length
    assert len(training_data(config).sets[0]) == 2


def test_passes_over_the_rows_taken_decide_the_steps(tmp_path: Path) -> None:
    config = configured(tmp_path, [task("hi"), task("x" * 400), task("hello"), task("yes")])
    config.train.epochs = 5.0
    data = training_data(config)
    assert data.steps == 8  # 15 rows, 2 a step
    assert data.lines()[-1] == "train.epochs=5: 8 steps of 2 of the 3 rows of a pass"
    config.train.epochs = 0.1
    assert training_data(config).steps == 1
    rows = {"source": config.data.train}
    config.data.train, config.train.epochs = [{**rows, "epochs": 3}, {**rows, "epochs": 1}], 2.0
    assert training_data(config).steps == 12  # each source as often as its epochs, twice
    config.train.epochs = 1.0
    with pytest.raises(ConfigError, match="no source has rows for step 1"):
        config.data.train = [{**rows, "until_step": 1}]
        training_data(config)


def test_a_pass_over_several_sources_takes_every_row_once(tmp_path: Path) -> None:
    config = configured(tmp_path, [task(f"a {i}") for i in range(20)])
    write_jsonl(tmp_path / "more.jsonl", [task("b 0"), task("b 1")])
    places = [{"source": f"{tmp_path}/{name}.jsonl"} for name in ("rows", "more")]
    config.data.train, config.train.epochs = places, 2.0
    data = training_data(config)
    rows = Counter(data.at(at, 0).messages[0].content for at in range(data.steps * config.train.prompts_per_step))
    assert len(rows) == 22 and set(rows.values()) == {2}


@pytest.mark.parametrize(
    ("settings", "way_out"),
    [
        ({"weight": 3}, "a weight; set epochs in each source, or train.steps instead"),
        ({"from_step": 1}, "from_step or until_step; remove them, or set train.steps instead"),
        ({"until_step": 9, "epochs": 1}, "from_step or until_step; remove them, or set train.steps instead"),
    ],
)
def test_passes_over_sources_with_weights_or_steps_are_refused(settings: Any, way_out: str, tmp_path: Path) -> None:
    config = configured(tmp_path, [task("hi")])
    config.data.train, config.train.epochs = [config.data.train, {"source": config.data.train, **settings}], 1.0
    with pytest.raises(ConfigError, match=f"^data.train: with train.epochs=1 no source of several can have {way_out}$"):
        data_spec(config)


def test_a_prompt_that_just_leaves_room_for_a_token_is_taken(tmp_path: Path) -> None:
    config = configured(tmp_path, [task("hi there")])
    (read,) = training_data(config).sets
    tokens = len(datasets.ChatRenderer(config.model.path).first(read[0].messages))
    config.rollout.context_length = tokens + 1
    assert len(training_data(config).sets[0]) == 1
    config.rollout.context_length = tokens
    with pytest.raises(ConfigError, match=f"all rows are left out: 1 of more than {tokens - 1} tokens"):
        training_data(config)


def test_overlong_conversations_are_left_out(tmp_path: Path) -> None:
    rows = [{"messages": [user("hi"), assistant(text)]} for text in ("yes", "z" * 400, "no")]
    config = configured(tmp_path, rows, "sft")
    data = SupervisedData(data_spec(config))
    batches = [data.batch(step) for step in range(3)]
    assert all(len(sample.token_ids) <= 64 for batch in batches for sample in batch.samples)
    expected = [render_sample(data.renderer, messages).token_ids.tolist() for messages in data.examples.sets[0]]
    assert len(expected) == 2
    for batch in batches:
        assert sorted(sample.token_ids.tolist() for sample in batch.samples) == sorted(expected)


def scored(conversation: int, turn: int, prompt: str, score: float) -> dict[str, Any]:
    row = {"prompt": [user(prompt)], "completion": f"{prompt} {score}", "conv_id": conversation, "turn_id": turn}
    return {
        **row,
        "score": score,
        "single_turn_prompt": "p",
        "single_turn_completion": "a",
        "single_turn_metadata": {"l": "1"},
    }


CANDIDATES = [
    *(scored(1, 1, "a", 0.9), scored(1, 1, "a", 0.1), scored(1, 3, "b", 0.2), scored(1, 3, "b", 0.7)),
    *(scored(2, 1, "c", 0.3), scored(2, 1, "c", 0.3)),
]


def test_a_run_uses_one_candidate_of_each_prompt(tmp_path: Path) -> None:
    data = training_data(configured(tmp_path, CANDIDATES))
    assert [row.messages[0].content for row in data.sets[0]] == ["a", "b", "c"]
    assert "left out: 3 replaced by another candidate" in data.lines()[0]


def talk(*texts: str, **more: Any) -> dict[str, Any]:
    return {**task(""), "prompt": [(assistant if at % 2 else user)(text) for at, text in enumerate(texts)], **more}


def test_a_run_trains_on_every_prefix_of_a_task_once(tmp_path: Path) -> None:
    rows = [talk("a", "b", "c", id="x", level=2), talk("a", id="y", level=1)]
    rows += [talk("a", "d", "z" * 400, id="z", level=3)]
    config = configured(tmp_path, rows)
    config.data.prefixes, config.data.eval = True, config.data.train
    data = training_data(config)
    (read,) = data.sets
    assert [(row.id, [message.content for message in row.messages]) for row in read] == [
        ("x-1", ["a"]),
        ("x", ["a", "b", "c"]),
    ]
    (line,) = data.lines()
    assert ": 2 rows, read as task (it has prompt, goal, every prefix of 3 rows); left out: 1 of more than 63" in line
    (whole,) = evaluation_sources(config).sets
    assert [row.id for row in whole] == ["x", "y"], "an evaluation plays tasks as they are"
    config.data.train = [{"source": str(tmp_path / "rows.jsonl"), "sort_by": "-level"}]
    sorted_data = training_data(config)
    assert [sorted_data.at(position, 0).id for position in range(2)] in (["x-1", "x"], ["x", "x-1"])


def test_prefixes_of_candidates_are_their_prompts(tmp_path: Path) -> None:
    first = scored(1, 1, "a", 0.9)
    later = {**scored(1, 3, "b", 0.2), "prompt": [user("a"), assistant("well"), user("b")]}
    config = configured(tmp_path, [first, later, later, scored(2, 1, "c", 0.1)])
    config.data.prefixes = True
    assert [len(row.messages) for row in training_data(config).sets[0]] == [1, 3, 1]


def test_tasks_that_the_user_opens_are_told_apart_by_their_goals(tmp_path: Path) -> None:
    rows = [{**talk(), "goal": goal} for goal in ("a table", "a room", "a table")]
    config = configured(tmp_path, rows)
    config.data.prefixes = True
    assert [row.goal for row in training_data(config).sets[0]] == ["a table", "a room"]


def test_a_bad_row_is_refused_with_its_place_among_prefixes_too(tmp_path: Path) -> None:
    config = configured(tmp_path, [talk("a", "b", "c"), talk("a", "b")])
    config.data.prefixes = True
    with pytest.raises(ValueError, match=r"rows\.jsonl row 2: the prompt ends with a message of the assistant"):
        training_data(config)


def test_supervised_training_uses_the_best_last_turn_of_candidates(tmp_path: Path) -> None:
    data = training_data(configured(tmp_path, CANDIDATES, "sft"))
    assert [messages[-1].content for messages in data.sets[0]] == ["b 0.7", "c 0.3"]


def test_several_sources_are_mixed_and_sets_for_evaluation_are_apart(tmp_path: Path) -> None:
    config = configured(tmp_path, [task(f"a {i}", level=i) for i in range(3)])
    write_jsonl(tmp_path / "more.jsonl", [task(f"b {i}") for i in range(4)])
    config.data.train = [
        {"source": f"{tmp_path}/rows.jsonl", "weight": 3, "sort_by": "-level"},
        {"source": f"{tmp_path}/more.jsonl", "from_step": 1},
    ]
    config.train.steps = 5
    data = training_data(config)
    first, *later = [data.at(at, 0).messages[0].content for at in range(10)]
    assert first == "a 2" and later[:2] == ["a 1", "a 0"]
    assert [text[0] for text in later].count("b") == 2
    config.data.train[0]["until_step"] = 1
    config.data.train[1]["from_step"] = 2
    with pytest.raises(
        ConfigError, match=r"data\.train: no source has rows for step 1; change from_step or until_step"
    ):
        training_data(config)
    config.data.train = [{"source": f"{tmp_path}/rows.jsonl", "sort_by": "levle"}]
    with pytest.raises(ConfigError, match="sort_by=levle: no such column; the nearest is level; there are prompt"):
        training_data(config)
    write_jsonl(tmp_path / "gap.jsonl", [task("a", level=1.5), task("b", level=None)])
    config.data.train = [{"source": f"{tmp_path}/gap.jsonl", "sort_by": "level"}]
    with pytest.raises(ConfigError, match="sort_by=level: its values must be all numbers or all texts, without a gap"):
        training_data(config)
    config.data.eval = [f"{tmp_path}/rows.jsonl", f"{tmp_path}/more.jsonl"]
    assert [len(rows) for rows in evaluation_sources(config).sets] == [3, 4]


def test_a_bad_row_is_refused_whichever_it_is(tmp_path: Path) -> None:
    rows = [task("hi")] * 1500 + [task(" ")]
    with pytest.raises(ValueError, match=r"^data\.train=.*rows\.jsonl row 1501: prompt has a message without content"):
        training_data(configured(tmp_path, rows))


@pytest.mark.parametrize("stage", ["rl", "sft", "dpo"])
def test_a_row_that_is_certainly_too_long_is_not_tokenized(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it is; one that may fit is, and is left out by its tokens."""
    counted: list[int] = []
    encode = datasets.ChatRenderer._encode
    monkeypatch.setattr(
        datasets.ChatRenderer, "_encode", lambda renderer, text: counted.append(len(text)) or encode(renderer, text)
    )
    for length in (400, 100_000):
        texts = ("hi", "x" * length)
        rows: dict[str, list[dict[str, Any]]] = {
            "rl": [task(text) for text in texts],
            "sft": [{"messages": [user("hi"), assistant(text)]} for text in texts],
            "dpo": [{"prompt": [user("hi")], "chosen": text, "rejected": "no"} for text in texts],
        }
        config = configured(tmp_path / str(length), rows[stage], stage)
        config.data.train = str(tmp_path / str(length) / "rows.jsonl")
        counted.clear()
        (line,) = training_data(config).lines()
        assert "left out: 1 of more than 6" in line
        assert (max(counted) >= length) == (length == 400)
