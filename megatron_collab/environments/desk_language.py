"""The language of the desk world: what requests need, a grammar of the user's messages, and what can be read from text.

The policy asks "which date and which item ?" and ends with "done : date monday item lamp". A user's sentences have
several productions, some held out from training; these contain no word that the others lack.
"""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron_collab.environments.desk_model import DeskModel
from megatron_collab.types import Message

MODEL = DeskModel()
STOP = "[[TERMINATE CHAT]]"
FINAL = "done :"
VALUES: Mapping[str, tuple[str, ...]] = {  # the likeliest value first
    "item": ("lamp", "chair", "table", "shelf"),
    "date": ("monday", "tuesday", "wednesday", "thursday"),
    "amount": ("ten", "twenty", "thirty", "forty"),
    "version": ("alpha", "beta", "gamma", "delta"),
    "region": ("europe", "america", "asia", "africa"),
    "language": ("english", "french", "german", "spanish"),
    "device": ("phone", "laptop", "tablet", "watch"),
    "plan": ("basic", "plus", "pro", "max"),
}
# A kind of request is an action and a topic, and needs the slots of both.
TOPICS: Mapping[str, tuple[str, ...]] = {
    "delivery": ("item", "date", "region"),
    "invoice": ("date", "amount", "region"),
    "app": ("version", "device", "language"),
    "account": ("language", "plan"),
    "subscription": ("amount", "plan"),
    "repair": ("item", "version", "device", "region"),
}
ACTIONS: Mapping[str, str] = {
    "change": "item",
    "cancel": "date",
    "refund": "amount",
    "fix": "version",
    "move": "region",
    "explain": "language",
    "check": "device",
    "upgrade": "plan",
}
Kind = tuple[str, str]
KINDS: tuple[Kind, ...] = tuple((action, topic) for action in ACTIONS for topic in TOPICS)
TRAINED, HELD_OUT = PHRASINGS = ("trained", "held out")
GRAMMAR: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "request": {
        TRAINED: (
            "please {action} my {topic}",
            "i want to {action} the {topic}",
            "can you {action} this {topic} for me",
        ),
        HELD_OUT: ("i want you to {action} my {topic}", "can you please {action} the {topic}"),
    },
    "statement": {
        TRAINED: ("the {slot} is {value}", "{slot} {value}", "i want {value} for the {slot}"),
        HELD_OUT: ("my {slot} is {value}", "{value} is the {slot}"),
    },
    "opening": {
        TRAINED: ("{request} . {statements} .", "{statements} , {request} ."),
        HELD_OUT: ("{statements} . {request} .", "{request} , {statements} ."),
    },
}
UNSURE, LEAVING, THANKS = "not sure .", "sorry , i have to go .", "thanks ."
COST = "each question costs"
BACK, NEEDLESS = "forget the {slot} .", "the {slot} can be any ."


def needed(kind: Kind) -> tuple[str, ...]:
    """The slots that a kind of request needs, in the order of the world."""
    slots = {ACTIONS[kind[0]], *TOPICS[kind[1]]}
    return tuple(slot for slot in MODEL.slots if slot in slots)


def phrase(rng: random.Random, sentence: str, phrasing: str, **parts: str) -> str:
    """A random production of the grammar, filled."""
    return rng.choice(GRAMMAR[sentence][phrasing]).format(**parts)


def request(rng: random.Random, kind: Kind, phrasing: str) -> str:
    return phrase(rng, "request", phrasing, action=kind[0], topic=kind[1])


def statements(rng: random.Random, values: Mapping[str, str], phrasing: str) -> str:
    return " and ".join(phrase(rng, "statement", phrasing, slot=slot, value=values[slot]) for slot in values)


def opening(rng: random.Random, kind: Kind, values: Mapping[str, str], phrasing: str) -> str:
    """A first message that states `values`."""
    text = request(rng, kind, phrasing)
    if not values:
        return f"{text} ."
    return phrase(rng, "opening", phrasing, request=text, statements=statements(rng, values, phrasing))


def cost(value: float) -> str:
    """The sentence that states the cost of a question."""
    return f"{COST} {value:g} ."


def ask(slots: Collection[str]) -> str:
    """The question for `slots`, in their order."""
    return " and ".join(f"which {slot}" for slot in slots) + " ?"


def slots_asked(text: str) -> list[str]:
    """The slots that a message of the policy asks for, in its order; each mention is a question."""
    if is_final(text):
        return []
    return [slot for before, slot in pairwise(text.split()) if before == "which" and slot in MODEL.slots]


def final(values: Mapping[str, str]) -> str:
    """The message with the policy's guess, which ends the conversation."""
    return " ".join([FINAL, *(f"{slot} {values[slot]}" for slot in MODEL.slots if slot in values)])


def is_final(text: str) -> bool:
    return text.strip().startswith(FINAL)


def guess(text: str) -> dict[str, str] | None:
    """The values of a final message; None if it has another form."""
    words = text.split()[2:]
    slots, values = words[::2], words[1::2]
    fits = is_final(text) and len(slots) == len(values) == len(set(slots))
    if not fits or any(value not in VALUES.get(slot, ()) for slot, value in zip(slots, values, strict=True)):
        return None
    return dict(zip(slots, values, strict=True))


@dataclass(frozen=True)
class Heard:
    """What the user has stated: `first` in its first message, `answered` later; a later statement replaces an earlier.

    `back`: the slots that it took back and has not stated again.
    """

    first: Mapping[str, str]
    answered: Mapping[str, str]
    back: frozenset[str]

    @property
    def values(self) -> Mapping[str, str]:
        return {**self.first, **self.answered}


_TAKEN_BACK = re.compile(BACK.format(slot=f"({'|'.join(MODEL.slots)})").replace(".", r"\."))
_SLOT_OF = {value: slot for slot, values in VALUES.items() for value in values}


def heard(messages: Iterable[Message]) -> Heard:
    """What the user's messages state."""
    first: dict[str, str] | None = None
    answered: dict[str, str] = {}
    back: set[str] = set()
    for text in (message.content for message in messages if message.role == "user"):
        stated = {_SLOT_OF[word]: word for word in text.split() if word in _SLOT_OF}
        for slot in _TAKEN_BACK.findall(text):
            answered.pop(slot, None)
            back.add(slot)
        if first is None:
            first = stated
        else:
            answered |= {slot: value for slot, value in stated.items() if slot not in first}
            back -= stated.keys()
    return Heard(first or {}, answered, frozenset(back))


def words(costs: Sequence[float] = ()) -> Sequence[str]:
    """All words of the world, if its tasks state `costs`."""
    productions = [text for phrasings in GRAMMAR.values() for texts in phrasings.values() for text in texts]
    phrases = [*productions, UNSURE, LEAVING, THANKS, BACK, NEEDLESS, FINAL, "which and ? . ,", *map(cost, costs)]
    language = [word for text in phrases for word in text.split() if not word.startswith("{")]
    names = [*ACTIONS, *TOPICS, *MODEL.slots, *(value for slot in MODEL.slots for value in VALUES[slot])]
    return list(dict.fromkeys([*language, *names]))
