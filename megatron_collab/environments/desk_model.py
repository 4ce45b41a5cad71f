"""The desk world as probabilities: slots, costs, kinds of users, their answers, and the chance that a guess is right.

A request needs some slots. Those that the user has not stated are unknown; a slot is guessable, if its likeliest value
is nearly certain, or open. The text of the world (desk.py) draws from these chances; desk_optimum.py sums over them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

ALL, FIRST, VAGUE, CHANGES, WRONG, LEAVES = USERS = ("all", "first", "vague", "changes", "wrong", "leaves")


@dataclass(frozen=True, kw_only=True)
class DeskModel:
    """The numbers of the world. Raises ValueError if chances cannot be those of likeliest values.

    A slot has `values` values; the likeliest has its chance, the others share the remainder equally. The policy may
    ask in `turns` messages. `costs`: of a question; at the last one asking never pays, since it exceeds what a question
    can add. The chances at the end are those of the kinds of users, explained in `replies`.
    """

    guessable: tuple[str, ...] = ("region", "language", "device", "plan")
    open: tuple[str, ...] = ("item", "date", "amount", "version")
    values: int = 4
    guessable_chance: float = 0.95
    open_chance: float = 0.25
    costs: tuple[float, ...] = (0.10, 0.20, 0.80)
    turns: int = 4
    unseen_users: tuple[str, ...] = (VAGUE, WRONG)
    answers: float = 0.5
    changes: float = 0.3
    wrong: float = 0.2
    leaves_by_question: float = 0.12
    leaves_by_turn: float = 0.08
    leaves_most: float = 0.9

    def __post_init__(self) -> None:
        if self.values < 3 or not 1 / self.values <= self.guessable_chance <= 1:
            raise ValueError(f"guessable_chance={self.guessable_chance}: give 1/values to 1, and at least 3 values")
        if not 1 / self.values <= self.open_chance <= 0.5:
            raise ValueError(f"open_chance={self.open_chance}: give 1/values to 0.5, as wrong answers are drawn")

    @property
    def slots(self) -> tuple[str, ...]:
        """All slots; the open ones first, as the policy of the supervised data asks for them."""
        return self.open + self.guessable

    @property
    def seen_users(self) -> tuple[str, ...]:
        """The kinds of users in the training data."""
        return tuple(user for user in USERS if user not in self.unseen_users)

    def prior(self, slot: str) -> list[float]:
        """The chances of the slot's values, [values]; the first is the likeliest."""
        likeliest = self.guessable_chance if slot in self.guessable else self.open_chance
        return [likeliest, *[(1 - likeliest) / (self.values - 1)] * (self.values - 1)]

    def stated(self, needed: int) -> list[float]:
        """The chances that a wrong user states each value of an open slot, if it needs the value `needed`, [values].

        The joint distribution of needed and stated values is symmetric, with `prior` on both sides: no statement tells
        how likely it is to be wrong, and the same row gives the chance of each needed value after a statement.
        """
        likeliest, other = self.open_chance, (1 - self.open_chance) / (self.values - 1)
        with_likeliest = likeliest / (self.values - 1)  # joint chances of two different values, given that it is wrong
        with_others = (other - with_likeliest) / (self.values - 2)
        joint = [with_likeliest if 0 in (needed, value) else with_others for value in range(self.values)]
        row = [self.wrong * chance / self.prior(self.open[0])[needed] for chance in joint]
        row[needed] = 1 - self.wrong
        return row

    def leaving(self, questions: int, turn: int) -> float:
        """The chance that a user of kind `leaves` does so at a message of `questions`, after `turn` that asked."""
        return min(self.leaves_most, self.leaves_by_question * questions + self.leaves_by_turn * turn)


class DeskState(NamedTuple):
    """Numbers of unknown slots, of messages that have asked, and of slots that the user stated in an answer."""

    guessable: int
    open: int
    turn: int = 0
    answered_guessable: int = 0
    answered_open: int = 0


class Questions(NamedTuple):
    """How many unknown slots of each sort a message asks for; the open ones stand first."""

    guessable: int
    open: int


class DeskReply(NamedTuple):
    """What a user's answer shows: numbers of slots stated and taken back, and whether the user left.

    `first_only`: the slot asked for first is the only one stated, which distinguishes kinds of users.
    """

    guessable: int = 0
    open: int = 0
    first_only: bool = False
    back_guessable: int = 0
    back_open: int = 0
    left_desk: bool = False


def replies(model: DeskModel, user: str, state: DeskState, questions: Questions) -> list[tuple[float, DeskReply]]:
    """The answers of a kind of user with their chances, which sum to 1.

    all: states everything. first: only what the first question asks for. vague: each slot with the chance `answers`.
    changes: everything, but with the chance `changes` it takes back a slot answered before, whose value is drawn anew.
    wrong: everything, each open slot with the chance `wrong` as another value. leaves: everything, or it leaves.
    """
    everything = _reply(questions, [True] * sum(questions))
    if user == FIRST:
        return [(1.0, _reply(questions, [i == 0 for i in range(sum(questions))]))]
    if user == VAGUE:
        rates: dict[DeskReply, float] = {}
        for pattern in product((True, False), repeat=sum(questions)):
            rate = math.prod(model.answers if answered else 1 - model.answers for answered in pattern)
            reply = _reply(questions, pattern)
            rates[reply] = rates.get(reply, 0.0) + rate
        return [(rate, reply) for reply, rate in rates.items()]
    if user == CHANGES and (earlier := state.answered_guessable + state.answered_open):
        back_guessable = model.changes * state.answered_guessable / earlier
        back_open = model.changes * state.answered_open / earlier
        return [
            (1 - model.changes, everything),
            (back_guessable, everything._replace(back_guessable=1)),
            (back_open, everything._replace(back_open=1)),
        ]
    if user == LEAVES:
        leaving = model.leaving(sum(questions), state.turn)
        return [(1 - leaving, everything), (leaving, DeskReply(left_desk=True))]
    return [(1.0, everything)]


def _reply(questions: Questions, answered: Sequence[bool]) -> DeskReply:
    """The reply that states the slots that are `answered`, in the order of the questions."""
    stated_open, total = sum(answered[: questions.open]), sum(answered)
    return DeskReply(total - stated_open, stated_open, first_only=total == 1 and answered[0])


def after(state: DeskState, reply: DeskReply) -> DeskState:
    """The state after a reply of a user who stays."""
    guessable, open_ = reply.guessable - reply.back_guessable, reply.open - reply.back_open
    return DeskState(
        state.guessable - guessable,
        state.open - open_,
        state.turn + 1,
        state.answered_guessable + guessable,
        state.answered_open + open_,
    )


def chance_right(model: DeskModel, user: str, state: DeskState) -> float:
    """The chance that the best guess is right: of unknown slots that of the likeliest value, of wrong users less."""
    chance = model.guessable_chance**state.guessable * model.open_chance**state.open
    return chance * (1 - model.wrong) ** state.answered_open if user == WRONG else chance
