"""The nouns of the program: frozen records without any framework import.

A `Task` is played into a `Conversation`; the policy's generations in it are `Turn`s. The trained turn is played on
several times, each time to a `Future`. `Sample` and `Batch` are what the loss sees.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

import numpy as np

THOUGHT_BEGIN, THOUGHT_END = "<think>", "</think>"
_THOUGHT = re.compile(r"<think>.*?</think>\s*", re.DOTALL)


def visible(text: str) -> str:
    """`text` without thoughts, which a policy writes between `<think>` and `</think>` for itself alone.

    Templates may open the thought in the prompt, and a budget may cut it: all up to a `</think>` without its
    `<think>`, and all after a `<think>` without its `</think>`, is thought as well.
    """
    text = _THOUGHT.sub("", text)
    if "</think>" in text:
        text = text.rpartition("</think>")[2].lstrip()
    return text.partition("<think>")[0]


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool as the policy wrote it."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Message:
    """One message of a conversation: `role` is system, user, assistant or tool.

    `tool_calls`: of written messages; in what the policy samples, calls are a part of the content.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """As OpenAI's interface and chat templates take it."""
        row: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            functions = [{"name": call.name, "arguments": dict(call.arguments)} for call in self.tool_calls]
            row["tool_calls"] = [{"type": "function", "function": function} for function in functions]
        return row


@dataclass(frozen=True)
class Task:
    """What a user wants, and how the conversation about it begins.

    `messages` ends with a user message and is all that the policy sees; without one the user opens the conversation.
    `goal` is seen by the simulated user alone, `answer` by the metrics alone. `user` names who plays the user; NAME?
    counts where the configuration has that name. `played`: how many of the last messages the data do not have.
    """

    id: str
    messages: tuple[Message, ...]
    goal: str
    answer: str
    user: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    played: int = 0

    @property
    def unopened(self) -> bool:
        """Whether the user opens the conversation: there is no message but a system one."""
        return all(message.role == "system" for message in self.messages)

    @property
    def given(self) -> Task:
        """The task as the data have it."""
        return replace(self, messages=self.messages[: len(self.messages) - self.played], played=0)

    def under(self, prompt: str) -> Task:
        """The task with this system message in place of its own."""
        said = tuple(message for message in self.messages if message.role != "system")
        return replace(self, messages=(Message("system", prompt), *said))

    def play_on(self, *messages: Message) -> Task:
        """The task with further messages, which were played."""
        return replace(self, messages=(*self.messages, *messages), played=self.played + len(messages))


class Finish(StrEnum):
    """Why the engine stopped a turn."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True)
class Turn:
    """One generation of the policy, exactly as the engine sampled it.

    `log_probs[i]` is the natural log-probability of `token_ids[i]` under the sampling distribution (temperature folded
    in); `versions[i]` is the number of the weights that sampled it, which may change in the middle of a turn. `text`
    is the decoded reply without its end-of-turn token, thoughts included, with a `<think>` that the prompt has opened.
    `forced` is (start, stop) in `token_ids` of what closed a thought at the end of its budget: these tokens were not
    sampled, have a log-probability of 0 here, and are not trained.

    `routing` (rollout.routing_replay, of turns that are trained): the experts that the engine sent tokens to, unsigned
    integers [R, layers * experts of a token], of the R tokens before the last one of prompt and reply together.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: Finish
    text: str
    forced: tuple[int, int] = (0, 0)
    routing: np.ndarray | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name in ("log_probs", "versions"):
            if len(getattr(self, name)) != len(self.token_ids):
                raise ValueError(f"a turn of {len(self.token_ids)} tokens has {len(getattr(self, name))} {name}")

    @property
    def stream(self) -> tuple[int, ...]:
        """What it saw, and what it said."""
        return self.prompt_ids + self.token_ids

    def fault(self) -> str | None:
        """Why the turn cannot be shown to a user, or None."""
        depth = 0
        for mark in re.findall(r"</?think>", self.text):
            depth += 1 if mark == "<think>" else -1
            if depth not in (0, 1):
                return "nested <think>" if depth > 1 else "</think> without <think>"
        if depth:
            return "<think> without </think>"
        return None if visible(self.text).strip() else "an empty reply"


class Ending(StrEnum):
    """How a conversation ended."""

    USER_DONE = "user_done"
    TURN_LIMIT = "turn_limit"
    LENGTH = "length"
    MALFORMED = "malformed"
    DEADLINE = "deadline"
    ERROR = "error"


@dataclass(frozen=True)
class Conversation:
    """Messages, the policy's turns among them, and the token stream they were sampled from.

    `token_ids` is what the policy sees: every token so far, sampled ones as they were sampled; with
    rollout.strip_thoughts without the thoughts of earlier turns. No sampled token is ever rendered again.

    `messages` is what the others see: no thoughts. An assistant message that a tool message follows is a call of
    tools and no reply. `turn_rewards[i]` is what users and tools gave for `turns[i]`.
    """

    messages: tuple[Message, ...]
    token_ids: tuple[int, ...]
    turns: tuple[Turn, ...] = ()
    turn_rewards: tuple[float, ...] = ()
    ending: Ending | None = None
    error: str = ""

    @property
    def replies(self) -> tuple[str, ...]:
        """What the policy said to the user since the task's messages, in order; `replies[-1]` is its last word."""
        roles = [message.role for message in self.messages]
        mine = [at for at, role in enumerate(roles) if role == "assistant"]
        replies = [at for at in mine[len(mine) - len(self.turns) :] if roles[at + 1 : at + 2] != ["tool"]]
        return tuple(self.messages[at].content for at in replies)

    @property
    def said(self) -> int:
        """The messages of the user and the policy's replies to it, those of the task included."""
        roles = [message.role for message in self.messages]
        calls = sum(role == "assistant" and after == "tool" for role, after in pairwise(roles))
        return roles.count("user") + roles.count("assistant") - calls

    def add_turn(self, turn: Turn) -> Conversation:
        """Append the policy's turn; its prompt must be the stream so far."""
        if turn.prompt_ids != self.token_ids:
            raise ValueError("a turn was sampled from another prompt than this conversation's tokens")
        return replace(
            self,
            messages=(*self.messages, Message("assistant", visible(turn.text))),
            token_ids=self.token_ids + turn.token_ids,
            turns=(*self.turns, turn),
            turn_rewards=(*self.turn_rewards, 0.0),
        )

    def add_messages(self, messages: Sequence[Message], token_ids: tuple[int, ...]) -> Conversation:
        """Append what a user or tools say; `token_ids` closes the last turn, renders them and opens the next turn."""
        return self.begin_anew(messages, self.token_ids + token_ids)

    def begin_anew(self, messages: Sequence[Message], token_ids: tuple[int, ...]) -> Conversation:
        """Append what a user or tools say; `token_ids` is all that the next turn sees."""
        return replace(self, messages=(*self.messages, *messages), token_ids=token_ids)

    def add_reward(self, value: float, turn: int = -1) -> Conversation:
        """Add what a user or a tool gave for a turn, by its number in `turns`; negative ones count from the last."""
        if not -len(self.turns) <= turn < len(self.turns):
            raise ValueError(f"a reward for turn {turn}, but the conversation has {len(self.turns)} turns")
        if not math.isfinite(value):  # it would spread to every weight, without a word
            raise ValueError(f"a reward of {value} for turn {turn}; give a finite number")
        rewards = list(self.turn_rewards)
        rewards[turn] += value
        return replace(self, turn_rewards=tuple(rewards))

    def end(self, ending: Ending, error: str = "") -> Conversation:
        return replace(self, ending=ending, error=error)


@dataclass(frozen=True)
class Missing:
    """A missing score, and why. Never a number: an outage is not a 0."""

    why: str


class Failed(Missing):
    """Missing, since a function that a setting names has failed."""


Score = float | Missing


@dataclass(frozen=True)
class Future:
    """One way the conversation went on after the trained turn, with a score per metric."""

    conversation: Conversation
    scores: Mapping[str, Score]


@dataclass(frozen=True)
class Reward:
    """The reward of a trained turn, the standard error of the mean over its futures (0 where there is one future), the
    weighted contribution of each metric, and the number of missing scores."""

    value: Score
    standard_error: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    missing: int = 0


@dataclass(frozen=True)
class Rollout:
    """The trained turns of `start` and their reward. For a whole conversation the one future is `start` itself."""

    start: Conversation
    futures: tuple[Future, ...]
    reward: Reward

    @property
    def malformed(self) -> bool:
        """Whether a malformed turn has ended it, so that it has no scores; see reward.malformed."""
        return any(future.conversation.ending is Ending.MALFORMED for future in self.futures)


@dataclass(frozen=True)
class Group:
    """The rollouts of one task; their rewards are compared with each other."""

    task: Task
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True)
class Credit:
    """What some trained tokens of a sample, with (start, stop) in `spans`, are worth together.

    `value` is their return. Credits with the same `peers` are compared with each other (the baseline); those with the
    same `scale` share a measure of spread. Without spans it trains nothing and is only compared with.
    """

    spans: tuple[tuple[int, int], ...]
    value: float
    peers: str
    scale: str


@dataclass(frozen=True)
class Sample:
    """The trained turns of a conversation for the loss, with all that they saw: S tokens; arrays are [S].

    `token_ids` int64; `loss_mask` float32, 1 where the token is trained; `log_probs` float32, the engine's (0 where not
    trained); `credits`: none in sft; `version`: of the oldest weights which sampled a trained token (0 in sft);
    `later`: of turns after the trained one; `cuts`: where a further token sequence begins, in order, since later turns
    have not seen the thoughts of earlier ones. Sequences are apart in the model and together in all else: as one
    sample they are compared, averaged and drawn to a mini-batch. `routing` (rollout.routing_replay): the experts of
    each token, unsigned integers [S, layers * experts of a token], 0 for a sequence's last token, which is never read.
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray
    log_probs: np.ndarray
    credits: tuple[Credit, ...] = ()
    version: int = 0
    later: bool = False
    cuts: tuple[int, ...] = ()
    routing: np.ndarray | None = None


@dataclass(frozen=True)
class Batch:
    """The samples of one update, the same on every rank; `metrics` describe where they came from."""

    samples: tuple[Sample, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def loss_tokens(self) -> float:
        """Trained tokens of the whole batch: the denominator of the token mean."""
        return float(sum(sample.loss_mask.sum() for sample in self.samples))


@dataclass(frozen=True)
class Scored(Batch):
    """A batch with what the networks say of its tokens before any of it is learned: per sample float32 [S], 0 where
    untrained. `old_log_probs` are the policy's where they are needed apart from the loss's own forward pass,
    `reference_log_probs` the first policy's; `advantages` and the critic's `returns` are from algo.advantages."""

    old_log_probs: Sequence[np.ndarray] | None = None
    reference_log_probs: Sequence[np.ndarray] | None = None
    values: Sequence[np.ndarray] | None = None
    advantages: Sequence[np.ndarray] | None = None
    returns: Sequence[np.ndarray] | None = None
