"""Simulated users: the kinds in USERS, or classes given as package.module:Class.

A task's `user` (or user.name, for all tasks) is KIND or KIND/ARGUMENT, or the name of one of the configuration's
`users`. If it is empty, one of the named users is drawn by weight; if there are none, it is `llm`.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_collab.runtime.process import ends_caller
from megatron_collab.runtime.redact import excerpt
from megatron_collab.settings import (
    ConfigError,
    EndpointConfig,
    Extension,
    Resolved,
    UserConfig,
    build,
    lookup,
    nearest,
    require,
)
from megatron_collab.settings.extension import NoOptions
from megatron_collab.types import EMPTY, Conversation, Message, Task

if TYPE_CHECKING:  # LiteLLM takes seconds to import, and checking a name needs none of it
    from megatron_collab.llm.client import LlmClient
    from megatron_collab.rollout.tools.of_user import UserTools

USERS = {
    "desk": f"{__name__}.desk:DeskUser",
    "feedback": f"{__name__}.feedback:FeedbackUser",
    "llm": f"{__name__}.llm:LlmUser",
    "replay": f"{__name__}.scripts:ReplayUser",
    "reveal": f"{__name__}.scripts:RevealUser",
    "scripted": f"{__name__}.scripts:ScriptedUser",
    "verl": f"{__name__}.verl:VerlUser",
}
DEFAULT = "llm"
FAILED = "user_failed"  # counter
_SETTINGS = tuple(spec.name for spec in fields(UserConfig) if spec.name != "name")
FINISH_SECONDS = 10.0  # minimum time for User.finish to release resources, even after rollout.deadline


class UserError(RuntimeError):
    """The simulated user gave no usable message; the error text is the reason."""


@contextmanager
def reporting_errors(task: Task, users: Users) -> Iterator[None]:
    """Convert any error of a user into UserError, which ends its conversation; RunStopped still ends the run."""
    try:
        yield
    except BaseException as error:  # a custom user may raise anything
        if isinstance(error, UserError) or ends_caller(error):
            raise
        users.counters[FAILED] += 1
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UserError(f"user {users.directory.name_of(task) or DEFAULT}: {reason}") from error


@dataclass(frozen=True)
class UserReply:
    """The user's next message, whether it ends the conversation, and a reward for the turn that it answers.

    `credits` are rewards for other turns, by index in conversation.turns; 0 is the trained turn.
    """

    message: Message
    done: bool
    reward: float = 0.0
    credits: Mapping[int, float] = field(default_factory=dict)


def with_excerpts(message: Message) -> Message:
    """The user's message with its private notes as transcripts keep them: excerpts, without empty ones."""
    notes = {name: excerpt(str(text)) for name, text in message.private.items() if text}
    return replace(message, private=notes or EMPTY)


class User(Extension):
    """Base class of users: the user of one conversation about `task`.

    `argument` is the part of the name after KIND/. Seed random draws with `sample`, the conversation's name, or with
    the task. `users` is shared in the process. `Options`: a frozen dataclass of settings, user.options.SETTING.
    `opens`: whether the user can write the first message of a task that has none. `calls_tools`: whether it calls the
    functions in user.tools, which are then in `tools` from `start` on; None while the user opens a conversation.
    """

    opens: ClassVar[bool] = False
    calls_tools: ClassVar[bool] = False
    tools: UserTools | None = None

    def __init__(self, task: Task, argument: str, sample: str, users: Users) -> None:
        super().__init__(options_of(type(self), users.settings, users.group))
        self.task, self.argument, self.sample, self.users = task, argument, sample, users

    @classmethod
    def unavailable(cls, argument: str, settings: UserConfig) -> str | None:
        """Why this user cannot be used, and how to fix it; checked before a run starts. May raise ConfigError."""
        return f"takes no argument, but got {argument!r}" if argument else None

    @classmethod
    def asks(cls, argument: str, settings: UserConfig) -> EndpointConfig | None:
        """The language model that these users call, checked before a run starts; None if they call none."""
        return None

    @classmethod
    def lacks(cls, task: Task) -> str | None:
        """What the task lacks for these users to play it, e.g. "an answer"; checked before a run starts."""
        return None

    @classmethod
    def check_task(cls, task: Task, argument: str, settings: UserConfig) -> None:
        """Raises ValueError, saying how to fix it, if these users cannot read the task; called before a run starts.

        `settings`: those of these users, as in `unavailable`.
        """

    async def open(self) -> str | Message:
        """The first message, if the task has none; called on a separate user object. Raises UserError.

        A Message may have private notes, as those of `says`.
        """
        raise NotImplementedError

    async def start(self, conversation: Conversation) -> None:
        """Called once before the first reply, with the conversation so far. Raises UserError."""

    async def reply(self, conversation: Conversation) -> UserReply:
        """The user's answer to the policy's last message. Raises UserError."""
        raise NotImplementedError

    async def finish(self, conversation: Conversation) -> float | Mapping[int, float]:
        """Called once at the end, for every ending; returns a final reward for the last turn, or rewards by turn index.

        Raises UserError.
        """
        return 0.0

    def says(
        self,
        text: str,
        reward: float = 0.0,
        credits: Mapping[int, float] = {},
        private: Mapping[str, str] = EMPTY,
    ) -> UserReply:
        """`text` as a reply; it ends the conversation if it contains user.stop.

        `private`: notes by name, such as what the user thinks. Only transcripts have them, as excerpts.
        """
        return UserReply(Message("user", text, private=private), self.users.settings.stop in text, reward, credits)


def reply_with_calls(reply: UserReply, user: User) -> UserReply:
    """The reply with the calls of tools before it: a private note, and their rewards."""
    if user.tools is None:
        return reply
    note, reward = user.tools.take_calls()
    message = replace(reply.message, private={**reply.message.private, **note})
    return replace(reply, message=message, reward=reply.reward + reward)


class Users:
    """Creates the users of a process. `counters` counts replies, and replies that the guardrails rejected.

    Each named user has a separate Users object with that user's `settings`; they share client, engine and counters.
    """

    def __init__(
        self, directory: UserDirectory, client: LlmClient, engine: Sequence[str] = (), adapter: str | None = None
    ) -> None:
        """For user.model=policy, `engine`: the api_base of each of the run's SGLang servers (PolicyProvider.add);
        `adapter`: name of the adapters to sample with, None: without."""
        self.directory, self.settings, self.group = directory, directory.user, "user"
        self.client, self.adapter = client, adapter
        self._engine = list(engine)
        self.counters: Counter[str] = Counter()
        self._named = {name: self._named_users(name) for name in directory.named}

    @property
    def engine(self) -> Sequence[str]:
        return self._engine

    @engine.setter
    def engine(self, engine: Sequence[str]) -> None:
        self._engine[:] = engine  # in place: the Users of named users share the list

    def make(self, task: Task, sample: str) -> User:
        """Create the user of a conversation about `task`."""
        user = self.directory.find(self.directory.name_of(task))
        return user.kind(task, user.argument, sample, self._named.get(user.name, self))

    def ended(self, task: Task, conversation: Conversation) -> None:
        """Count the ending and the user messages of a conversation with a named user."""
        name = self.directory.name_of(task)
        if name in self._named:
            user_turns = sum(message.role == "user" for message in conversation.messages[len(task.messages) :])
            self.counters[f"user/{name}/turns"] += user_turns
            self.counters[f"user/{name}/{conversation.ending}"] += 1

    def _named_users(self, name: str) -> Users:
        users, user = copy(self), self.directory.find(name)
        users.settings, users.group, users._named = user.settings, user.group, {}
        return users


@dataclass(frozen=True)
class ResolvedUser:
    """The users with a name: their class, the argument in their name, and their settings.

    `group`: the group of options that the settings come from, user or users.NAME.
    """

    name: str
    kind: type[User]
    argument: str
    settings: UserConfig
    group: str = "user"


@dataclass(frozen=True)
class UserDirectory(Resolved):
    """The users of a run by the names in tasks: those of the option `users` (`named`), and kinds of users.

    `user`: the settings of kinds. `seed`: of the draw of a task's user. `template_args`: arguments of the policy's chat
    template, for user.model=policy.
    """

    user: UserConfig
    named: Mapping[str, Mapping[str, Any]]
    seed: int
    template_args: Mapping[str, Any]

    @cached_property
    def settings(self) -> dict[str, UserConfig]:
        """The settings of all users by option group: `user`, and `users.NAME` for named users."""
        named = {
            f"users.{name}": _named_settings(name, dict(entry or {}), self.user) for name, entry in self.named.items()
        }
        return {"user": self.user, **named}

    @cached_property
    def _resolved(self) -> dict[str, ResolvedUser]:
        return {}

    def for_set(self, user: str | None) -> UserDirectory:
        """The users of a set of data.eval with this setting `user`."""
        return replace(self, user=replace(self.user, name=user)) if user else self

    def name_of(self, task: Task) -> str:
        """The name of the user of `task`: user.name, or the task's user, or one of `users` drawn by weight, or empty.

        A name with a trailing ? applies if it is one of `users`. The draw is seeded with run.seed and the task's id.
        """
        name = self.user.name or task.user
        requested = name.removesuffix("?")
        if name and (requested == name or requested in self.named):
            return requested
        weights = {name: _weight_of(name, entry) for name, entry in sorted(self.named.items())}
        if not any(weights.values()):
            return ""
        return random.Random(f"{self.seed}/{task.id}/user").choices(list(weights), list(weights.values()))[0]

    def find(self, name: str) -> ResolvedUser:
        """The users with that name. Raises ConfigError if there are none, or they do not take their options."""
        if name not in self._resolved:
            self._resolved[name] = self._named(name) if name in self.named else self._of_kind(name)
        return self._resolved[name]

    def fault(self, name: str) -> str | None:
        """Why no user with that name can be used, and how to fix it; None if it can."""
        try:
            user = self.find(name)
            reason = user.kind.unavailable(user.argument, user.settings)
            if user.settings.tools and not user.kind.calls_tools:
                kind = split_user(user.settings.name or "")[0] if user.group != "user" else split_user(name)[0]
                reason = f"{kind} calls no tools; set {user.group}.tools=[], or choose another user"
        except ConfigError as error:
            return str(error)
        return reason and f"user {name or DEFAULT}: {reason}"

    def _of_kind(self, name: str) -> ResolvedUser:
        kind, argument = split_user(name)
        user_class = find_user(kind, "user", self.named)
        options_of(user_class, self.user)
        return ResolvedUser(name, user_class, argument, self.user)

    def _named(self, name: str) -> ResolvedUser:
        group, settings = f"users.{name}", self.settings[f"users.{name}"]
        require(name not in USERS, f"{group}: is the name of a built-in user; choose another name")
        kind, argument = split_user(settings.name or "")
        user_class = find_user(kind, f"{group}.class")
        accepts = user_class.Options is not NoOptions or not settings.options
        require(accepts, f"{group}.options: {kind} has no options; remove them")
        options_of(user_class, settings, group)
        return ResolvedUser(name, user_class, argument, settings, group)


def find_user(kind: str, setting: str = "user", named: Iterable[str] = ()) -> type[User]:
    """The class of a kind of users: one of USERS, or package.module:Class. Raises ConfigError.

    `named`: further known names, for the hint in the error message.
    """
    user_class: type[User] = lookup(kind, setting, {**dict.fromkeys(named, ""), **USERS}, User)
    return user_class


def split_user(name: str) -> tuple[str, str]:
    """Kind and argument of a user's name; folders in `./folder/file.py:Class` are no argument."""
    kind, _, argument = (name or DEFAULT).partition("/")
    if kind in USERS or ":" not in name:
        return kind, argument
    module, _, class_and_argument = name.rpartition(":")
    class_name, _, argument = class_and_argument.partition("/")
    return f"{module}:{class_name}", argument


def options_of(kind: type[User], settings: UserConfig, group: str = "user") -> Any:
    """The options of users of a kind; user.options is ignored if the kind takes none."""
    options = settings.options if kind.Options is not NoOptions else {}
    return build(kind.Options, options, f"{group}.options.")


def _weight_of(name: str, settings: Mapping[str, Any]) -> float:
    """The weight of a named user in the draw for tasks without a user. Raises ConfigError."""
    weight = settings.get("weight", 1.0)
    fits = isinstance(weight, int | float) and not isinstance(weight, bool) and 0 <= weight < float("inf")
    require(fits, f"users.{name}.weight={weight}: must be a number of at least 0")
    return float(weight)


def _named_settings(name: str, settings: Mapping[str, Any], user: UserConfig) -> UserConfig:
    """All settings of a named user, with its class as `name`; `user`: the defaults. Raises ConfigError."""
    require(re.fullmatch(r"[\w-]+", name) is not None, f"users.{name}: name it with letters, digits, - and _")
    for setting in settings:
        known = ("class", "weight", *_SETTINGS)
        choices = f"there are {', '.join(known)}"
        require(setting in known, f"users.{name}.{setting}: no such setting{nearest(setting, known)}; {choices}")
    _weight_of(name, settings)
    values = {setting: getattr(user, setting) for setting in _SETTINGS if setting != "options"}
    overrides = {setting: value for setting, value in settings.items() if setting in _SETTINGS}
    return replace(build(UserConfig, {**values, **overrides}, f"users.{name}."), name=settings.get("class") or "llm")
