from __future__ import annotations

import asyncio
import json

import pytest

from megatron_collab.data.worlds import booking
from megatron_collab.reward import metrics
from megatron_collab.types import Conversation, Finish, Message, Missing, Score, Task, Turn

GOAL = {"people": "4", "day": "friday", "time": "7pm"}


def task(*given: str) -> Task:
    messages = (Message("user", " ".join([booking.REQUEST, booking.say(GOAL, given), "."])),)
    return Task("t", messages, json.dumps(GOAL), booking.final(GOAL), "booking")


def played(about: Task, *replies: str) -> Conversation:
    """The policy's replies, each but the last followed by the scripted user's message."""
    conversation = Conversation(about.messages, (1,))
    for number, text in enumerate(replies):
        ids = tuple(range(len(text.split()) + 1))
        conversation = conversation.add_turn(
            Turn(conversation.token_ids, ids, (-1.0,) * len(ids), 0, Finish.STOP, text)
        )
        if number < len(replies) - 1:
            said = booking.reply(about.goal, conversation.messages)
            conversation = conversation.add_user(Message("user", said), (2,))
    return conversation


def score(name: str, about: Task, *replies: str, trained_turn: int = 0) -> Score | None:
    return asyncio.run(metrics.load(name)(about, played(about, *replies), trained_turn))


ALL = ("people", "day", "time")
RIGHT, WRONG = booking.final(GOAL), booking.final({**GOAL, "day": "monday"})


def test_the_last_reply_is_what_is_judged() -> None:
    assert score("booking_right", task("day"), booking.ask(["people", "time"]), RIGHT) == 1.0
    assert score("booking_right", task("day"), booking.ask(["people", "time"]), WRONG) == 0.0
    assert score("booking_right", task("day"), booking.ask(["people", "time"])) == 0.0


def test_the_closing_message_of_the_user_does_not_hide_the_last_reply() -> None:
    about = task(*ALL)
    ended = played(about, RIGHT).add_user(Message("user", booking.STOP), ())
    assert asyncio.run(metrics.load("booking_right")(about, ended, 0)) == 1.0


def test_asking_is_judged_by_what_the_task_leaves_open() -> None:
    question = booking.ask(["time"])
    assert score("ask_when_missing", task("day"), question, RIGHT) == 1.0
    assert score("ask_when_missing", task("day"), WRONG, question) == 0.0
    assert score("ask_when_missing", task(*ALL), question) is None
    assert score("ask_when_complete", task(*ALL), question, RIGHT) == 1.0
    assert score("ask_when_complete", task(*ALL), RIGHT) == 0.0
    assert score("ask_when_complete", task("day"), question) is None


def test_missing_questions_are_those_not_asked_before_the_answer() -> None:
    assert score("missing_questions", task("day"), RIGHT) == 2.0
    assert score("missing_questions", task("day"), booking.ask(["time"]), WRONG) == 1.0
    assert score("missing_questions", task("day"), booking.ask(["time"]), booking.ask(["people"]), RIGHT) == 0.0
    assert score("missing_questions", task("day"), WRONG, booking.ask(["time", "people"])) == 2.0
    assert score("missing_questions", task(*ALL), RIGHT) == 0.0


def test_needless_questions_are_those_already_answered() -> None:
    assert score("needless_questions", task("day"), booking.ask(["time", "people"]), RIGHT) == 0.0
    assert score("needless_questions", task("day"), booking.ask(["time", "day"]), RIGHT) == 1.0
    assert score("needless_questions", task("day"), booking.ask(["time"]), booking.ask(["time", "day"])) == 2.0


def test_tokens_are_the_policys_own_from_the_trained_turn_on() -> None:
    assert score("token_amount", task("day"), "one two three", "four") == 4 + 2
    assert score("token_amount", task("day"), "one two three", "four", trained_turn=1) == 2


def test_a_question_mark_is_asking() -> None:
    assert score("asks", task("day"), "how many?", "6") == 1.0
    assert score("asks", task("day"), "6", "how many?") == 0.0


@pytest.mark.parametrize("name", ["booking_right", "ask_when_missing", "missing_questions", "needless_questions"])
def test_booking_metrics_do_not_apply_to_other_worlds(name: str) -> None:
    other = Task("t", (Message("user", "hi"),), "goal", "5", "gsm8k")
    assert asyncio.run(metrics.load(name)(other, played(other, "5"), 0)) is None


def test_the_answer_to_a_problem_is_checked_symbolically() -> None:
    problem = Task("t", (Message("user", "how many?"),), "goal", "1250", "gsm8k")
    cases = {
        "So the answer is 1,250.": 1.0,
        r"3 boxes, so \boxed{2500/2} in all": 1.0,
        "$1250.00": 1.0,
        "What do you know?": 0.0,
        "The answer is 1251": 0.0,
        "": 0.0,
    }

    async def scores() -> list[Score | None]:
        accuracy = metrics.load("accuracy")
        return [await accuracy(problem, played(problem, "x", text), 0) for text in cases]

    assert dict(zip(cases, asyncio.run(scores()), strict=True)) == cases


def test_a_missing_score_is_not_a_number() -> None:
    assert not isinstance(Missing("why"), float | int)


def test_every_metric_has_a_score_function() -> None:
    assert metrics.known() == sorted(metrics.known())
    assert all(asyncio.iscoroutinefunction(metrics.load(name)) for name in metrics.known())
