"""Tasks, conversations and users for the tests of simulated users."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_collab.config import Config
from megatron_collab.launch.play_specs import user_directory
from megatron_collab.llm.client import LlmClient
from megatron_collab.rollout.users import Users
from megatron_collab.settings import ConfigError
from megatron_collab.types import Conversation, Message, Task

STOP = "[[TERMINATE CHAT]]"


def make_users(engine: Sequence[tuple[str, str]] = (), **options: Any) -> Users:
    """The users of a process; `options` set user.*."""
    config = Config()
    for name, value in options.items():
        setattr(config.user, name, value)
    keys = {f"{url}/v1": key for url, key in engine}
    return Users(user_directory(config), LlmClient(keys=keys), list(keys))


def check_user(name: str, config: Config) -> str | None:
    """Why no user with that name can be used."""
    try:
        return user_directory(config).fault(name)
    except ConfigError as error:
        return str(error)


def task(user: str, goal: str = "the goal", answer: str = "", **metadata: Any) -> Task:
    return Task("t", (Message("user", "hi"),), goal, answer, user, metadata)


def dialogue(*contents: str) -> Conversation:
    """A conversation of user and assistant in turn, the user first."""
    return Conversation(tuple(Message(("user", "assistant")[i % 2], text) for i, text in enumerate(contents)), ())


def read_transcript(text: str) -> list[Message]:
    """The messages of a rendered conversation: the inverse of `render`."""
    role_mark = re.compile(r"^(\\*)\*\*(User|Assistant|Tool)\*\*: ", re.MULTILINE)
    marks = [mark for mark in role_mark.finditer(text) if not mark.group(1)]
    ends = [mark.start() - 1 for mark in marks[1:]] + [len(text)]
    return [
        Message(mark.group(2).lower(), role_mark.sub(lambda quoted: quoted.group(0)[1:], text[mark.end() : end]))
        for mark, end in zip(marks, ends, strict=True)
    ]


def read_request(messages: Sequence[Mapping[str, str]]) -> tuple[str, list[Message]]:
    """Goal and conversation of a request made by `LlmUser`: the inverse of `system_prompt` and `render`."""
    block = re.search(r"^```json\n(.*)\n```$", messages[0]["content"], re.MULTILINE)
    assert block is not None
    return json.loads(block.group(1))["goal"], read_transcript(messages[1]["content"])
