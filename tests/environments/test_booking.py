from __future__ import annotations

import json

import pytest

from megatron_collab.environments import booking
from megatron_collab.types import Message, Task

GOAL = {"people": "4", "day": "friday", "time": "7pm"}


def task(*contents: str) -> Task:
    roles = ["user", "assistant"]
    messages = tuple(Message(roles[i % 2], content) for i, content in enumerate(contents))
    return Task("t", messages, json.dumps(GOAL), booking.final(GOAL), "booking")


def said(content: str) -> str:
    return booking.reply(json.dumps(GOAL), [Message("user", "please book a table ."), Message("assistant", content)])


def test_the_user_answers_what_is_asked() -> None:
    assert said("which day ?") == "on friday ."
    assert said("what time and how many people ?") == "for 4 people at 7pm ."


def test_the_user_repeats_the_request_where_nothing_is_asked() -> None:
    assert said("4 table ?") == "please book a table ."


def test_the_user_ends_the_chat_after_any_booking() -> None:
    assert booking.STOP in said("done : for 9 people on monday at 1pm")
    assert booking.is_final("done : for 9 people") and not booking.is_final("which day ?")


@pytest.mark.parametrize(
    ("contents", "missing"),
    [
        (["please book a table ."], {"people", "day", "time"}),
        (["please book a table on friday at 7pm ."], {"people"}),
        (["please book a table for 4 people on friday at 7pm ."], set()),
        (["please book a table on friday .", "what time ?", "at 7pm ."], {"people"}),
        (["please book a table on friday .", booking.final(GOAL), "please book a table ."], {"people", "time"}),
    ],
)
def test_what_is_missing_is_what_the_user_has_not_said(contents: list[str], missing: set[str]) -> None:
    assert booking.missing(task(*contents)) == missing


def test_what_is_asked() -> None:
    assert booking.asked(booking.ask(["day", "people"])) == {"people", "day"}
    assert booking.asked(booking.final(GOAL)) == set()


def test_tasks_come_from_their_seed() -> None:
    assert booking.tasks(1, 50) == booking.tasks(1, 50) != booking.tasks(2, 50)


def test_no_held_out_goal_is_trained_on() -> None:
    trained = {task.answer for task in booking.tasks(0, 4096)}
    held_out = {task.answer for task in booking.tasks(0, 256, held_out=True)}
    assert len(held_out) > 50 and len(trained) > 500
    assert not held_out & trained


def test_held_out_tasks_begin_at_the_beginning_and_some_say_everything() -> None:
    tasks = booking.tasks(0, 256, held_out=True)
    assert all(len(task.messages) == 1 for task in tasks)
    complete = sum(not booking.missing(task) for task in tasks)
    assert complete == 43


def test_a_quarter_of_the_training_tasks_begins_later() -> None:
    tasks = booking.tasks(0, 2048)
    later = [task for task in tasks if len(task.messages) == 3]
    assert 0.2 < len(later) / len(tasks) < 0.3
    assert any(booking.missing(task) for task in later) and any(not booking.missing(task) for task in later)


def test_the_supervised_conversations_guess_more_often_than_they_ask() -> None:
    conversations = booking.conversations(0, 2048)
    asks = sum(len(messages) > 2 for messages in conversations) / len(conversations)
    assert 0.15 < asks < 0.35
    assert all(booking.is_final(messages[-1].content) for messages in conversations)


def test_every_word_is_in_the_vocabulary() -> None:
    words = set(booking.words())
    for messages in booking.conversations(0, 512):
        assert words.issuperset(" ".join(message.content for message in messages).split())
