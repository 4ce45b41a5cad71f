"""The rules that extract an answer from a conversation, by example and against a careful human reader.

accuracy_cases.jsonl: conversations, each with the question, the task's answer, what policy and user said in turns, and
the verdict of a careful reader: 1 if the last answer that the policy commits to is right. With `judge`, no rule
reads the answer, for example if it is in words; then the score is the judge's, and 0 without one.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.reward.metrics.stated_answer import StatedAnswer, as_math, stated_answer
from tests.reward.fakes import FakeJudge, about, play, score

CASES: dict[str, list[dict[str, Any]]] = defaultdict(list)
for line in (Path(__file__).parent / "accuracy_cases.jsonl").read_text().splitlines():
    case = json.loads(line)
    CASES[case["kind"]].append(case)


@pytest.mark.processes
@pytest.mark.parametrize("kind", CASES)
def test_a_careful_reader_agrees(kind: str) -> None:
    """Without a judge if a rule reads the answer, and with one in every case; the judge decides unclear cases."""
    for case in CASES[kind]:
        task = about(case["answer"], case["question"])
        played, reader = play(task, *case["said"]), FakeJudge({"thought": "", "accuracy": case["verdict"]})
        assert case.get("judge") or score("accuracy", task, played) == case["verdict"], case
        assert score("accuracy", task, played, reader, judge=True) == case["verdict"], case


@pytest.mark.processes
def test_the_judge_is_needed_in_the_marked_cases() -> None:
    """Otherwise they would be excluded from the evaluation of the rules."""
    cases = [case for kind in CASES.values() for case in kind if case.get("judge")]
    tasks = [(case, about(case["answer"], case["question"])) for case in cases]
    pairs = [(score("accuracy", task, play(task, *case["said"])), case["verdict"]) for case, task in tasks]
    assert sum(value != verdict for value, verdict in pairs) > len(cases) / 2


CLEAR = [  # the last reply states it
    (r"3 boxes, so \boxed{2500/2} in all", "$2500/2$"),
    ("#### 1,250", "1250"),
    ("The answer is 42, not 48. There are 7 in each of the 6 boxes.", "42"),
    ("**Answer:**\n\n$$x = 150$$", "150"),
    ("In total: 2 + 1 = 3 bolts. Shall I go on with number 4?", "3"),
]
UNSURE = [
    ("You get 42 apples. Do you want me to solve part 2 next?", "42"),  # a fact may be no answer
    ("The answer is 16 or 18.", "$16, 18$"),
    ("So 4 boxes hold 28", "28"),
]


@pytest.mark.parametrize(("reply", "value"), CLEAR + UNSURE)
def test_what_a_reply_states(reply: str, value: str) -> None:
    assert stated_answer([reply]) == StatedAnswer(value, clear=(reply, value) in CLEAR)


@pytest.mark.parametrize(
    "reply",
    ["", "Are there 18 eggs?", "It might be 18.", "It is not 18.", "If he eats 3, 18 are left.", r"Is it \boxed{18}?"],
)
def test_what_states_nothing(reply: str) -> None:
    assert stated_answer([reply]) is None


def test_an_earlier_reply_counts_unless_it_is_withdrawn() -> None:
    assert stated_answer(["The answer is 42.", "You're welcome!"]) == StatedAnswer("42", False)
    assert stated_answer(["The answer is 42.", "So it is 48."]) == StatedAnswer("48", True)
    assert stated_answer(["The answer is 42.", "Sorry, that was wrong. Which box is full?"]) is None
    assert stated_answer([r"\boxed{48} Wait, it is 42."]) == StatedAnswer("42", False)
    assert stated_answer(["It is a common mistake to say 48. The answer is 42."]) == StatedAnswer("42", True)


@pytest.mark.parametrize(
    ("answer", "read"),
    [
        (r"2\sqrt{3}", r"$2\sqrt{3}$"),  # which math-verify would read as 2
        ("(2, 5)", "$(2, 5)$"),
        ("$1,250.00", "1250.00"),
        ("1, 250", "$1, 250$"),
        (r"25\%", "25%"),
        ("2 1/2", r"$2\frac{1}{2}$"),
        (r"\(x = 3\)", "3"),
        ("x = 3 or x = -3", "$x = 3, x = -3$"),
        ("18 litres", "18 litres"),
        (r"5\text{ cm}", r"$5\text{ cm}$"),
        ("\u22125", "-5"),
    ],
)
def test_an_answer_as_math_verify_reads_it(answer: str, read: str) -> None:
    assert as_math(answer) == read
