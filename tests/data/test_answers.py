"""The answer that a text marks is the same whether the data or the policy wrote the text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.data.answers import boxed, final_answer
from megatron_collab.data.datasets import write_jsonl
from megatron_collab.data.examples import load_tasks
from megatron_collab.environments import gsm8k
from megatron_collab.reward.metrics.equality import Verdict, of_texts
from megatron_collab.reward.metrics.stated_answer import stated_answer

MARKED = [
    # GSM8K's line, and MetaMath's after it
    ("work\n#### (3,4)", "(3,4)"),
    ("so\n#### 1, 2", "1, 2"),
    ("1 + 1\n#### 1,234", "1234"),
    ("We pay.\n#### -1,234,567.5", "-1234567.5"),
    ("It is\n####\n42", "42"),
    ("so\n#### x+1", "x+1"),
    (r"so" + "\n" + r"#### \frac{1}{2}", r"\frac{1}{2}"),
    (r"so" + "\n" + r"#### \boxed{5}", "5"),
    # Boxes
    (r"thus $\boxed 7$", "7"),
    (r"so \fbox{9}.", "9"),
    (r"so $\fbox 9$.", "9"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"so $\boxed {\left(\frac{\sqrt{3}}{2}, 1\right)}$", r"\left(\frac{\sqrt{3}}{2}, 1\right)"),
    (r"so \boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"so \boxed{\left\{x \mid x>0\right.}", r"\left\{x \mid x>0\right."),
    (r"so \boxed{\boxed{3}}", "3"),
    ("#### Step 1\nAdd 2 and 3.\n#### Step 2\nSo \\boxed{5}", "5"),
    ("so \\boxed{6}\n####", "6"),
]


UNSURE_IN_REPLIES = [  # as words follow the box, or there are two
    (r"so $\boxed\frac{1}{2}$ it is", r"\frac{1}{2}"),
    (r"\boxed{A}, and the box \boxed{} is empty", "A"),
    (r"first \boxed{1}, then \boxed{2}", "2"),
]


@pytest.mark.parametrize(("text", "answer"), MARKED)
def test_a_marked_answer_is_the_same_of_data_and_of_replies(text: str, answer: str) -> None:
    assert final_answer(text) == answer
    assert of_texts(answer, stated_answer([text]) or "") is Verdict.EQUAL


@pytest.mark.parametrize(("text", "answer"), UNSURE_IN_REPLIES)
def test_a_marked_answer_of_the_data_may_be_unsure_in_a_reply(text: str, answer: str) -> None:
    assert final_answer(text) == answer and stated_answer([text]) is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("We add.\n#### 110\nThe answer is: 110", "110"),
        ("We halve it.\nThe answer is: \\frac{1}{2}.", r"\frac{1}{2}"),
        ("####  Paris ", "Paris"),
        (" 42 ", "42"),
        ("1,234", "1,234"),
        ("(3,4)", "(3,4)"),
        (r"\boxed{open", r"\boxed{open"),
        (r"\boxedx 3", r"\boxedx 3"),
        ("#### A heading\nand what follows it", "#### A heading\nand what follows it"),
        ("The answer is: it depends.\nAsk me.", "The answer is: it depends.\nAsk me."),
    ],
)
def test_a_worked_solution_without_a_mark_is_its_answer(text: str, answer: str) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize("text", ["so \\boxed{12", "so \\boxed{}", "\\boxedfoo{3}", "#### Step 1", "\\fbox"])
def test_what_marks_no_answer(text: str) -> None:
    assert boxed(text) is None
    assert final_answer(text) == text.removeprefix("#### ")


@pytest.mark.processes
@pytest.mark.parametrize("text", ["\\boxed{" * 40_000, "\\boxed{{" * 20_000 + "}" * 20_000, "#### " * 60_000])
def test_a_text_of_marks_is_read_without_a_quadratic_scan(text: str) -> None:
    """Which would take minutes."""
    assert final_answer(text) in (text.strip(), "{}")


def answers(folder: Path, rows: list[dict[str, Any]]) -> list[str]:
    write_jsonl(folder / "rows.jsonl", rows)
    return [task.answer for task in load_tasks(folder / "rows.jsonl")]


PROBLEM = {"problem": "What is 6*7?", "solution": "Six sevens, so we are done."}


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        (PROBLEM | {"answer": "42"}, "42"),
        (PROBLEM | {"answer": 42}, "42"),
        (PROBLEM | {"answer": 0}, "0"),
        (PROBLEM | {"answer": r"\boxed{42}"}, "42"),
        (PROBLEM | {"solution": r"It is \boxed{41}.", "answer": "42"}, "42"),
        (PROBLEM | {"solution": r"It is \boxed{41}.", "answer": None}, "41"),
        (PROBLEM | {"solution": r"It is \boxed{41}.", "answer": ""}, "41"),
        (PROBLEM | {"solution": None, "answer": "42"}, "42"),
        ({"messages": [{"role": "user", "content": "6*7?"}, {"role": "assistant", "content": "Hm."}]}, "Hm."),
        (
            {
                "messages": [
                    {"role": "user", "content": "6*7?"},
                    {"role": "assistant", "content": "<think>\n\\boxed{41}?\n</think>\nSo \\boxed{42}"},
                ]
            },
            "42",
        ),
        (
            {"messages": [{"role": "user", "content": "6*7?"}, {"role": "assistant", "content": "41"}], "answer": "42"},
            "42",
        ),
        ({"prompt": "6*7?", "completion": "so\n#### 42"}, "42"),
        ({"prompt": "6*7?", "completion": "so\n#### 41", "answer": 42}, "42"),
    ],
)
def test_an_answer_of_its_own_column_wins(tmp_path: Path, row: dict[str, Any], answer: str) -> None:
    assert answers(tmp_path, [row]) == [answer]


WRITTEN = ["0.00001", "1e22", "1E5", "0.10", "2.50", "4", "-0.5", "3.14159265358979323846", "12345678901234567890", "0"]


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_number_is_the_answer_as_it_was_written(tmp_path: Path, name: str, written: str) -> None:
    row = f'{{"question": "q", "answer": {written}}}'
    (tmp_path / name).write_text(f"[{row},\n {row}]" if name == "rows.json" else f"{row}\n{row}\n")
    assert [task.answer for task in load_tasks(tmp_path / name)] == [written] * 2


VERL: dict[str, Any] = {"prompt": [{"role": "user", "content": "capital?"}], "extra_info": {"index": 0}}


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (["Paris", "paris"], "a list"),
        ([], "a list"),
        ({"target": ["Rome"]}, "an object"),
        (True, "true or false"),
        (False, "true or false"),
        (float("nan"), "not a finite number"),
        (float("inf"), "not a finite number"),
    ],
)
@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"question": "q", "answer": ...}, "answer"),
        (PROBLEM | {"answer": ...}, "answer"),
        ({"prompt": "q", "answer": ...}, "answer"),
        ({"prompt": "q", "goal": "g", "answer": ...}, "answer"),
        (VERL | {"reward_model": {"ground_truth": ...}}, "ground_truth"),
        (VERL | {"ground_truth": ...}, "ground_truth"),
        ({"instruction": "q", "output": ...}, "output"),
    ],
)
def test_an_answer_of_another_type_is_refused_with_its_row(
    tmp_path: Path, row: dict[str, Any], column: str, value: object, kind: str
) -> None:
    text = json.dumps(row, default=lambda _: "HERE").replace('"HERE"', "5")
    bad = json.dumps(row, default=lambda _: "HERE").replace('"HERE"', json.dumps(value))
    (tmp_path / "rows.jsonl").write_text(f"{text}\n{bad}\n")
    with pytest.raises(ValueError) as refusal:
        list(load_tasks(tmp_path / "rows.jsonl"))
    assert str(refusal.value).endswith(f"rows.jsonl row 2: {column} is {kind}; give a text or a number")


def test_an_index_of_zero_is_an_index(tmp_path: Path) -> None:
    rows = [VERL | {"ground_truth": "x", "index": index} for index in (1, 0, 2, None, "a")]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    assert [task.id for task in load_tasks(tmp_path / "rows.jsonl")] == ["1", "0", "2", "3", "a"]


@pytest.mark.processes
@pytest.mark.parametrize("name", ["train", "test"])
def test_every_answer_of_gsm8k(name: str, dataset: Callable[[str], Path]) -> None:
    file = dataset(f"gsm8k/{name}.jsonl")
    rows = [json.loads(line) for line in file.read_text().strip().split("\n")]
    expected = [row["answer"].rpartition("####")[2].strip().replace(",", "") for row in rows]
    assert [task.answer for task in load_tasks(file)] == expected
    assert [task.answer for task in gsm8k.tasks(file)] == expected
    for row, answer in zip(rows[:300], expected, strict=False):
        assert of_texts(answer, stated_answer([row["answer"]]) or "") is Verdict.EQUAL
