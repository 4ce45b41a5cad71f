"""Metrics of the booking world; they do not apply to tasks of other worlds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from megatron_collab.environments import booking
from megatron_collab.reward.metrics import Metric
from megatron_collab.types import Conversation, Score, Task


class BookingMetric(Metric):
    """Base class: `measure` gets the policy's replies and the slots that the task's messages leave open."""

    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        if self.lacks(self.options, task):
            return None
        return self.measure(conversation.replies, booking.missing(task), task)

    @classmethod
    def lacks(cls, options: Any, task: Task) -> str | None:
        return None if task.user == booking.USER else "the user of the booking world"

    def measure(self, replies: Sequence[str], missing: frozenset[str], task: Task) -> float | None:
        raise NotImplementedError


class BookingRight(BookingMetric):
    """Whether the policy's last message is the right booking, word for word."""

    ground_truth = True

    def measure(self, replies: Sequence[str], missing: frozenset[str], task: Task) -> float:
        return float(replies[-1].strip() == task.answer)


class WhenMissing(BookingMetric):
    """Base class of metrics over the tasks whose messages leave something open."""

    @classmethod
    def lacks(cls, options: Any, task: Task) -> str | None:
        return super().lacks(options, task) or (None if booking.missing(task) else "a slot that is left open")


class RightWhenMissing(WhenMissing, BookingRight):
    """`BookingRight` over the tasks whose messages leave something open."""


class AskWhenMissing(WhenMissing):
    """Whether the trained turn asks, over the tasks whose messages leave something open."""

    def measure(self, replies: Sequence[str], missing: frozenset[str], task: Task) -> float:
        return float(bool(booking.slots_asked(replies[0])))


class AskWhenComplete(BookingMetric):
    """Whether the trained turn asks, over the tasks whose messages say everything."""

    def measure(self, replies: Sequence[str], missing: frozenset[str], task: Task) -> float:
        return float(bool(booking.slots_asked(replies[0])))

    @classmethod
    def lacks(cls, options: Any, task: Task) -> str | None:
        return super().lacks(options, task) or ("a message that says everything" if booking.missing(task) else None)


class MissingQuestions(BookingMetric):
    """How many slots the policy neither knew nor asked for before it booked."""

    def measure(self, replies: Sequence[str], missing: frozenset[str], task: Task) -> float:
        before = takewhile(lambda reply: not booking.is_final(reply), replies)
        return float(len(missing.difference(*map(booking.slots_asked, before))))


class NeedlessQuestions(BookingMetric):
    """How many slots the policy asked for although it knew them."""

    def measure(self, replies: Sequence[str], missing: frozenset[str], task: Task) -> float:
        unknown, needless = set(missing), 0
        for reply in replies:
            slots = booking.slots_asked(reply)
            needless += len(slots - unknown)
            unknown -= slots
        return float(needless)


class RightOnceTold(WhenMissing):
    """Quality of the later turns: whether the last message is the right booking, over the conversations whose first
    reply asks for exactly what is missing."""

    def measure(self, replies: Sequence[str], missing: frozenset[str], task: Task) -> float | None:
        asks_all = booking.slots_asked(replies[0]) == missing
        return float(replies[-1].strip() == task.answer) if asks_all else None


class BookingNewFacts(BookingMetric):
    """For each turn how many open slots it asked for, which the user's next message then tells."""

    score = Metric.score

    async def score_turns(self, task: Task, conversation: Conversation) -> Sequence[float] | None:
        if self.lacks(self.options, task):
            return None
        unknown, counts = set(booking.missing(task)), list[float]()
        for position in conversation.turn_positions:
            answered = position + 1 < len(conversation.messages)
            slots = booking.slots_asked(conversation.messages[position].content) & unknown if answered else set()
            counts.append(float(len(slots)))
            unknown -= slots
        return counts
