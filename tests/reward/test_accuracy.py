from __future__ import annotations

import pytest

from megatron_collab.reward.metrics import accuracy
from megatron_collab.settings import ConfigError
from megatron_collab.types import Missing
from tests.reward.fakes import FakeJudge, about, metric, play, score


@pytest.mark.processes
@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("So the answer is 1,250.", 1.0),
        (r"3 boxes, so \boxed{2500/2}.", 1.0),
        ("That makes $1250.00", 1.0),
        ("$1250.00", 0.0),
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
        ["The answer is 18.", "ok", "Fine, on page 7."],
    ):
        judge = FakeJudge({"thought": "", "accuracy": verdict})
        assert score("accuracy", task, play(task, *replies), judge, judge=True) == verdict


@pytest.mark.processes
def test_another_unit_is_for_the_judge() -> None:
    task, judge = about("3 hours"), FakeJudge({"thought": "", "accuracy": 1})
    assert score("accuracy", task, play(task, "The answer is 180 minutes."), judge, judge=True) == 1.0
    assert score("accuracy", task, play(task, "The answer is 3 hours."), FakeJudge(), judge=True) == 1.0


@pytest.mark.processes
@pytest.mark.parametrize("answer", [0, 1])
def test_the_judge_decides_if_no_answer_can_be_read(answer: int) -> None:
    task = about("eighteen apples", goal="How many apples?")
    judge = FakeJudge({"thought": "", "accuracy": answer})
    conversation = play(task, "how many per box?", "six", "Eighteen.")
    assert score("accuracy", task, conversation, judge, judge=True, model="openai/strong") == float(answer)
    assert judge.models == ["openai/strong"]
    for part in ("How many apples?", "eighteen apples", "**User**: six", "**Assistant**: Eighteen."):
        assert part in judge.prompts[0]


@pytest.mark.seconds
def test_a_reply_without_an_answer_is_put_to_the_judge_or_wrong() -> None:
    task = about("18")
    asking = play(task, "What do you mean?")
    assert score("accuracy", task, asking) == 0.0
    assert score("accuracy", task, asking, FakeJudge({"thought": "", "accuracy": 1}), judge=True) == 1.0


def test_an_unclear_answer_is_missing_if_asked_for() -> None:
    task = about("18")
    assert score("accuracy", task, play(task, "It is at least 18.")) == 0.0
    value = score("accuracy", task, play(task, "It is at least 18."), unclear="missing")
    assert isinstance(value, Missing) and "judge=true" in value.why
    assert score("accuracy", task, play(task, "It is 18."), unclear="missing") == 1.0
    assert score("accuracy", task, play(task, "It is 19."), unclear="missing") == 0.0


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


@pytest.mark.processes
def test_tasks_whose_answers_cannot_be_read_are_known_before_the_run() -> None:
    answers = ["Paris", "18", "-2.5", r"\frac{1}{2}", "(3, 4)", "", "know it", "1,250", "12 apples", "$x^2$", "no idea"]
    tasks = [about(answer) for answer in answers]
    reasons = metric("accuracy").unscorable(metric("accuracy").options, tasks)
    assert [answers[number] for number in reasons] == ["Paris", "", "know it", "no idea"]
    assert reasons[0] == "math-verify cannot read the answer 'Paris'; set the metric's judge=true"
    assert not metric("accuracy", judge=True).unscorable(metric("accuracy", judge=True).options, tasks)
    for number, task in enumerate(tasks):
        missing = isinstance(score("accuracy", task, play(task, "It is 7.")), Missing)
        assert missing == (number in reasons) or not task.answer


def test_numbers_are_known_without_math_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy.Checker, "compare", lambda *_: pytest.fail("started"))
    tasks = [about("18"), about("$1,250.5"), about("-3.5")]
    assert metric("accuracy").unscorable(metric("accuracy").options, tasks) == {}
