"""The grammar of the desk world, and what is read from texts."""

from __future__ import annotations

import random

import pytest

from megatron_collab.environments import desk_language as language
from megatron_collab.environments.desk_language import GRAMMAR, HELD_OUT, KINDS, MODEL, PHRASINGS, TRAINED, VALUES
from megatron_collab.types import Message


def test_a_request_needs_two_to_five_slots() -> None:
    numbers = [len(language.needed(kind)) for kind in KINDS]
    assert len(KINDS) == 48 and set(numbers) == {2, 3, 4, 5}
    assert all(set(language.needed(kind)) <= set(MODEL.slots) for kind in KINDS)


def test_every_slot_has_its_values_and_no_word_means_two_things() -> None:
    assert len(MODEL.slots) == 8
    values = [value for slot in MODEL.slots for value in VALUES[slot]]
    assert all(len(VALUES[slot]) == MODEL.values for slot in MODEL.slots)
    words = [*values, *language.ACTIONS, *language.TOPICS, *MODEL.slots]
    assert len(words) == len(set(words))


def test_held_out_productions_are_made_of_words_of_the_others() -> None:
    for phrasings in GRAMMAR.values():
        known = {word for text in phrasings[TRAINED] for word in text.split()}
        assert not set(phrasings[TRAINED]) & set(phrasings[HELD_OUT])
        everywhere = known | {word for part in GRAMMAR.values() for text in part[TRAINED] for word in text.split()}
        assert {word for text in phrasings[HELD_OUT] for word in text.split()} <= everywhere


@pytest.mark.parametrize("phrasing", PHRASINGS)
def test_what_a_first_message_states_is_heard(phrasing: str) -> None:
    rng = random.Random(0)
    for kind in KINDS:
        values = {slot: rng.choice(VALUES[slot]) for slot in language.needed(kind)[1:]}
        message = Message("user", language.opening(rng, kind, values, phrasing))
        assert language.heard([message]).first == values and kind[0] in message.content and kind[1] in message.content


def test_later_statements_replace_earlier_ones() -> None:
    texts = ["please fix my app .", "which item and which date ?", "item lamp and date monday ."]
    texts += [
        "which plan ?",
        "the plan is pro . forget the date .",
        "which date ?",
        "date thursday . forget the item .",
    ]
    messages = [Message(("user", "assistant")[i % 2], text) for i, text in enumerate(texts[:3])]
    messages += [Message(("assistant", "user")[i % 2], text) for i, text in enumerate(texts[3:])]
    memory = language.heard(messages)
    assert (memory.first, memory.answered, memory.back) == ({}, {"date": "thursday", "plan": "pro"}, {"item"})


def test_a_message_of_another_wording_takes_nothing_back() -> None:
    """Tasks may have messages that the grammar does not make."""
    texts = ["i want to cancel my delivery", "item lamp .", "i forget", "forget the rest .", "please forget it"]
    memory = language.heard([Message("user", text) for text in texts])
    assert memory.answered == {"item": "lamp"} and not memory.back


def test_questions_are_read_in_their_order() -> None:
    assert language.ask(["date", "item"]) == "which date and which item ?"
    assert language.slots_asked("which date and which item ? which date which my") == ["date", "item", "date"]
    assert language.slots_asked("done : which date") == [] == language.slots_asked("date ?")


def test_a_guess_is_read_if_it_is_one() -> None:
    values = {"plan": "pro", "item": "lamp"}
    assert language.final(values) == "done : item lamp plan pro"
    assert language.guess(language.final(values)) == values
    for text in ("item lamp", "done : item", "done : item lamp item lamp", "done : item pro", "done : which lamp"):
        assert language.guess(text) is None, text
