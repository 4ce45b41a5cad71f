"""Simulated users, by the kinds in USERS or given as package.module:Class.

A task's `user` (or user.name, for all tasks) is KIND or KIND/ARGUMENT, or the name of one of the configuration's
`users` (named.py); where it is empty, one of these by weight, and `llm` where there are none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_collab.config import Config, ConfigError, EndpointConfig, Extension, build, lookup, require
from megatron_collab.config.extension import NoOptions
from megatron_collab.rollout.users.named import as_user, user_of
from megatron_collab.runtime.process import RunStopped
from megatron_collab.types import Conversation, Message, Task

if TYPE_CHECKING:  # LiteLLM takes seconds to import, and checking a name needs none of it
    from megatron_collab.llm.client import LlmClient

USERS = {
    "feedback": f"{__name__}.feedback:FeedbackUser",
    "llm": f"{__name__}.llm:LlmUser",
    "replay": f"{__name__}.scripts:ReplayUser",
    "reveal": f"{__name__}.scripts:RevealUser",
    "scripted": f"{__name__}.scripts:ScriptedUser",
}
DEFAULT = "llm"
FAILED = "user_failed"  # counter
FINISH_SECONDS = 10.0  # that User.finish has at least, to end what it holds, also after rollout.deadline


class UserError(RuntimeError):
    """The simulated user gave no usable message; the reason is the text."""


@contextmanager
def failing(task: Task, users: Users) -> Iterator[None]:
    """Turn whatever a user raises into UserError, which ends its conversation; a spent budget ends the run."""
    try:
        yield
    except (UserError, RunStopped):
        raise
    except Exception as error:  # of a user from anywhere
        users.counters[FAILED] += 1
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UserError(f"user {user_of(task, users.config) or DEFAULT}: {reason}") from error


@dataclass(frozen=True)
class UserReply:
    """The user's next message, whether it ends the conversation, and a reward for the turn that it answers.

    `credits` are rewards for other turns by their number in conversation.turns, in which 0 is the trained turn.
    """

    message: Message
    done: bool
    reward: float = 0.0
    credits: Mapping[int, float] = field(default_factory=dict)


class User(Extension):
    """Base of the users: the user of one conversation about `task`.

    `argument` is the part of the name after KIND/. Random draws follow from `sample`, the conversation's name, or from
    the task. `users` is shared in the process. `Options`: a frozen dataclass of settings, user.options.SETTING.
    `opens`: whether they say the first message of a task that has none.
    """

    opens: ClassVar[bool] = False

    def __init__(self, task: Task, argument: str, sample: str, users: Users) -> None:
        super().__init__(options_of(type(self), users.config, users.group))
        self.task, self.argument, self.sample, self.users = task, argument, sample, users

    @classmethod
    def unavailable(cls, argument: str, config: Config) -> str | None:
        """Why this user cannot be used, with the way out; asked before a run starts. May raise ConfigError."""
        return f"takes no argument, but is given {argument!r}" if argument else None

    @classmethod
    def asks(cls, argument: str, config: Config) -> EndpointConfig | None:
        """The language model that these users ask, which is checked before a run starts; None where they ask none."""
        return None

    @classmethod
    def lacks(cls, task: Task) -> str | None:
        """What the task lacks without which these users cannot play it, as "an answer"; asked before a run starts."""
        return None

    @classmethod
    def check_task(cls, task: Task, argument: str, config: Config) -> None:
        """Raises ValueError, with the way out, for a task that these users cannot read; asked before a run starts.

        `config` is as these users see it; `argument` as in `unavailable`.
        """

    async def open(self) -> str:
        """The first message of the conversation, where the task has none; of a user of its own. Raises UserError."""
        raise NotImplementedError

    async def start(self, conversation: Conversation) -> None:
        """Called once, before the first reply, with the conversation so far. Raises UserError."""

    async def reply(self, conversation: Conversation) -> UserReply:
        """The user's answer to the policy's last message. Raises UserError."""
        raise NotImplementedError

    async def finish(self, conversation: Conversation) -> float | Mapping[int, float]:
        """Called once at the end, whatever the ending; a further reward for the last turn, or for turns by number.

        Raises UserError.
        """
        return 0.0

    def says(self, text: str, reward: float = 0.0, credits: Mapping[int, float] = {}) -> UserReply:
        """`text` as a reply, which ends the conversation where it holds user.stop."""
        return UserReply(Message("user", text), self.users.config.user.stop in text, reward, credits)


class Users:
    """Makes the users of a process. `counters` counts replies, and those that the guardrails rejected.

    A named user is made by Users of its own, whose `config` has its settings in `user` and which share the rest.
    """

    def __init__(self, config: Config, client: LlmClient, engine: Sequence[str] = ()) -> None:
        """`engine`: for user.model=policy, the api_base of each of the run's SGLang servers (PolicyProvider.add)."""
        self.config, self.group = config, "user"
        self.client = client
        self._engine = list(engine)
        self.counters: Counter[str] = Counter()
        self._named = {name: self._as(name) for name in config.users}

    @property
    def engine(self) -> Sequence[str]:
        return self._engine

    @engine.setter
    def engine(self, engine: Sequence[str]) -> None:
        self._engine[:] = engine  # which those of named users share

    def make(self, task: Task, sample: str) -> User:
        """The user of one more conversation about `task`."""
        name = user_of(task, self.config)
        users = self._named.get(name, self)
        kind, argument = split_user(name if users is self else users.config.user.name or "")
        return find_user(kind)(task, argument, sample, users)

    def ended(self, task: Task, conversation: Conversation) -> None:
        """Count a conversation with a named user: by its ending, and the messages of the user."""
        name = user_of(task, self.config)
        if name in self._named:
            said = sum(message.role == "user" for message in conversation.messages[len(task.messages) :])
            self.counters[f"user/{name}/turns"] += said
            self.counters[f"user/{name}/{conversation.ending}"] += 1

    def _as(self, name: str) -> Users:
        named = copy(self)
        named.config, named.group, named._named = as_user(self.config, name), f"users.{name}", {}
        return named


def find_user(kind: str, setting: str = "user", named: Iterable[str] = ()) -> type[User]:
    """The users of a kind: one of USERS, or package.module:Class. Raises ConfigError; `named` are known names too."""
    found: type[User] = lookup(kind, setting, {**dict.fromkeys(named, ""), **USERS}, User)
    return found


def split_user(name: str) -> tuple[str, str]:
    """Kind and argument of a user's name; the folders of a spec `./folder/file.py:Class` are no argument."""
    kind, _, argument = (name or DEFAULT).partition("/")
    if kind in USERS or ":" not in name:
        return kind, argument
    where, _, rest = name.rpartition(":")
    named, _, argument = rest.partition("/")
    return f"{where}:{named}", argument


def options_of(kind: type[User], config: Config, group: str = "user") -> Any:
    """The options of users of a kind; kinds without options share user.options with those that have some."""
    given = config.user.options if kind.Options is not NoOptions else {}
    return build(kind.Options, given, f"{group}.options.")


def resolve_user(name: str, config: Config) -> tuple[type[User], str, Config, str]:
    """The class of the users of that name, its argument, their settings, and what these are called: user or users.NAME.

    Raises ConfigError where there is no such user, or it does not take its options.
    """
    if name not in config.users:
        kind, argument = split_user(name)
        found = find_user(kind, "user", config.users)
        options_of(found, config)
        return found, argument, config, "user"
    group = f"users.{name}"
    require(name not in USERS, f"{group}: is a kind of user, and all tasks may name it; choose another name")
    config = as_user(config, name)
    kind, argument = split_user(config.user.name or "")
    found = find_user(kind, f"{group}.class")
    takes = found.Options is not NoOptions or not config.user.options
    require(takes, f"{group}.options: {kind} takes none; remove them")
    options_of(found, config, group)
    return found, argument, config, group


def check_user(name: str, config: Config) -> str | None:
    """Why there is no user of that name, with the way out, or None."""
    try:
        kind, argument, config, _ = resolve_user(name, config)
        reason = kind.unavailable(argument, config)
    except ConfigError as error:
        return str(error)
    return reason and f"user {name or DEFAULT}: {reason}"
