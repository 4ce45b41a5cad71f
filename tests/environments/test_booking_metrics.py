"""The metrics of the booking world."""

from __future__ import annotations

import asyncio
import json

import pytest

from megatron_collab.environments import booking
from megatron_collab.environments.booking_metrics import BookingNewFacts
from megatron_collab.types import Conversation, Message, Score, Task
from tests.reward.fakes import about, play
from tests.reward.fakes import score as score_of

METRICS = "megatron_collab.environments.booking_metrics"
GOAL = {"people": "4", "day": "friday", "time": "7pm"}


def task(*slots: str) -> Task:
    messages = (Message("user", " ".join([booking.REQUEST, booking.say(GOAL, slots), "."])),)
    return Task("t", messages, json.dumps(GOAL), booking.final(GOAL), booking.USER)


def played(task: Task, *replies: str) -> Conversation:
    """The policy's replies, each but the last followed by the scripted user's message."""
    texts: list[str] = []
    for text in replies[:-1]:
        conversation = play(task, *texts, text)
        texts += [text, booking.reply(task.goal, conversation.messages)]
    return play(task, *texts, *replies[-1:])


def score(name: str, task: Task, *replies: str) -> Score | None:
    return score_of(f"{METRICS}:{name}", task, played(task, *replies))


ALL = ("people", "day", "time")
RIGHT, WRONG = booking.final(GOAL), booking.final({**GOAL, "day": "monday"})


def test_the_last_reply_is_what_is_judged() -> None:
    assert score("BookingRight", task("day"), booking.ask(["people", "time"]), RIGHT) == 1.0
    assert score("BookingRight", task("day"), booking.ask(["people", "time"]), WRONG) == 0.0
    assert score("BookingRight", task("day"), booking.ask(["people", "time"])) == 0.0


def test_right_when_missing_does_not_apply_if_the_task_says_everything() -> None:
    assert score("RightWhenMissing", task("day"), booking.ask(["people", "time"]), RIGHT) == 1.0
    assert score("RightWhenMissing", task("day"), WRONG) == 0.0
    assert score("RightWhenMissing", task(*ALL), RIGHT) is None


def test_the_closing_message_of_the_user_does_not_hide_the_last_reply() -> None:
    assert score_of(f"{METRICS}:BookingRight", task(*ALL), play(task(*ALL), RIGHT, booking.STOP)) == 1.0


def test_asking_is_judged_by_what_the_task_leaves_open() -> None:
    question = booking.ask(["time"])
    assert score("AskWhenMissing", task("day"), question, RIGHT) == 1.0
    assert score("AskWhenMissing", task("day"), WRONG, question) == 0.0
    assert score("AskWhenMissing", task(*ALL), question) is None
    assert score("AskWhenComplete", task(*ALL), question, RIGHT) == 1.0
    assert score("AskWhenComplete", task(*ALL), RIGHT) == 0.0
    assert score("AskWhenComplete", task("day"), question) is None


def test_missing_questions_are_those_not_asked_before_the_answer() -> None:
    assert score("MissingQuestions", task("day"), RIGHT) == 2.0
    assert score("MissingQuestions", task("day"), booking.ask(["time"]), WRONG) == 1.0
    assert score("MissingQuestions", task("day"), booking.ask(["time"]), booking.ask(["people"]), RIGHT) == 0.0
    assert score("MissingQuestions", task("day"), WRONG, booking.ask(["time", "people"])) == 2.0
    assert score("MissingQuestions", task(*ALL), RIGHT) == 0.0


def test_needless_questions_are_those_already_answered() -> None:
    assert score("NeedlessQuestions", task("day"), booking.ask(["time", "people"]), RIGHT) == 0.0
    assert score("NeedlessQuestions", task("day"), booking.ask(["time", "day"]), RIGHT) == 1.0
    assert score("NeedlessQuestions", task("day"), booking.ask(["time"]), booking.ask(["time", "day"])) == 2.0


@pytest.mark.parametrize("name", ["BookingRight", "AskWhenMissing", "MissingQuestions", "NeedlessQuestions"])
def test_booking_metrics_do_not_apply_to_other_worlds(name: str) -> None:
    other = about("5")
    assert score_of(f"{METRICS}:{name}", other, play(other, "5")) is None


def test_later_turns_are_judged_if_the_first_asks_for_exactly_the_missing_slots() -> None:
    both = booking.ask(["people", "time"])
    assert score("RightOnceTold", task("day"), both, RIGHT) == 1.0
    assert score("RightOnceTold", task("day"), both, WRONG) == 0.0
    assert score("RightOnceTold", task("day"), booking.ask(["people"]), RIGHT) is None
    assert score("RightOnceTold", task(*ALL), RIGHT) is None


def test_new_facts_are_answers_to_what_a_turn_asked_and_did_not_know() -> None:
    metric = BookingNewFacts(BookingNewFacts.Options(), None)  # type: ignore[arg-type]
    conversation = played(task("day"), booking.ask(["people", "day"]), booking.ask(["time", "people"]), RIGHT)
    assert asyncio.run(metric.score_turns(task("day"), conversation)) == [1.0, 1.0, 0.0]
    unanswered = played(task("day"), booking.ask(["people"]))
    assert asyncio.run(metric.score_turns(task("day"), unanswered)) == [0.0]
    assert score("BookingNewFacts", task("day"), booking.ask(["people", "time"]), RIGHT) == 2.0, "the sum"
    assert score("BookingNewFacts", about("x", "hi"), "hello") is None
