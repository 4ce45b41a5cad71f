"""Simulated users, by the kinds in USERS or given as package.module:Class.

A task's `user` (or user.name, for all tasks) is KIND or KIND/ARGUMENT, and `llm` where it is empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_collab.config import Config, ConfigError, EndpointConfig, Extension, build, lookup
from megatron_collab.config.extension import NoOptions
from megatron_collab.types import Conversation, Message, Task

if TYPE_CHECKING:  # LiteLLM takes seconds to import, and checking a name needs none of it
    from megatron_collab.llm.client import LlmClient

USERS = {
    "llm": f"{__name__}.llm:LlmUser",
    "replay": f"{__name__}.scripts:ReplayUser",
    "reveal": f"{__name__}.scripts:RevealUser",
    "scripted": f"{__name__}.scripts:ScriptedUser",
}
DEFAULT = "llm"


class UserError(RuntimeError):
    """The simulated user gave no usable message; the reason is the text."""


@dataclass(frozen=True)
class UserReply:
    """The user's next message, whether it ends the conversation, and a reward for the turn that it answers."""

    message: Message
    done: bool
    reward: float = 0.0


class User(Extension):
    """Base of the users: the user of one conversation about `task`.

    `argument` is the part of the name after KIND/. Random draws follow from `sample`, the conversation's name, or from
    the task. `users` is shared in the process. `Options`: a frozen dataclass of settings, user.options.SETTING.
    """

    def __init__(self, task: Task, argument: str, sample: str, users: Users) -> None:
        super().__init__(options_of(type(self), users.config))
        self.task, self.argument, self.sample, self.users = task, argument, sample, users

    @classmethod
    def unavailable(cls, argument: str, config: Config) -> str | None:
        """Why this user cannot be used, with the way out; asked before a run starts. May raise ConfigError."""
        return f"takes no argument, but is given {argument!r}" if argument else None

    @classmethod
    def asks(cls, argument: str, config: Config) -> EndpointConfig | None:
        """The language model that these users ask, which is checked before a run starts; None where they ask none."""
        return None

    async def start(self, conversation: Conversation) -> None:
        """Called once, before the first reply, with the conversation so far. Raises UserError."""

    async def reply(self, conversation: Conversation) -> UserReply:
        """The user's answer to the policy's last message. Raises UserError."""
        raise NotImplementedError

    async def finish(self, conversation: Conversation) -> float:
        """Called once at the end, whatever the ending; a further reward for the policy's last turn."""
        return 0.0

    def says(self, text: str, reward: float = 0.0) -> UserReply:
        """`text` as a reply, which ends the conversation where it holds user.stop."""
        return UserReply(Message("user", text), self.users.config.user.stop in text, reward)


class Users:
    """Makes the users of a process. `counters` counts replies, and those that the guardrails rejected."""

    def __init__(self, config: Config, client: LlmClient, engine: Sequence[str] = ()) -> None:
        """`engine`: for user.model=policy, the api_base of each of the run's SGLang servers (PolicyProvider.add)."""
        self.config = config
        self.client = client
        self.engine = tuple(engine)
        self.counters: Counter[str] = Counter()

    def make(self, task: Task, sample: str) -> User:
        """The user of one more conversation about `task`."""
        kind, argument = split_user(self.config.user.name or task.user)
        return find_user(kind)(task, argument, sample, self)


def find_user(kind: str) -> type[User]:
    """The users of a kind: one of USERS, or package.module:Class. Raises ConfigError."""
    return lookup(kind, "user", USERS, User)


def split_user(name: str) -> tuple[str, str]:
    """Kind and argument of a user's name; the folders of a spec `./folder/file.py:Class` are no argument."""
    kind, _, argument = (name or DEFAULT).partition("/")
    if kind in USERS or ":" not in name:
        return kind, argument
    where, _, rest = name.rpartition(":")
    named, _, argument = rest.partition("/")
    return f"{where}:{named}", argument


def options_of(kind: type[User], config: Config) -> Any:
    """The options of users of a kind; kinds without options share user.options with those that have some."""
    given = config.user.options if kind.Options is not NoOptions else {}
    return build(kind.Options, given, "user.options.")


def check_user(name: str, config: Config) -> str | None:
    """Why there is no user of that name, with the way out, or None."""
    kind, argument = split_user(name)
    try:
        found = find_user(kind)
        options_of(found, config)
        reason = found.unavailable(argument, config)
    except ConfigError as error:
        return str(error)
    return reason and f"user {name or DEFAULT}: {reason}"
