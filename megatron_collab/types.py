"""The data types of the program: frozen records without any framework import.

A `Task` is played into a `Conversation`; the policy's generations in it are `Turn`s. The trained turn is continued
several times, each time to a `Future`. `Sample` and `Batch` are the inputs of the loss.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

import numpy as np

THOUGHT_BEGIN, THOUGHT_END = "<think>", "</think>"
_THOUGHT = re.compile(r"<think>.*?(?:</think>\s*|\Z)", re.DOTALL)  # an unmatched mark is looked at once


def visible(text: str) -> str:
    """`text` without thoughts, which a policy writes between `<think>` and `</think>` and only the policy sees.

    If the template opens the thought in the prompt, everything up to the unmatched `</think>` counts as thought. If a
    budget cuts the thought, everything after the unmatched `<think>` does.
    """
    text = _THOUGHT.sub("", text)
    if "</think>" in text:
        text = text.rpartition("</think>")[2].lstrip()
    return text.partition("<think>")[0]


class _Empty(Mapping[str, Any]):
    """A mapping without keys, as the default of a field.

    It stays on the class, unlike the result of a default factory, so that records which an earlier version pickled
    without the field have it too. Dataclasses take it since it can be hashed.
    """

    def __getitem__(self, key: str) -> Any:
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __hash__(self) -> int:
        return 0


EMPTY = _Empty()


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool as the policy wrote it."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Message:
    """One message of a conversation: `role` is system, user, assistant or tool.

    `tool_calls` is set in messages from the data; in messages that the policy samples, calls are part of the content.
    `trained` is False for a reply in data that supervised training shows, but does not learn. `private`: notes of the
    user who wrote the message, such as its thought, by name. They are only recorded: policy, tools, metrics and
    other users do not see them, and messages that differ only in them are equal.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    trained: bool = True
    private: Mapping[str, str] = field(default=EMPTY, repr=False, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """The message in the format of OpenAI's API and of chat templates."""
        row: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            functions = [{"name": call.name, "arguments": dict(call.arguments)} for call in self.tool_calls]
            row["tool_calls"] = [{"type": "function", "function": function} for function in functions]
        return row


def without_private(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages without the private notes of users."""
    return tuple(replace(message, private=EMPTY) if message.private else message for message in messages)


@dataclass(frozen=True)
class Task:
    """What a user wants, and how the conversation about it begins.

    `messages` ends with a user message and is all that the policy sees; if it has none, the user opens the
    conversation. Only the simulated user sees `goal`, only the metrics see `answer`. `user` names the simulated user;
    NAME? applies if the configuration has that name. `played`: how many of the last messages are not from the data.
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
        """Whether the user opens the conversation, since the task has no messages except system messages."""
        return all(message.role == "system" for message in self.messages)

    @property
    def original(self) -> Task:
        """The task as the data have it, without the messages that were played."""
        return replace(self, messages=self.messages[: len(self.messages) - self.played], played=0)

    def with_system_prompt(self, prompt: str) -> Task:
        """The task with its system message replaced by `prompt`."""
        messages = tuple(message for message in self.messages if message.role != "system")
        return replace(self, messages=(Message("system", prompt), *messages))

    def play_on(self, *messages: Message) -> Task:
        """The task with played messages appended."""
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
    in); `versions[i]` is the version of the weights that sampled it, which may change in the middle of a turn. `text`
    is the decoded reply without its end-of-turn token; it includes thoughts, and the `<think>` if the prompt opened it.
    `forced` is the span (start, stop) in `token_ids` that closed a thought at the end of its budget: these tokens were
    not sampled, have a log-probability of 0 here, and are not trained.

    `routing` (only of trained turns, if rollout.routing_replay): the experts that the engine routed tokens to, unsigned
    integers [R, layers * experts of a token], for the R tokens before the last one of prompt and reply together.
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
    def trained_tokens(self) -> int:
        """Number of sampled tokens: all but the forced ones."""
        return len(self.token_ids) - (self.forced[1] - self.forced[0])

    @property
    def stream(self) -> tuple[int, ...]:
        """The tokens of the prompt and of the reply."""
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


PausedTurn = tuple[int, Turn]  # a turn of a conversation that is paused, with its seed; Finish.ABORT: not at its end


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
    """Messages, including the policy's turns, and the token stream from which these were sampled.

    `token_ids` is what the policy sees: every token so far, sampled tokens unchanged; if rollout.strip_thoughts, it
    lacks the thoughts of earlier turns. Sampled tokens are never rendered again.

    `messages` is what users, tools and metrics see: no thoughts. An assistant message followed by a tool message is a
    tool call, not a reply. `turn_rewards[i]` is the sum of the rewards that users and tools gave for `turns[i]`.

    `answer_log_probs`: by the text before the answer, as metrics ask for it (Metric.answer_lead), for each turn the
    policy's mean log-prob of a token of the task's answer as the reply to the turn's prompt.
    """

    messages: tuple[Message, ...]
    token_ids: tuple[int, ...]
    turns: tuple[Turn, ...] = ()
    turn_rewards: tuple[float, ...] = ()
    ending: Ending | None = None
    error: str = ""
    answer_log_probs: Mapping[str, tuple[float, ...] | Missing] = field(default=EMPTY, repr=False, compare=False)

    @property
    def replies(self) -> tuple[str, ...]:
        """The policy's replies to the user after the task's messages, in order; tool calls are no replies."""
        return tuple(self.messages[at].content for at in self.turn_positions if not self.is_tool_call(at))

    @property
    def turn_positions(self) -> tuple[int, ...]:
        """The place in `messages` of each turn's message."""
        positions = [at for at, message in enumerate(self.messages) if message.role == "assistant"]
        return tuple(positions[len(positions) - len(self.turns) :])

    def is_tool_call(self, position: int) -> bool:
        """Whether the message at this place, of a turn, is followed by a tool's answer."""
        return [message.role for message in self.messages[position + 1 : position + 2]] == ["tool"]

    @property
    def message_count(self) -> int:
        """Number of messages of the user and of replies to the user, including those of the task."""
        roles = [message.role for message in self.messages]
        calls = sum(role == "assistant" and after == "tool" for role, after in pairwise(roles))
        return roles.count("user") + roles.count("assistant") - calls

    def add_turn(self, turn: Turn) -> Conversation:
        """Append the policy's turn. Raises ValueError if its prompt is not the token stream so far."""
        if turn.prompt_ids != self.token_ids:
            raise ValueError("the turn's prompt differs from this conversation's tokens")
        return replace(
            self,
            messages=(*self.messages, Message("assistant", visible(turn.text))),
            token_ids=self.token_ids + turn.token_ids,
            turns=(*self.turns, turn),
            turn_rewards=(*self.turn_rewards, 0.0),
        )

    def add_messages(self, messages: Sequence[Message], token_ids: tuple[int, ...]) -> Conversation:
        """Append messages of a user or tools; `token_ids` closes the last turn, renders them and opens the next."""
        return self.begin_anew(messages, self.token_ids + token_ids)

    def begin_anew(self, messages: Sequence[Message], token_ids: tuple[int, ...]) -> Conversation:
        """Append messages of a user or tools; `token_ids` replaces the token stream, as the next turn's prompt."""
        return replace(self, messages=(*self.messages, *messages), token_ids=token_ids)

    def add_reward(self, value: float, turn: int = -1) -> Conversation:
        """Add a reward for a turn, by its index in `turns`; negative indexes count from the last.

        Raises ValueError if there is no such turn, or the reward is not finite.
        """
        if not -len(self.turns) <= turn < len(self.turns):
            raise ValueError(f"a reward for turn {turn}, but the conversation has {len(self.turns)} turns")
        if not math.isfinite(value):  # it would silently spread to every weight
            raise ValueError(f"a reward of {value} for turn {turn}; give a finite number")
        rewards = list(self.turn_rewards)
        rewards[turn] += value
        return replace(self, turn_rewards=tuple(rewards))

    def end(self, ending: Ending, error: str = "") -> Conversation:
        return replace(self, ending=ending, error=error)


@dataclass(frozen=True)
class Missing:
    """A missing score and the reason. It is never a number: an outage must not count as 0."""

    why: str


class Failed(Missing):
    """A score that is missing because a function that a setting names failed."""


Score = float | Missing


@dataclass(frozen=True)
class Judgment:
    """Why a metric gave its score: the `reason` in words, and the judge's `answer` as it wrote it.

    Any may be empty. If a score is missing because the judge's answer was unusable, `answer` still has it. `versions`:
    of the judge's model that answered, as its provider names them.
    """

    reason: str = ""
    answer: str = ""
    versions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Future:
    """One continuation of the conversation after the trained turn, with a score per metric.

    `judgments`: by metric, for metrics with a judge or a reason. `turn_scores`: by metric, for metrics that score
    turns, a number for each of the conversation's turns, whose sum is the score.
    """

    conversation: Conversation
    scores: Mapping[str, Score]
    judgments: Mapping[str, Judgment] = EMPTY
    turn_scores: Mapping[str, tuple[float, ...]] = EMPTY


@dataclass(frozen=True)
class Reward:
    """The reward of a trained turn, the standard error of the mean over its futures (0 if there is one future), the
    weighted contribution of each metric, and the number of missing scores."""

    value: Score
    standard_error: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    missing: int = 0


@dataclass(frozen=True)
class Rollout:
    """The trained turns of `start` and their reward. If whole conversations are trained, the only future is `start`."""

    start: Conversation
    futures: tuple[Future, ...]
    reward: Reward

    @property
    def malformed(self) -> bool:
        """Whether a malformed turn ended a future, which then has no scores; see reward.malformed."""
        return any(future.conversation.ending is Ending.MALFORMED for future in self.futures)

    @property
    def failures(self) -> list[str]:
        """Why scores are missing: a failed reward, conversations that ended with an error, scores that are missing."""
        reasons = [self.reward.value.why] if isinstance(self.reward.value, Failed) else []
        for future in self.futures:
            if future.conversation.ending is Ending.ERROR:
                reasons.append(future.conversation.error)
            else:
                reasons += dict.fromkeys(score.why for score in future.scores.values() if isinstance(score, Missing))
        return reasons


@dataclass(frozen=True)
class Group:
    """The rollouts of one task; their rewards are compared with each other. `user`: name of the task's user."""

    task: Task
    rollouts: tuple[Rollout, ...]
    user: str = ""


@dataclass(frozen=True)
class Credit:
    """The return of some trained tokens of a sample, those in the (start, stop) ranges of `spans`.

    `value` is their return. Credits with the same `peers` share a baseline; credits with the same `scale` share a
    standard deviation. A credit without spans trains no tokens and only contributes to the baseline. `weights`: factor
    of the advantage in each span; empty: 1 in all. The advantages of credits with common tokens are added.
    """

    spans: tuple[tuple[int, int], ...]
    value: float
    peers: str
    scale: str
    weights: tuple[float, ...] = ()


@dataclass(frozen=True)
class Sample:
    """The trained turns of a conversation for the loss, with their prompts: S tokens; arrays are [S].

    `token_ids` int64; `loss_mask` float32, 1 if the token is trained; `log_probs` float32, the engine's (0 if not
    trained); `credits`: empty in sft; `version`: the oldest weights that sampled a trained token (0 in sft); `later`:
    whether the sample has the turns after the trained one; `cuts`: start positions of further token sequences, in
    order, which exist if later turns do not see the thoughts of earlier ones. The model processes the sequences
    separately; baselines, means and mini-batches treat them as one sample. `routing` (if rollout.routing_replay): the
    experts of each token, unsigned integers [S, layers * experts of a token]; 0 for a sequence's last token, which is
    never read. `origin`: the number of the group in the step and of the rollout in it that has the trained turns, of
    later turns also that of the future; None in supervised stages. `turns`: which of the rollout's turns are trained;
    empty: all of them.
    `teacher_view` (if algo.teacher.context): the same trained tokens behind the prompts that the teacher reads.
    `teacher_log_probs` (if algo.teacher.server): the teacher's, as `log_probs`.
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray
    log_probs: np.ndarray
    credits: tuple[Credit, ...] = ()
    version: int = 0
    later: bool = False
    cuts: tuple[int, ...] = ()
    routing: np.ndarray | None = None
    origin: tuple[int, ...] | None = None
    turns: tuple[int, ...] = ()
    teacher_view: Sample | None = None
    teacher_log_probs: np.ndarray | None = None


@dataclass(frozen=True)
class Batch:
    """The samples of one update, the same on every rank; `metrics` describe the rollouts they came from."""

    samples: tuple[Sample, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def loss_tokens(self) -> float:
        """Trained tokens of the whole batch: the denominator of the token mean."""
        return float(sum(sample.loss_mask.sum() for sample in self.samples))


@dataclass(frozen=True)
class ScoredBatch(Batch):
    """A batch with the networks' outputs for its tokens before the update: per sample float32 [S], 0 if untrained.

    `old_log_probs` are the policy's, if the algorithm needs them besides the loss's own forward pass;
    `reference_log_probs` the first policy's; `teacher_log_probs` the teacher's, if algo.teacher.kl=sampled;
    `advantages` and the critic's `returns` are from algo.advantages.
    """

    old_log_probs: Sequence[np.ndarray] | None = None
    reference_log_probs: Sequence[np.ndarray] | None = None
    values: Sequence[np.ndarray] | None = None
    advantages: Sequence[np.ndarray] | None = None
    returns: Sequence[np.ndarray] | None = None
    teacher_log_probs: Sequence[np.ndarray] | None = None
