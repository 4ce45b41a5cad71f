"""The policy of the desk's supervised conversations: its replies in text, their chances and their exact values.

The policy depends on the state alone, so no belief is tracked. A window limits the user turns after a reply, as
rollout.max_user_turns does: if a conversation ends with a question, the question is paid for and no guess is scored.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import comb

from megatron_collab.environments import desk_language as language
from megatron_collab.environments.desk_language import MODEL
from megatron_collab.environments.desk_model import WRONG, DeskModel, DeskState, Questions, after, replies
from megatron_collab.environments.desk_optimum import Action, DeskValue
from megatron_collab.environments.desk_user import DeskGoal, draw, unknown
from megatron_collab.types import Message

UNLIMITED = 40  # user turns; more change values by less than 1e-6, even if the behavior asks again with chance 0.8


@dataclass(frozen=True, kw_only=True)
class DeskBehavior:
    """A policy that asks by chance, otherwise it ends the conversation with a guess.

    `asks`: the chance that its first reply to an incomplete request asks; `asks_again`: that a later one does, if
    something is still unknown; `asks_needlessly`: that the first reply to a complete request asks, for a random part of
    all slots. `asks_all`: that a question is for all unknown slots, not for a random part of them. A guess draws the
    unknown values by their prior.
    """

    asks: float = 0.28
    asks_all: float = 0.5
    asks_again: float = 0.2
    asks_needlessly: float = 0.06

    def reply(self, rng: random.Random, goal: DeskGoal, messages: Sequence[Message]) -> Message:
        """The next message, at random."""
        complete, slots = not unknown(goal, messages[:1]), unknown(goal, messages)
        if len(messages) == 1:
            chance = self.asks_needlessly if complete else self.asks
        else:
            chance = 0.0 if complete or not slots else self.asks_again
        if rng.random() >= chance:
            return message_of(rng, goal, messages, None)
        asks_all = not complete and rng.random() < self.asks_all
        return Message("assistant", language.ask(slots if asks_all else random_part(rng, slots or MODEL.slots)))

    def chances(self, model: DeskModel, state: DeskState) -> Mapping[Action, float]:
        """The chance of each action of `reply`."""
        return _chances(self, model, state)


def message_of(rng: random.Random, goal: DeskGoal, messages: Sequence[Message], action: Action) -> Message:
    """The text of `action`: a question for random slots of its two sorts, or a guess that draws the unknown values.

    If the request is complete, the question is for any slots.
    """
    if action is None:
        known = language.heard(messages).values
        return Message("assistant", language.final({slot: known.get(slot) or draw(rng, slot) for slot in goal.values}))
    slots = unknown(goal, messages) or MODEL.slots
    parts = [[slot for slot in slots if slot in side] for side in (MODEL.guessable, MODEL.open)]
    asked_for = [slot for part, number in zip(parts, action, strict=True) for slot in rng.sample(part, number)]
    return Message("assistant", language.ask([slot for slot in MODEL.slots if slot in asked_for]))


def random_part(rng: random.Random, slots: Sequence[str] | Mapping[str, str]) -> list[str]:
    """A random part of `slots`, never empty, in the order of the world."""
    part = rng.sample(list(slots), rng.randint(1, len(slots)))
    return [slot for slot in MODEL.slots if slot in part]


@lru_cache(maxsize=4096)
def _chances(behavior: DeskBehavior, model: DeskModel, state: DeskState) -> Mapping[Action, float]:
    guessable, open_ = state.guessable, state.open
    complete = guessable + open_ == 0
    if complete and state.turn:
        return {None: 1.0}
    if complete:
        asks, asks_all, guessable, open_ = behavior.asks_needlessly, 0.0, len(model.guessable), len(model.open)
    else:
        asks, asks_all = behavior.asks_again if state.turn else behavior.asks, behavior.asks_all
    chances: dict[Action, float] = defaultdict(float, {None: 1 - asks})
    chances[Questions(guessable, open_)] += asks * asks_all
    slots = guessable + open_
    for i, j in product(range(guessable + 1), range(open_ + 1)):
        if i + j:  # the size of a part is uniform, and so is the part of that size
            share = comb(guessable, i) * comb(open_, j) / comb(slots, i + j) / slots
            chances[Questions(i, j)] += asks * (1 - asks_all) * share
    return {action: chance for action, chance in chances.items() if chance > 0}


def chance_drawn_right(model: DeskModel, user: str, state: DeskState) -> float:
    """The chance that a guess is right if its unknown values are drawn by the prior: sum p^2 for each slot."""
    guessable, open_ = (p**2 + (1 - p) ** 2 / (model.values - 1) for p in (model.guessable_chance, model.open_chance))
    chance = guessable**state.guessable * open_**state.open
    return chance * (1 - model.wrong) ** state.answered_open if user == WRONG else chance


class BehaviorValues:
    """Exact values of the replies of `behavior` with one kind of user, by recursion."""

    def __init__(self, model: DeskModel, behavior: DeskBehavior) -> None:
        self.model, self.behavior = model, behavior
        self._turns: dict[tuple[DeskState, str, int], DeskValue] = {}

    def of_reply(self, state: DeskState, action: Action, user: str, user_turns: int = UNLIMITED) -> DeskValue:
        """The value of a reply if the user and the behavior take at most `user_turns` turns each after it."""
        if action is None:
            return DeskValue(chance_drawn_right(self.model, user, state), 0.0)
        right, questions = 0.0, float(sum(action))
        if user_turns:
            for chance, later in self._after(state, action, user):
                value = self.of_turn(later, user, user_turns - 1)
                right, questions = right + chance * value.right, questions + chance * value.questions
        return DeskValue(right, questions)

    def of_turn(self, state: DeskState, user: str, user_turns: int = UNLIMITED) -> DeskValue:
        """The mean value over the behavior's next replies."""
        key = state, user, user_turns
        if key not in self._turns:
            right = questions = 0.0
            for action, chance in self.behavior.chances(self.model, state).items():
                value = self.of_reply(state, action, user, user_turns)
                right, questions = right + chance * value.right, questions + chance * value.questions
            self._turns[key] = DeskValue(right, questions)
        return self._turns[key]

    def _after(self, state: DeskState, questions: Questions, user: str) -> Iterator[tuple[float, DeskState]]:
        """The states after a question, with their chances; a user who left is not among them."""
        complete = state.guessable + state.open == 0
        for chance, reply in replies(self.model, user, state, questions):
            if not reply.left_desk:
                yield chance, state._replace(turn=state.turn + 1) if complete else after(state, reply)
