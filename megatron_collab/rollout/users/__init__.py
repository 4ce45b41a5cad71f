"""Simulated users: a file each. Adding one is adding a file.

A task's `user` (or user.name, for all tasks) is KIND or KIND/ARGUMENT, and `llm` where it is empty. The file KIND.py
defines one class, KIND in CamelCase with `User` behind it, that derives from `User`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_collab.config import Config
from megatron_collab.types import Conversation, Message, Task

if TYPE_CHECKING:  # LiteLLM takes seconds to import, and checking a name needs none of it
    from megatron_collab.llm.client import LlmClient

DEFAULT = "llm"


class UserError(RuntimeError):
    """The simulated user gave no usable message; the reason is the text."""


@dataclass(frozen=True)
class UserReply:
    """The user's next message, whether it ends the conversation, and what the turn that it answers was worth."""

    message: Message
    done: bool
    reward: float = 0.0


class User:
    """The user of one conversation about `task`; what it remembers is of that conversation alone.

    `argument` is what the name says after its KIND, `sample` names the conversation: what a user draws follows from
    it or from the task. `users` holds what all users of the process share.
    """

    def __init__(self, task: Task, argument: str, sample: str, users: Users) -> None:
        self.task = task
        self.argument = argument
        self.sample = sample
        self.users = users

    @classmethod
    def unavailable(cls, argument: str, config: Config) -> str | None:
        """Why there is no such user, with the way out; asked before a run starts."""
        return f"takes no argument, but is given {argument!r}" if argument else None

    async def start(self, conversation: Conversation) -> None:
        """Called once, before the first reply, with the conversation as it stands. Raises UserError."""

    async def reply(self, conversation: Conversation) -> UserReply:
        """What the user says to the policy's last message. Raises UserError."""
        raise NotImplementedError

    async def finish(self, conversation: Conversation) -> float:
        """Called once at the end, whatever the end was; what more the policy's last turn was worth."""
        return 0.0

    def says(self, text: str, reward: float = 0.0) -> UserReply:
        """`text` as a reply, which ends the conversation where it holds user.stop."""
        return UserReply(Message("user", text), self.users.config.user.stop in text, reward)


class Users:
    """Makes the users of a process. `counters` counts replies, and what the gates refused."""

    def __init__(self, config: Config, client: LlmClient, engine: Sequence[tuple[str, str]] = ()) -> None:
        """`engine`: address and key of the run's SGLang servers, for user.model=policy."""
        self.config = config
        self.client = client
        self.engine = tuple(engine)
        self.counters: Counter[str] = Counter()

    def make(self, task: Task, sample: str) -> User:
        """The user of one more conversation about `task`."""
        kind, argument = split(self.config.user.name or task.user)
        return find(kind)(task, argument, sample, self)

    def take_counters(self) -> dict[str, int]:
        """What was counted since the last call."""
        taken, self.counters = dict(self.counters), Counter()
        return taken


def known() -> list[str]:
    """The kinds of users, without importing them."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "guardrails")


def find(kind: str) -> type[User]:
    """The users of that kind."""
    module = importlib.import_module(f"{__name__}.{kind}")
    return getattr(module, "".join(word.capitalize() for word in kind.split("_")) + "User")


def split(name: str) -> tuple[str, str]:
    """Kind and argument of a user's name."""
    kind, _, argument = (name or DEFAULT).partition("/")
    return kind, argument


def check(name: str, config: Config) -> str | None:
    """Why there is no user of that name, with the way out, or None."""
    kind, argument = split(name)
    if kind not in known():
        return f"user {name}: no such kind of user; known are {', '.join(known())}"
    reason = find(kind).unavailable(argument, config)
    return reason and f"user {name or DEFAULT}: {reason}"
