"""Scripted and recorded users."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from megatron_collab.environments import booking
from megatron_collab.rollout.users import UserError, UserReply
from megatron_collab.settings import ConfigError
from megatron_collab.types import Conversation, Message
from tests.rollout.users.helpers import STOP, dialogue, make_users, task

TASK = booking.tasks(seed=3, n=1, held_out=True)[0]


def test_the_scripted_user_answers_and_is_counted() -> None:
    goal = json.loads(TASK.goal)
    users = make_users()
    reply = asyncio.run(users.make(TASK, "s").reply(dialogue("please book a table .", "which day and what time ?")))
    assert reply == UserReply(Message("user", f"on {goal['day']} at {goal['time']} ."), done=False)
    assert users.counters == {"user_replies": 1}


def test_the_scripted_user_ends_the_conversation() -> None:
    reply = asyncio.run(make_users().make(TASK, "s").reply(dialogue("please book a table .", "done : for 2 people")))
    assert reply.done
    assert booking.STOP in reply.message.content


def test_concurrent_conversations_keep_their_own_goals() -> None:
    tasks = booking.tasks(seed=5, n=200)
    users = make_users()

    async def both_replies(i: int) -> list[str]:
        user = users.make(tasks[i], f"s/{i}")
        first = dialogue("please book a table .", "how many people and which day ?")
        await user.start(first)
        day = await user.reply(first)
        time = await user.reply(Conversation((*first.messages, day.message, Message("assistant", "what time ?")), ()))
        await user.finish(first)
        return [day.message.content, time.message.content]

    async def all_replies() -> list[list[str]]:
        return await asyncio.gather(*map(both_replies, range(200)))

    goals = [json.loads(booking_task.goal) for booking_task in tasks]
    expected = [[f"{booking.say(goal, ['people', 'day'])} .", f"at {goal['time']} ."] for goal in goals]
    assert asyncio.run(all_replies()) == expected
    assert len({tuple(replies) for replies in expected}) > 100


def test_guardrails_do_not_apply_to_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(booking, "reply", lambda goal, messages: "Assistant: how can I help you?")
    reply = asyncio.run(make_users().make(TASK, "s").reply(dialogue("please book a table .", "which day ?")))
    assert reply.message.content == "Assistant: how can I help you?"


def test_the_script_sees_neither_tool_calls_nor_thoughts() -> None:
    goal = json.loads(TASK.goal)
    messages = (
        Message("system", "what time ?"),
        Message("user", "please book a table ."),
        Message("assistant", "what time ?"),
        Message("tool", "7"),
        Message("assistant", "<think>what time ?</think>which day ?"),
    )
    reply = asyncio.run(make_users().make(TASK, "s").reply(Conversation(messages, ())))
    assert reply.message.content == f"on {goal['day']} ."


def test_a_script_that_does_not_exist_is_refused_with_its_name() -> None:
    with pytest.raises(ConfigError, match="scripted=nobody: no such name; known are booking"):
        make_users().make(task("scripted/nobody"), "s")


def test_the_recorded_messages_are_said_in_order_then_the_conversation_ends() -> None:
    user = make_users().make(task("replay", replay=["first", "second"]), "s")
    assert asyncio.run(user.reply(dialogue("hi", "a"))).message == Message("user", "first")
    assert asyncio.run(user.reply(dialogue("hi", "a", "first", "b"))).message == Message("user", "second")
    last = asyncio.run(user.reply(dialogue("hi", "a", "first", "b", "second", "c")))
    assert last.done and last.message == Message("user", STOP)


def test_scripts_and_recordings_open_a_conversation() -> None:
    opened = asyncio.run(make_users().make(TASK, "s").open())
    assert opened.startswith("please book a table") and asyncio.run(make_users().make(TASK, "t").open()) == opened
    unopened = replace(task("replay", replay=["first", "second"]), messages=())
    assert asyncio.run(make_users().make(unopened, "s").open()) == "first"
    played = unopened.play_on(Message("user", "first"))
    assert asyncio.run(make_users().make(played, "s").reply(dialogue("first", "a"))).message.content == "second"


def test_messages_of_the_task_are_not_said_again() -> None:
    begun = dialogue("hi", "a", "hm", "b")
    recorded = task("replay", replay=["first"])
    later = type(recorded)("t", begun.messages[:3], "g", "", "replay", recorded.metadata)
    assert asyncio.run(make_users().make(later, "s").reply(begun)).message.content == "first"


def test_tool_messages_are_not_counted_as_the_users() -> None:
    user = make_users().make(task("replay", replay=["first", "second"]), "s")
    called = (Message("user", "hi"), Message("assistant", "call"), Message("tool", "4"), Message("assistant", "4"))
    assert asyncio.run(user.reply(Conversation(called, ()))).message.content == "first"


@pytest.mark.parametrize("metadata", [{}, {"replay": "one text"}, {"replay": [1]}, {"replay": ["hi", " "]}])
def test_a_task_without_a_recording_is_refused_with_its_name(metadata: dict[str, Any]) -> None:
    user = make_users().make(task("replay", **metadata), "s")
    with pytest.raises(UserError, match="task t: "):
        asyncio.run(user.start(dialogue("hi", "a")))
