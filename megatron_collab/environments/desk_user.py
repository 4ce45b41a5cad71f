"""The users of the desk world in text: they answer by the chances of desk_model.py.

An answer is a function of goal, messages and seed alone, so that a conversation can be continued from any point.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from megatron_collab.environments import desk_language as language
from megatron_collab.environments.desk_language import MODEL, VALUES, Kind
from megatron_collab.environments.desk_model import CHANGES, FIRST, LEAVES, USERS, VAGUE, WRONG
from megatron_collab.settings.documents import parse_json
from megatron_collab.types import Message

FORM = (
    "the goal must be a JSON object with kind (action and topic), user (one of all, first, vague, changes, wrong, "
    "leaves), phrasing (trained or held out), values, of each slot that the kind needs, and perhaps cost, of a question"
)


@dataclass(frozen=True)
class DeskGoal:
    """What a user wants: a kind of request with the values of its slots; the kind of user, and how it phrases.

    `cost`: of a question, if the first message states it.
    """

    kind: Kind
    values: dict[str, str]
    user: str
    phrasing: str
    cost: float | None = None

    def dump(self) -> str:
        return json.dumps({name: value for name, value in asdict(self).items() if value is not None})

    @property
    def answer(self) -> str:
        """The right final message."""
        return language.final(self.values)


def read_goal(text: str) -> DeskGoal:
    """The goal of a task. Raises ValueError, with the remedy, if it has another form."""
    try:
        fields = parse_json(text)
        action, topic = fields.pop("kind")
        goal = DeskGoal((action, topic), **fields)
        known = goal.kind in language.KINDS and goal.user in USERS and goal.phrasing in language.PHRASINGS
        complete = known and goal.values.keys() == set(language.needed(goal.kind))
        fits = complete and all(value in VALUES[slot] for slot, value in goal.values.items())
        fits = fits and (goal.cost is None or 0 <= goal.cost < math.inf)
    except (ValueError, TypeError, KeyError, AttributeError):
        fits = False
    if not fits:
        raise ValueError(FORM)
    return goal


def unknown(goal: DeskGoal, messages: Sequence[Message]) -> list[str]:
    """The slots that the request needs and no message of the user states."""
    values = language.heard(messages).values
    return [slot for slot in goal.values if slot not in values]


def draw(rng: random.Random, slot: str) -> str:
    """A value of the slot by its prior."""
    return rng.choices(VALUES[slot], MODEL.prior(slot))[0]


def reply(goal: DeskGoal, messages: Sequence[Message], seed: str) -> str:
    """The user's next message; `seed` names the conversation. A message that ends with STOP ends it."""
    rng = random.Random(f"{seed}/{len(messages)}")
    *earlier, last = messages
    if language.is_final(last.content):
        return f"{language.THANKS} {language.STOP}"
    asked_for = language.slots_asked(last.content)
    if not asked_for:
        return f"{language.request(rng, goal.kind, goal.phrasing)} ."
    turn = sum(message.role == "assistant" and bool(language.slots_asked(message.content)) for message in earlier)
    if goal.user == LEAVES and rng.random() < MODEL.leaving(len(asked_for), turn):
        return f"{language.LEAVING} {language.STOP}"
    slots = list(dict.fromkeys(asked_for))
    answered = slots[:1] if goal.user == FIRST else slots
    if goal.user == VAGUE:
        answered = [slot for slot in slots if rng.random() < MODEL.answers]
    return " ".join(_sentences(goal, messages, rng, slots, answered)) or language.UNSURE


def _sentences(
    goal: DeskGoal, messages: Sequence[Message], rng: random.Random, slots: Sequence[str], answered: Sequence[str]
) -> list[str]:
    """The answers to the questions for `slots`, and what the user takes back."""
    memory = language.heard(messages)
    stated = {slot: _value(goal, memory, rng, slot) for slot in answered if slot in goal.values}
    sentences = [f"{language.statements(rng, stated, goal.phrasing)} ."] if stated else []
    sentences += [language.NEEDLESS.format(slot=slot) for slot in answered if slot not in goal.values]
    earlier = [slot for slot in memory.answered if slot not in slots]
    if goal.user == CHANGES and earlier and rng.random() < MODEL.changes:
        sentences.append(language.BACK.format(slot=rng.choice(earlier)))
    return sentences


def _value(goal: DeskGoal, memory: language.Heard, rng: random.Random, slot: str) -> str:
    """The value that the user states: what it said before, else what it needs, or another value by mistake."""
    if slot in memory.values:
        return memory.values[slot]
    if slot in memory.back:
        return draw(rng, slot)
    value = goal.values[slot]
    if goal.user == WRONG and slot in MODEL.open:
        return rng.choices(VALUES[slot], MODEL.stated(VALUES[slot].index(value)))[0]
    return value


def chance_right(goal: DeskGoal, messages: Sequence[Message], values: dict[str, str] | None) -> float:
    """The chance that a guess is what the user needs, given its messages and its kind, over the draw of its goal.

    0 if a slot that the request needs is lacking or another one is named, or if there is no guess.
    """
    if values is None or values.keys() != goal.values.keys():
        return 0.0
    memory, chance = language.heard(messages), 1.0
    for slot, value in values.items():
        guessed = VALUES[slot].index(value)
        if slot not in memory.values:
            chance *= MODEL.prior(slot)[guessed]
        elif goal.user == WRONG and slot in MODEL.open and slot in memory.answered:
            chance *= MODEL.stated(VALUES[slot].index(memory.answered[slot]))[guessed]
        else:
            chance *= memory.values[slot] == value
    return chance
