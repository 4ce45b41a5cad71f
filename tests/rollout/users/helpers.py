"""Tasks, conversations and users for the tests of simulated users."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_collab.config import Config
from megatron_collab.llm.client import LlmClient
from megatron_collab.rollout.users import Users
from megatron_collab.types import Conversation, Message, Task

STOP = "[[TERMINATE CHAT]]"


def users(engine: Sequence[tuple[str, str]] = (), **options: Any) -> Users:
    """The users of a process; `options` set the group user."""
    config = Config()
    for name, value in options.items():
        setattr(config.user, name, value)
    return Users(config, LlmClient(), engine)


def task(user: str, goal: str = "the goal", answer: str = "", **metadata: Any) -> Task:
    return Task("t", (Message("user", "hi"),), goal, answer, user, metadata)


def said(*contents: str) -> Conversation:
    """User and assistant in turn, the user first."""
    return Conversation(tuple(Message(("user", "assistant")[i % 2], text) for i, text in enumerate(contents)), ())
