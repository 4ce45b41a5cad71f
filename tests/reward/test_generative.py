from __future__ import annotations

from megatron_collab.types import Missing
from tests.reward.fakes import FakeJudge, about, play, score

TASK = about("42", "what is it?", "what is what?", "the {goal}", goal="find it")
RUBRIC = 'As in {"score": 3}: does {conversation} reach {goal}, {answer}, from {question}? {conversation}'


def test_the_prompt_is_the_users_own_filled_in_once() -> None:
    judge = FakeJudge({"thought": "", "score": 4.0})
    played = play(TASK, "Is it {answer}?")
    assert score("generative", TASK, played, judge, prompt=RUBRIC, low=1, high=5, model="openai/strong") == 4.0
    shown = "**User**: what is it?\n**Assistant**: what is what?\n**User**: the {goal}\n**Assistant**: Is it {answer}?"
    expected = f'As in {{"score": 3}}: does {shown} reach find it, 42, from the {{goal}}? {shown}'
    assert judge.prompts[0].startswith(expected)
    assert '"score": number from 1 to 5' in judge.prompts[0]
    assert [(field.name, field.low, field.high) for field in judge.fields[0]] == [
        ("thought", None, None),
        ("score", 1, 5),
    ]
    assert judge.models == ["openai/strong"]


def test_one_metric_can_stand_twice_with_other_prompts() -> None:
    judge = FakeJudge({"thought": "", "score": 1.0})
    settings = {"metric": "generative", "prompt": "Is it kind? {conversation}"}
    assert score("kindness", TASK, play(TASK, "yes"), judge, **settings) == 1.0
    assert judge.prompts[0].startswith("Is it kind?")


def test_an_outage_of_the_judge_is_missing() -> None:
    judge = FakeJudge(Missing("down"))
    assert score("generative", TASK, play(TASK, "x"), judge, prompt="{conversation}") == Missing("down")
