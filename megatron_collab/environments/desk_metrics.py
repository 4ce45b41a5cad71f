"""Metrics of the desk world; they do not apply to tasks of other worlds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_collab.environments import desk_language as language
from megatron_collab.environments.desk import USER
from megatron_collab.environments.desk_language import MODEL
from megatron_collab.environments.desk_user import DeskGoal, chance_right, read_goal, unknown
from megatron_collab.reward.metrics import Metric
from megatron_collab.settings import option
from megatron_collab.types import Conversation, Score, Task


def right_of(goal: DeskGoal, conversation: Conversation) -> float:
    """The chance that the guess in the policy's last message is right: a draw would only add noise."""
    return chance_right(goal, conversation.messages, language.guess(conversation.replies[-1]))


def questions_of(conversation: Conversation) -> int:
    """How many questions the policy asked; a slot counts as often as it is asked for."""
    return sum(len(language.slots_asked(reply)) for reply in conversation.replies)


class DeskMetric(Metric):
    """Base class: `measure` gets the goal, the task and the conversation."""

    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        if self.lacks(self.options, task):
            return None
        return self.measure(read_goal(task.goal), task, conversation)

    @classmethod
    def lacks(cls, options: Any, task: Task) -> str | None:
        return None if task.user == USER else "the user of the desk world"

    @classmethod
    def check_task(cls, options: Any, task: Task) -> None:
        if task.user == USER:
            read_goal(task.goal)

    def measure(self, goal: DeskGoal, task: Task, conversation: Conversation) -> float | None:
        raise NotImplementedError


class DeskRight(DeskMetric):
    """The chance that the guess is right."""

    ground_truth = True

    def measure(self, goal: DeskGoal, task: Task, conversation: Conversation) -> float:
        return right_of(goal, conversation)


class DeskQuestions(DeskMetric):
    """How many questions the policy asked."""

    def measure(self, goal: DeskGoal, task: Task, conversation: Conversation) -> float:
        return float(questions_of(conversation))


class DeskNeedless(DeskMetric):
    """How many questions were for slots that the request does not need, or that the user had stated."""

    def measure(self, goal: DeskGoal, task: Task, conversation: Conversation) -> float:
        needless = 0
        for i, message in enumerate(conversation.messages):
            if i >= len(task.messages) and message.role == "assistant":
                useful = unknown(goal, conversation.messages[:i])
                slots = language.slots_asked(message.content)
                needless += len(slots) - len(set(slots) & set(useful))
        return float(needless)


@dataclass(frozen=True)
class DeskUtilityOptions:
    """Options of `DeskUtility`."""

    cost: float = option(
        MODEL.costs[0], "cost of a question, of the reward 1 for a right guess, unless the task states its own", ge=0
    )


class DeskUtility(DeskMetric):
    """What desk_optimum.py predicts: the chance of being right, less the cost of the questions."""

    Options: ClassVar[type] = DeskUtilityOptions

    def measure(self, goal: DeskGoal, task: Task, conversation: Conversation) -> float:
        cost = self.options.cost if goal.cost is None else goal.cost
        return right_of(goal, conversation) - cost * questions_of(conversation)


class DeskUtilityIncomplete(DeskUtility):
    """`DeskUtility` of the tasks whose messages leave something unknown."""

    @classmethod
    def lacks(cls, options: Any, task: Task) -> str | None:
        lacking = super().lacks(options, task)
        complete = not lacking and not unknown(read_goal(task.goal), task.messages)
        return "a slot that is left unknown" if complete else lacking


class DeskAsks(DeskMetric):
    """1 if the trained turn asks for anything unknown: a bonus for asking, for a reward of the turn alone."""

    def measure(self, goal: DeskGoal, task: Task, conversation: Conversation) -> float:
        return float(not set(unknown(goal, task.messages)).isdisjoint(language.slots_asked(conversation.replies[0])))


class DeskAsksOpen(DeskMetric):
    """Share of the unknown open slots that the trained turn asks for, over the tasks that have any."""

    slots: ClassVar[Sequence[str]] = MODEL.open

    def measure(self, goal: DeskGoal, task: Task, conversation: Conversation) -> float | None:
        useful = {slot for slot in unknown(goal, task.messages) if slot in self.slots}
        slots = language.slots_asked(conversation.replies[0])
        return len(useful & set(slots)) / len(useful) if useful else None


class DeskAsksGuessable(DeskAsksOpen):
    """Share of the unknown guessable slots that the trained turn asks for, over the tasks that have any."""

    slots: ClassVar[Sequence[str]] = MODEL.guessable


class DeskNewFacts(DeskMetric):
    """For each turn how many needed slots were unknown before it, and are told in the user's next message."""

    score = Metric.score

    async def score_turns(self, task: Task, conversation: Conversation) -> Sequence[float] | None:
        if self.lacks(self.options, task):
            return None
        goal, messages = read_goal(task.goal), conversation.messages
        counts = [
            (len(unknown(goal, messages[:position])), len(unknown(goal, messages[: position + 2])))
            for position in conversation.turn_positions
        ]
        return [float(before - after) for before, after in counts]
