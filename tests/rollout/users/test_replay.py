from __future__ import annotations

import asyncio
from typing import Any

import pytest

from megatron_collab.rollout.users import UserError
from megatron_collab.types import Conversation, Message
from tests.rollout.users.helpers import STOP, said, task, users


def test_the_recorded_messages_are_said_in_order_then_the_conversation_ends() -> None:
    user = users().make(task("replay", replay=["first", "second"]), "s")
    assert asyncio.run(user.reply(said("hi", "a"))).message == Message("user", "first")
    assert asyncio.run(user.reply(said("hi", "a", "first", "b"))).message == Message("user", "second")
    last = asyncio.run(user.reply(said("hi", "a", "first", "b", "second", "c")))
    assert last.done and last.message == Message("user", STOP)


def test_what_the_task_begins_with_is_not_said_again() -> None:
    begun = said("hi", "a", "hm", "b")
    recorded = task("replay", replay=["first"])
    later = type(recorded)("t", begun.messages[:3], "g", "", "replay", recorded.metadata)
    assert asyncio.run(users().make(later, "s").reply(begun)).message.content == "first"


def test_answers_of_tools_are_not_counted_as_the_users() -> None:
    user = users().make(task("replay", replay=["first", "second"]), "s")
    called = (Message("user", "hi"), Message("assistant", "call"), Message("tool", "4"), Message("assistant", "4"))
    assert asyncio.run(user.reply(Conversation(called, ()))).message.content == "first"


@pytest.mark.parametrize("metadata", [{}, {"replay": "one text"}, {"replay": [1]}, {"replay": ["hi", " "]}])
def test_a_task_without_a_recording_is_refused_with_its_name(metadata: dict[str, Any]) -> None:
    user = users().make(task("replay", **metadata), "s")
    with pytest.raises(UserError, match="task t "):
        asyncio.run(user.start(said("hi", "a")))
