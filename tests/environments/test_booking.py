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


def user_reply(content: str) -> str:
    return booking.reply(json.dumps(GOAL), [Message("user", "please book a table ."), Message("assistant", content)])


def test_the_user_answers_what_is_asked() -> None:
    assert user_reply("which day ?") == "on friday ."
    assert user_reply("what time and how many people ?") == "for 4 people at 7pm ."


def test_the_user_repeats_the_request_if_nothing_is_asked() -> None:
    assert user_reply("4 table ?") == "please book a table ."


def test_the_user_ends_the_chat_after_any_booking() -> None:
    assert booking.STOP in user_reply("done : for 9 people on monday at 1pm")
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
def test_missing_slots_are_those_that_the_user_has_not_said(contents: list[str], missing: set[str]) -> None:
    assert booking.missing(task(*contents)) == missing


def test_a_user_who_opens_says_everything_in_half_of_the_conversations() -> None:
    goals = [task.goal for task in booking.tasks(0, 400)]
    openings = {goal: booking.reply(goal, []) for goal in goals}
    assert openings == {goal: booking.reply(goal, []) for goal in goals}
    complete = sum(all(text in f"{opening} " for text in ("for ", "on ", "at ")) for opening in openings.values())
    assert 0.4 < complete / len(openings) < 0.6 and f"{booking.REQUEST} ." in openings.values()


def test_slots_asked() -> None:
    assert booking.slots_asked(booking.ask(["day", "people"])) == {"people", "day"}
    assert booking.slots_asked(booking.final(GOAL)) == set()


def test_tasks_come_from_their_seed() -> None:
    assert booking.tasks(1, 50) == booking.tasks(1, 50) != booking.tasks(2, 50)


@pytest.mark.seconds
def test_evaluated_goals_and_first_messages_are_not_trained_on() -> None:
    evaluated = booking.tasks(0, booking.EVALUATED, held_out=True)
    trained = booking.tasks(0, 4096)
    conversations = booking.conversations(0, 4096)
    booked = {messages[-1].content for messages in conversations if says_everything(messages)}  # the others guess
    goals = {task.answer for task in trained} | booked
    first = {task.messages[0].content for task in trained} | {messages[0].content for messages in conversations}
    assert len(goals) > 250 and len(first) > 350
    assert not {task.answer for task in evaluated} & goals
    assert not {task.messages[0].content for task in evaluated} & first


def says_everything(messages: tuple[Message, ...]) -> bool:
    """Whether the user has said everything at the end; if so, the booking is the goal and not a guess."""
    text = " ".join(message.content for message in messages if message.role == "user")
    return all(part in text for part in ("people", "day", "pm"))


def test_each_value_of_a_slot_is_trained_on() -> None:
    text = " ".join(message.content for task in booking.tasks(0, 4096) for message in task.messages)
    assert all(f" {word} " in f" {text} " for values in booking.SLOTS.values() for word in values)


def test_evaluated_tasks_begin_at_the_beginning_and_400_different_ones_say_everything() -> None:
    tasks = booking.tasks(0, booking.EVALUATED, held_out=True)
    assert all(len(task.messages) == 1 for task in tasks)
    complete = [task for task in tasks if not booking.missing(task)]
    assert len({task.goal for task in complete}) == len(complete) == 400
    assert [bool(booking.missing(task)) for task in tasks[:8]] == [False, True, False, True, False, False, True, False]


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
