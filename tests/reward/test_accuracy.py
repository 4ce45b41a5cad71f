from __future__ import annotations

import pytest

from megatron_collab.config import ConfigError
from megatron_collab.types import Missing
from tests.reward.fakes import FakeJudge, about, play, score


@pytest.mark.processes
@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("So the answer is 1,250.", 1.0),
        (r"3 boxes, so \boxed{2500/2} in all", 1.0),
        ("$1250.00", 1.0),
        ("What do you know?", 0.0),
        ("The answer is 1251", 0.0),
        ("", 0.0),
    ],
)
def test_the_answer_to_a_problem_is_checked_symbolically(reply: str, expected: float) -> None:
    task = about("1250")
    assert score("accuracy", task, play(task, "x", "well?", reply)) == expected


@pytest.mark.processes
def test_the_judge_is_not_asked_if_an_answer_is_clearly_stated() -> None:
    task = about("18")
    assert score("accuracy", task, play(task, "The answer is 18."), FakeJudge(), judge=True) == 1.0
    assert score("accuracy", task, play(task, "So it is 19."), FakeJudge(), judge=True) == 0.0


@pytest.mark.processes
@pytest.mark.parametrize("verdict", [0, 1])
def test_the_judge_decides_what_is_not_clearly_stated(verdict: int) -> None:
    task = about("18")
    for replies in (
        ["There are 18 eggs."],
        ["It is 18 or 20."],
        ["Are there 18?"],
        ["The answer is 18.", "ok", "Fine!"],
    ):
        judge = FakeJudge({"thought": "", "accuracy": verdict})
        assert score("accuracy", task, play(task, *replies), judge, judge=True) == verdict


@pytest.mark.processes
def test_another_unit_is_for_the_judge() -> None:
    task, judge = about("3 hours"), FakeJudge({"thought": "", "accuracy": 1})
    assert score("accuracy", task, play(task, "The answer is 180 minutes."), judge, judge=True) == 1.0
    assert score("accuracy", task, play(task, "The answer is 3 hours."), FakeJudge(), judge=True) == 1.0


@pytest.mark.parametrize("answer", [0, 1])
def test_the_judge_decides_if_no_answer_can_be_read(answer: int) -> None:
    task = about("eighteen apples", goal="How many apples?")
    judge = FakeJudge({"thought": "", "accuracy": answer})
    conversation = play(task, "how many per box?", "six", "Eighteen.")
    assert score("accuracy", task, conversation, judge, judge=True, model="openai/strong") == float(answer)
    assert judge.models == ["openai/strong"]
    for part in ("How many apples?", "eighteen apples", "**User**: six", "**Assistant**: Eighteen."):
        assert part in judge.prompts[0]


def test_a_reply_without_an_answer_is_put_to_the_judge_or_wrong() -> None:
    task = about("18")
    asking = play(task, "What do you mean?")
    assert score("accuracy", task, asking) == 0.0
    assert score("accuracy", task, asking, FakeJudge({"thought": "", "accuracy": 1}), judge=True) == 1.0


def test_a_truth_that_cannot_be_read_is_missing_without_a_judge() -> None:
    task = about("Paris")
    value = score("accuracy", task, play(task, "18"))
    assert isinstance(value, Missing) and "'Paris'" in value.why and "judge=true" in value.why


def test_a_judge_alone_decides_without_math_verify() -> None:
    task = about("18")
    judge = FakeJudge({"thought": "", "accuracy": 0}, {"thought": "", "accuracy": 1})
    assert score("accuracy", task, play(task, "18"), judge, judge=True, verify=False) == 0.0
    assert score("accuracy", task, play(task, "19"), judge, judge=True, verify=False) == 1.0
    with pytest.raises(ConfigError, match=r"reward\.metrics\.accuracy: verify=false: answers are not checked"):
        score("accuracy", task, play(task, "18"), verify=False)


def test_an_outage_of_the_judge_is_missing() -> None:
    task = about("Paris")
    assert score("accuracy", task, play(task, "Paris"), FakeJudge(Missing("down")), judge=True) == Missing("down")


def test_a_conversation_without_a_reply_holds_no_answer() -> None:
    task = about("18")
    assert score("accuracy", task, play(task)) == 0.0


def test_it_does_not_apply_to_a_task_without_an_answer() -> None:
    task = about("")
    assert score("accuracy", task, play(task, "18")) is None
