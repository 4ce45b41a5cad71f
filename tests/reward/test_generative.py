from __future__ import annotations

import asyncio

from megatron_collab.reward.metrics.judged import Generative
from megatron_collab.types import Conversation, Finish, Message, Missing, Turn
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


def test_turns_are_judged_by_themselves() -> None:
    """Each reply after what came before it, with `reaction` also the user's answer; a tool's call with its reply."""
    task = about("42", "what is it?")
    conversation = Conversation(task.messages, ())
    for text, role, answer in [("let me see", "tool", "6 x 7"), ("Is it 42?", "user", "nearly"), ("43", "", "")]:
        conversation = conversation.add_turn(Turn((), (), (), (), Finish.STOP, text))
        conversation = conversation.add_messages([Message(role, answer)], ()) if role else conversation
    shown = {
        "reply": ["**Assistant**: Is it 42?\n\n", "**User**: nearly\n**Assistant**: 43\n\n"],
        "reaction": ["**Assistant**: Is it 42?\n**User**: nearly\n\n", "**User**: nearly\n**Assistant**: 43\n\n"],
    }
    for turns, ends in shown.items():
        judge = FakeJudge(*[{"thought": "", "score": 0.25}] * 2)
        options = Generative.Options(prompt="Is it kind? {conversation}", turns=turns)
        assert Generative.scores_turns(options)
        metric = Generative(options, judge)  # type: ignore[arg-type]
        assert asyncio.run(metric.score_turns(task, conversation)) == [0.0, 0.25, 0.25]
        for prompt, end in zip(judge.prompts, ends, strict=True):
            assert end in prompt
        down = Generative(options, FakeJudge(Missing("down")))  # type: ignore[arg-type]
        assert asyncio.run(down.score_turns(task, conversation)) == Missing("down")
    assert not Generative.scores_turns(Generative.Options(prompt="{conversation}"))


def test_an_outage_of_the_judge_is_missing() -> None:
    judge = FakeJudge(Missing("down"))
    assert score("generative", TASK, play(TASK, "x"), judge, prompt="{conversation}") == Missing("down")
