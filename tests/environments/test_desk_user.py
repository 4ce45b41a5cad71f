"""The users of the desk world in text."""

from __future__ import annotations

import json

import pytest

from megatron_collab.environments import desk_language as language
from megatron_collab.environments.desk_model import USERS
from megatron_collab.environments.desk_user import DeskGoal, chance_right, read_goal, reply
from megatron_collab.types import Message

VALUES = {"item": "chair", "date": "monday", "region": "europe"}


def goal(user: str = "all") -> DeskGoal:
    return DeskGoal(("cancel", "delivery"), dict(VALUES), user, language.TRAINED)


def messages(*contents: str) -> list[Message]:
    return [Message(("user", "assistant")[i % 2], content) for i, content in enumerate(contents)]


REQUEST = "please cancel my delivery ."


def stated(user: str, seed: int, *contents: str) -> dict[str, str]:
    dialogue = messages(REQUEST, *contents)
    answer = Message("user", reply(goal(user), dialogue, str(seed)))
    return dict(language.heard([*dialogue, answer]).answered)


@pytest.mark.parametrize("user", USERS)
def test_an_answer_depends_on_the_conversations_name_alone(user: str) -> None:
    dialogue = messages(REQUEST, "which item and which date ?")
    answers = [reply(goal(user), dialogue, f"s{i}") for i in range(40)]
    assert answers == [reply(goal(user), dialogue, f"s{i}") for i in range(40)]
    assert len(set(answers)) > 2


def test_each_kind_answers_by_its_rule() -> None:
    question = "which date and which item ?"
    assert stated("all", 0, question) == {"item": "chair", "date": "monday"}
    assert stated("first", 0, question) == {"date": "monday"}
    numbers = [len(stated("vague", seed, question)) for seed in range(400)]
    assert {numbers.count(n) // 25 for n in (0, 2)} <= {3, 4} and 170 < numbers.count(1) < 230
    right = [stated("wrong", seed, "which item ?")["item"] == "chair" for seed in range(400)]
    assert 0.74 < sum(right) / 400 < 0.86
    assert all(stated("wrong", seed, "which region ?") == {"region": "europe"} for seed in range(50))
    ends = [language.STOP in reply(goal("leaves"), messages(REQUEST, question), str(seed)) for seed in range(400)]
    assert 0.17 < sum(ends) / 400 < 0.31
    later = messages(REQUEST, "which plan ?", "the plan can be any .", "which item ?", "item chair .", question)
    ends = [language.STOP in reply(goal("leaves"), later, str(seed)) for seed in range(400)]
    assert 0.33 < sum(ends) / 400 < 0.47


def test_a_user_who_changes_its_mind_takes_back_an_answer_and_then_has_another() -> None:
    contents = ["which item ?", "the item is chair .", "which date ?"]
    known = [stated("changes", seed, *contents) for seed in range(400)]
    kept = sum("item" in values for values in known)
    assert 0.62 < kept / 400 < 0.78 and all(values["date"] == "monday" for values in known)
    contents += ["the date is monday . forget the item .", "which item ?"]
    values = [stated("changes", seed, *contents)["item"] for seed in range(400)]
    assert set(values) == set(language.VALUES["item"]) and 70 < values.count("chair") < 130


def test_what_is_not_needed_or_known_is_answered_too() -> None:
    assert reply(goal(), messages(REQUEST, "which plan ?"), "s") == "the plan can be any ."
    contents = ("which item ?", "item table .", "which item ?")
    assert all(stated("wrong", seed, *contents) == {"item": "table"} for seed in range(50)), "it says the same again"
    unsure = [reply(goal("vague"), messages(REQUEST, "which item ?"), str(seed)) for seed in range(20)]
    assert 4 < unsure.count(language.UNSURE) < 16


def test_the_request_is_repeated_if_nothing_is_asked_and_a_guess_ends_the_conversation() -> None:
    repeated = reply(goal(), messages(REQUEST, "item ?"), "s")
    assert repeated.endswith(" .") and "cancel" in repeated and "delivery" in repeated
    assert reply(goal(), messages(REQUEST, "done : item lamp"), "s") == f"thanks . {language.STOP}"


def test_the_chance_of_a_guess_is_exact() -> None:
    dialogue = messages(REQUEST, "which item ?", "the item is chair .")
    right = dict(VALUES)
    assert chance_right(goal(), dialogue, right) == pytest.approx(0.25 * 0.95)
    assert chance_right(goal(), dialogue, {**right, "region": "asia"}) == pytest.approx(0.25 * 0.05 / 3)
    assert chance_right(goal(), dialogue, {**right, "item": "lamp"}) == 0.0
    assert chance_right(goal("wrong"), dialogue, right) == pytest.approx(0.8 * 0.25 * 0.95)
    assert chance_right(goal("wrong"), dialogue, {**right, "item": "lamp"}) == pytest.approx(0.2 / 3 * 0.25 * 0.95)
    first = messages("please cancel my delivery . item chair .")
    assert chance_right(goal("wrong"), first, right) == pytest.approx(0.25 * 0.95), "a first message is never wrong"
    assert chance_right(goal(), dialogue, None) == 0.0
    assert chance_right(goal(), dialogue, {"item": "chair", "date": "monday"}) == 0.0
    assert chance_right(goal(), dialogue, {**right, "plan": "pro"}) == 0.0


def test_a_goal_is_read_as_it_was_written() -> None:
    assert read_goal(goal().dump()) == goal()
    row = json.loads(goal().dump())
    changes: list[dict] = [{"user": "nobody"}, {"values": {}}, {"kind": ["cancel", "x"]}, {"phrasing": 1}, {"more": 1}]
    changes += [{"values": {**VALUES, "item": "monday"}}, {"kind": 3}, {"values": None}]
    changes += [{"cost": -1}, {"cost": "0.1"}, {"cost": float("inf")}]
    assert read_goal(json.dumps(row | {"cost": 0.1})).cost == 0.1
    for text in ("", "[" * 5000, "[]", *(json.dumps(row | change) for change in changes)):
        with pytest.raises(ValueError, match="the goal must be a JSON object with kind"):
            read_goal(text)
