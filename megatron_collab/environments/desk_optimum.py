"""Utilities that policies reach in the desk world, by dynamic programming; nothing is sampled.

`python -m megatron_collab.environments.desk` prints the tables. A policy knows the state and its belief about the kind
of user; the belief begins uniform over the kinds in the training data.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_collab.environments.desk_model import (
    USERS,
    DeskModel,
    DeskReply,
    DeskState,
    Questions,
    after,
    chance_right,
    replies,
)

Belief = tuple[float, ...]  # chances of USERS, in that order
Action = Questions | None  # None: answers with the best guess
DeskPolicy = Callable[[DeskState, Belief], Mapping[Action, float]]  # the chances of its actions
Starts = Mapping[DeskState, float]  # the weights of first messages, by what they leave unknown
THRESHOLDS = tuple(i / 20 for i in range(21))
OPTIMAL, OPEN_BONUS, MYOPIC, ALWAYS, NOW = POLICIES = (
    "optimal", "single turn, bonus for open slots", "single turn, best bonus", "always asks", "answers now"
)  # fmt: skip
DIGITS = 9  # of a belief that is looked up


@dataclass(frozen=True)
class DeskValue:
    """Expected values of a conversation: the chance that its guess is right, and its number of questions."""

    right: float
    questions: float

    def utility(self, cost: float) -> float:
        return self.right - cost * self.questions


def mean(values: Iterable[tuple[float, DeskValue]]) -> DeskValue:
    """The mean of values by their weights, which need not sum to 1."""
    pairs = list(values)
    total = sum(weight for weight, _ in pairs)
    right = sum(weight * value.right for weight, value in pairs) / total
    return DeskValue(right, sum(weight * value.questions for weight, value in pairs) / total)


class DeskGame:
    """The world at a cost of a question, for policies that believe in the kinds `users`, equally likely at first."""

    def __init__(self, model: DeskModel, cost: float, users: Sequence[str]) -> None:
        self.model, self.cost = model, cost
        self.prior: Belief = tuple((user in users) / len(users) for user in USERS)
        self._likelihoods: dict[tuple[DeskState, Questions], dict[DeskReply, Belief]] = {}
        self._best: dict[tuple[DeskState, Belief], tuple[float, Action]] = {}

    def right(self, state: DeskState, belief: Belief) -> float:
        """The expected chance that the best guess is right."""
        return sum(b * chance_right(self.model, user, state) for user, b in zip(USERS, belief, strict=True) if b)

    def actions(self, state: DeskState) -> list[Questions]:
        """The messages that ask for unknown slots.

        Any other question costs and shows nothing, but for one that is left out: a user who changes its mind does not
        take back what it is asked again.
        """
        if state.turn >= self.model.turns:
            return []
        numbers = (Questions(i, j) for i in range(state.guessable + 1) for j in range(state.open + 1))
        return [questions for questions in numbers if sum(questions)]

    def likelihoods(self, state: DeskState, questions: Questions) -> dict[DeskReply, Belief]:
        """The chance of each reply for each of USERS."""
        key = state, questions
        if key not in self._likelihoods:
            rows: dict[DeskReply, list[float]] = defaultdict(lambda: [0.0] * len(USERS))
            for i, user in enumerate(USERS):
                for chance, reply in replies(self.model, user, state, questions):
                    rows[reply][i] += chance
            self._likelihoods[key] = {reply: tuple(row) for reply, row in rows.items() if any(row)}
        return self._likelihoods[key]

    @staticmethod
    def update(belief: Belief, likelihood: Belief) -> tuple[float, Belief]:
        """The chance of a reply and the belief after it; a reply that the belief excludes leaves it as it is."""
        joint = [b * chance for b, chance in zip(belief, likelihood, strict=True)]
        total = sum(joint)
        return total, tuple(round(value / total, DIGITS) for value in joint) if total > 0 else belief

    def best(self, state: DeskState, belief: Belief) -> tuple[float, Action]:
        """The optimal utility from here, without the cost of earlier questions, and the action that reaches it."""
        key = state, belief
        if key not in self._best:
            utility, action = self.right(state, belief), None
            for questions in self.actions(state):
                value = -self.cost * sum(questions)
                for reply, likelihood in self.likelihoods(state, questions).items():
                    chance, belief_after = self.update(belief, likelihood)
                    if chance > 0 and not reply.left_desk:
                        value += chance * self.best(after(state, reply), belief_after)[0]
                if value > utility + 1e-12:
                    utility, action = value, questions
            self._best[key] = utility, action
        return self._best[key]

    def optimal(self, state: DeskState, belief: Belief) -> Mapping[Action, float]:
        """The optimal policy."""
        return {self.best(state, belief)[1]: 1.0}

    def asks(self, threshold: float, everything: bool, only_open: bool = False) -> DeskPolicy:
        """Asks while the chance of being right is below `threshold`: for all unknown slots, or for one at random.

        These are the best replies for a reward of the turn alone: the chance of being right plus a bonus for asking. If
        each question gets the bonus, they ask for all slots; if each message that asks does, less the cost of its
        questions, for one. `only_open`: the bonus is paid for open slots alone, so the policy asks for no other.
        """

        def policy(state: DeskState, belief: Belief) -> Mapping[Action, float]:
            useful = Questions(0 if only_open else state.guessable, state.open)
            if not self.actions(state) or not sum(useful) or self.right(state, belief) >= threshold:
                return {None: 1.0}
            if everything:
                return {useful: 1.0}
            guessable, opened = (number / sum(useful) for number in useful)
            return {Questions(1, 0): guessable, Questions(0, 1): opened}

        return policy

    def value(self, policy: DeskPolicy, starts: Starts, user: str) -> DeskValue:
        """What the policy reaches with users of one kind, which it need not have seen."""
        truth = USERS.index(user)
        values: dict[tuple[DeskState, Belief], DeskValue] = {}

        def play(state: DeskState, belief: Belief) -> DeskValue:
            if (state, belief) in values:
                return values[state, belief]
            right = asked_for = 0.0
            for action, share in policy(state, belief).items():
                if share == 0:
                    continue
                if action is None:
                    right += share * chance_right(self.model, user, state)
                    continue
                asked_for += share * sum(action)
                for reply, likelihood in self.likelihoods(state, action).items():
                    if likelihood[truth] > 0 and not reply.left_desk:
                        later = play(after(state, reply), self.update(belief, likelihood)[1])
                        right += share * likelihood[truth] * later.right
                        asked_for += share * likelihood[truth] * later.questions
            values[state, belief] = DeskValue(right, asked_for)
            return values[state, belief]

        return mean((weight, play(start, self.prior)) for start, weight in starts.items())


@dataclass(frozen=True)
class DeskPredictions:
    """Values of POLICIES at a cost; `starts` and `users`: those of the training data, on which the bonus is tuned."""

    model: DeskModel
    cost: float
    starts: Starts
    users: tuple[str, ...]

    @cached_property
    def game(self) -> DeskGame:
        return DeskGame(self.model, self.cost, self.users)

    @cached_property
    def policies(self) -> dict[str, DeskPolicy]:
        """The policies by name. Kind and size of the bonus for asking are tuned."""
        return {
            OPTIMAL: self.game.optimal,
            OPEN_BONUS: self._best_bonus(only_open=True),
            MYOPIC: self._best_bonus(only_open=False),
            ALWAYS: self.game.asks(2.0, everything=True),  # more than any chance
            NOW: self.game.asks(0.0, everything=True),
        }

    def _best_bonus(self, only_open: bool) -> DeskPolicy:
        candidates = [
            self.game.asks(bonus, everything, only_open) for bonus in THRESHOLDS for everything in (True, False)
        ]
        return max(candidates, key=lambda policy: self._mean(policy, self.users, self.starts).utility(self.cost))

    def value(self, name: str, users: Sequence[str], starts: Starts) -> DeskValue:
        """Mean value of a policy with these kinds of users and first messages, which training need not show."""
        return self._mean(self.policies[name], users, starts)

    def utility(self, name: str, users: Sequence[str], starts: Starts) -> float:
        return self.value(name, users, starts).utility(self.cost)

    def _mean(self, policy: DeskPolicy, users: Sequence[str], starts: Starts) -> DeskValue:
        return mean((1.0, self.game.value(policy, starts, user)) for user in users)
