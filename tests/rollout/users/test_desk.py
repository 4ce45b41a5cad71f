"""The user `desk`."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from megatron_collab.environments import desk
from megatron_collab.environments.desk_user import read_goal
from megatron_collab.types import Conversation, Message
from tests.rollout.users.helpers import STOP, dialogue, make_users

TASK = next(task for task in desk.tasks(0, 40, desk.PEOPLE) if read_goal(task.goal).user == "vague")


def answer(sample: str, question: str = "which item and which date ?") -> str:
    conversation = Conversation((*TASK.messages, Message("assistant", question)), ())
    return asyncio.run(make_users().make(TASK, sample).reply(conversation)).message.content


def test_conversations_differ_and_a_resumed_one_does_not() -> None:
    """The name of a conversation seeds its user; nothing is kept between processes."""
    answers = [answer(f"step 3/{i}") for i in range(20)]
    assert answers == [answer(f"step 3/{i}") for i in range(20)] and len(set(answers)) > 3


def test_replies_are_counted_and_a_guess_ends_the_conversation() -> None:
    users = make_users()
    reply = asyncio.run(users.make(TASK, "s").reply(dialogue("please cancel my delivery .", "done : item lamp")))
    assert reply.done and STOP in reply.message.content and users.counters == {"user_replies": 1}


def test_a_task_with_another_goal_is_refused() -> None:
    kind = make_users().directory.find("desk").kind
    settings = make_users().settings
    kind.check_task(TASK, "", settings)
    with pytest.raises(ValueError, match="the goal must be a JSON object with kind"):
        kind.check_task(replace(TASK, goal="{}"), "", settings)
