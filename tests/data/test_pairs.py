"""Pairs as stage dpo reads them: which tokens count, which rows are left out, the messages about bad rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.data.datasets import SupervisedData, pair_row, write_jsonl
from megatron_collab.data.messages import Unfit
from megatron_collab.data.pairs import pair
from megatron_collab.launch.data_specs import data_spec
from megatron_collab.types import Sample
from tests.data.test_chat_template import renderer
from tests.data.test_messages import QWEN, SCHEMA, calling
from tests.data.test_survey import assistant, configured, training_data, user

GREETED = [user("hi"), assistant("hello"), user("how are you")]


def trained(data: SupervisedData, sample: Sample) -> str:
    return data.renderer.tokenizer.decode(sample.token_ids[sample.loss_mask > 0])


def texts(data: SupervisedData, samples: Sequence[Sample]) -> list[str]:
    """The trained text, without turn markers."""
    return [trained(data, sample).replace("<|im_end|>", "|") for sample in samples]


def test_replies_after_the_shared_prompt_count_and_users_never_do(tmp_path: Path) -> None:
    more = [user("why"), assistant("rain")]
    rows = [
        {"prompt": "hi", "chosen": "hello", "rejected": "no"},
        {"chosen": [*GREETED, assistant("fine")], "rejected": [*GREETED, assistant("bad"), *more]},
        {"prompt": GREETED, "chosen": [assistant("fine"), *more], "rejected": [assistant("fine"), user("so"), more[1]]},
    ]
    config = configured(tmp_path, rows, "dpo", 256)
    config.train.prompts_per_step = 3
    data = SupervisedData(data_spec(config))
    order = [texts(data, data.batch(0).samples[at : at + 2]) for at in (0, 2, 4)]
    assert sorted(order) == [["fine|", "bad|rain|"], ["fine|rain|", "fine|rain|"], ["hello|", "no|"]]
    assert sum(len(batch.samples) for batch in data.all_batches(2)) == 6


def test_a_pair_may_call_tools(tmp_path: Path) -> None:
    chat = renderer(tmp_path / "model", QWEN)
    called = [calling("6*7"), {"role": "tool", "content": "42"}]
    row = {"prompt": [user("6*7?")], "chosen": [*called, assistant("42")], "rejected": "40", "tools": [SCHEMA]}
    read = pair(row)
    assert [message.role for message in read.prompt] == ["user"] and read.chosen[0].tool_calls[0].name == "compute"
    assert pair(pair_row(read)) == read
    config = configured(tmp_path, [row], "dpo", 512)
    config.train.prompts_per_step = 1
    data = SupervisedData(data_spec(config))
    chosen, rejected = data.batch(0).samples
    assert "compute" in chat.tokenizer.decode(rejected.token_ids), "the prompt has the schema"
    first, second = texts(data, (chosen, rejected))
    assert '"name": "compute"' in first and "42|" in first and second == "40|"


def test_the_best_candidate_is_paired_with_the_worst(tmp_path: Path) -> None:
    def candidate(turn: int, score: float) -> dict[str, Any]:
        columns = {"conv_id": "a", "turn_id": turn, "score": score, "single_turn_prompt": "g"}
        return {"prompt": [user(f"turn {turn}")], "completion": f"{turn} {score}", **columns}

    rows = [
        candidate(1, 0.5),
        candidate(1, 0.9),
        candidate(1, 0.1),
        candidate(3, 0.4),
        candidate(5, 1),
        candidate(5, 1),
    ]
    data = training_data(configured(tmp_path, rows, "dpo", 256))
    (read,) = data.sets[0]
    assert (read.chosen[0].content, read.rejected[0].content, read.scores) == ("1 0.9", "1 0.1", (0.9, 0.1))
    (line,) = data.lines()
    assert "1 rows, read as collabllm" in line and "best against worst of 6 candidates" in line
    assert line.endswith("left out: 2 whose candidates all have the same score")


def test_useless_pairs_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "hi", "chosen": "a", "rejected": text} for text in ("b", "a", "x" * 900, "")]
    config = configured(tmp_path, rows, "dpo", 128)
    (line,) = training_data(config).lines()
    counts = ["whose chosen and rejected are the same", "of more than 128 tokens", "that have an empty message"]
    assert ": 1 rows" in line and all(f"1 {count}" in line for count in counts)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": [user("hi")], "chosen": [user("a")], "rejected": [assistant("b")]},
            "chosen must end with a reply of the assistant",
        ),
        ({"prompt": [user("hi")], "chosen": [assistant("a")], "rejected": []}, "no rejected; give a list of messages"),
        (
            {"prompt": [], "chosen": [assistant("a")], "rejected": [assistant("b")]},
            "no prompt; give a list of messages",
        ),
    ],
)
def test_a_bad_row_is_named_in_one_line(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    good = {"prompt": [user("hi")], "chosen": [assistant("a")], "rejected": [assistant("b")]}
    config = configured(tmp_path, [good, row], "dpo")
    with pytest.raises(ValueError, match=f"row 2: {message}") as error:
        training_data(config)
    assert "\n" not in str(error.value)


def test_other_rows_are_refused_with_the_stage_that_reads_them(tmp_path: Path) -> None:
    config = configured(tmp_path, [{"messages": [user("hi"), assistant("yes")]}], "dpo")
    with pytest.raises(ValueError, match="give rows that are read as pairs, or choose that stage"):
        training_data(config)


def test_a_set_for_evaluation_is_known_beforehand_too(tmp_path: Path) -> None:
    config = configured(tmp_path, [{"prompt": "hi", "chosen": "a", "rejected": "b"}] * 2, "dpo")
    write_jsonl(tmp_path / "eval.jsonl", [{"prompt": "ho", "chosen": "c", "rejected": "d"}])
    config.data.eval = str(tmp_path / "eval.jsonl")
    data = SupervisedData(data_spec(config))
    (eval_set,) = data_spec(config).eval_sets
    (batch,) = data.validation(eval_set)
    assert texts(data, batch.samples) == ["c|", "d|"]
    assert [len(batch.samples) for batch in data.all_batches(4)] == [4, 2]
    config.train.eval_tasks += 1
    assert SupervisedData(data_spec(config)).fingerprint != data.fingerprint


def test_equal_messages_with_other_scores_are_no_pair() -> None:
    with pytest.raises(Unfit, match="the same"):
        pair({"prompt": "hi", "chosen": "a", "rejected": "a", "score_chosen": 2, "score_rejected": 1})


SCORES = [float("nan"), float("inf"), float("-inf"), "nan", "high", True, [1], {"a": 1}, None]


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("stage", ["rl", "sft", "dpo"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_score_that_is_no_finite_number_is_refused_wherever_it_stands(
    tmp_path: Path, stage: str, score: object, at: int
) -> None:
    columns = {"prompt": [user("hi")], "conv_id": "a", "turn_id": 1, "single_turn_prompt": "g"}
    rows = [{**columns, "completion": f"reply {number}", "score": number / 10} for number in range(3)]
    rows[at]["score"] = score
    with pytest.raises(ValueError, match=rf"rows\.jsonl row {at + 1}: (no score|score is )"):
        training_data(configured(tmp_path, rows, stage, 256))


@pytest.mark.parametrize("score", [score for score in SCORES if score is not None])
@pytest.mark.parametrize("column", ["score_chosen", "score_rejected", "chosen_score", "rejected_score"])
def test_a_score_of_a_pair_is_a_finite_number_or_missing(tmp_path: Path, column: str, score: object) -> None:
    row = {"prompt": "hi", "chosen": "a", "rejected": "b"}
    with pytest.raises(ValueError, match=rf"rows\.jsonl row 2: {column} is "):
        training_data(configured(tmp_path, [row, {**row, column: score}], "dpo", 256))
    assert pair({**row, column: None}).scores is None


def test_scores_of_a_table_are_texts(tmp_path: Path) -> None:
    row = {"prompt": "hi", "chosen": "a", "rejected": "b", "score_chosen": "0.9", "score_rejected": "1e-3"}
    assert pair(row).scores == (0.9, 0.001)
