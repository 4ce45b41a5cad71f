"""The chances of the desk world."""

from __future__ import annotations

import pytest

from megatron_collab.environments.desk_language import MODEL
from megatron_collab.environments.desk_model import USERS, DeskModel, DeskReply, DeskState, Questions, after, replies

STATE = DeskState(2, 1, 1, 1, 2)


@pytest.mark.parametrize("user", USERS)
def test_the_chances_of_a_users_answers_sum_to_one(user: str) -> None:
    answers = replies(MODEL, user, STATE, Questions(2, 1))
    assert sum(chance for chance, _ in answers) == pytest.approx(1)
    assert len({reply for _, reply in answers}) == len(answers)


def test_each_kind_answers_by_its_rule() -> None:
    questions, everything = Questions(1, 1), DeskReply(1, 1)
    assert replies(MODEL, "all", STATE, questions) == [(1.0, everything)]
    assert replies(MODEL, "first", STATE, questions) == [(1.0, DeskReply(0, 1, first_only=True))]
    assert dict((reply, chance) for chance, reply in replies(MODEL, "vague", STATE, questions)) == {
        everything: 0.25,
        DeskReply(0, 1, first_only=True): 0.25,
        DeskReply(1, 0): 0.25,
        DeskReply(): 0.25,
    }
    taken_back = [chance for chance, reply in replies(MODEL, "changes", STATE, questions) if reply.back_open]
    assert taken_back == [pytest.approx(0.3 * 2 / 3)]
    assert replies(MODEL, "changes", DeskState(2, 1), questions) == [(1.0, everything)]
    assert replies(MODEL, "leaves", STATE, questions)[1] == (pytest.approx(0.32), DeskReply(left_desk=True))


def test_users_leave_more_often_the_more_they_are_asked() -> None:
    chances = [MODEL.leaving(questions, turn) for questions, turn in ((1, 0), (2, 0), (2, 1), (3, 1), (8, 3))]
    assert chances == sorted(set(chances)) and chances[-1] == 0.9


def test_a_reply_moves_slots_between_unknown_and_answered() -> None:
    reply = DeskReply(2, 0, back_open=1)
    assert after(STATE, reply) == DeskState(0, 2, 2, 3, 1)


@pytest.mark.parametrize("chance", [0.25, 0.35, 0.5])
def test_a_wrong_statement_does_not_show_that_it_is_wrong(chance: float) -> None:
    """Needed and stated values have the same prior, and 4 of 5 statements of each value are right."""
    model = DeskModel(open_chance=chance)
    prior = model.prior("item")
    joint = [[prior[needed] * share for share in model.stated(needed)] for needed in range(model.values)]
    assert [sum(row) for row in joint] == pytest.approx(prior)
    for i, row in enumerate(joint):
        assert row == pytest.approx([column[i] for column in joint]) and min(row) >= -1e-12
        assert row[i] / sum(row) == pytest.approx(1 - model.wrong)


@pytest.mark.parametrize(
    ("chances", "message"),
    [({"open_chance": 0.6}, "open_chance=0.6: "), ({"guessable_chance": 0.2}, "guessable_chance=0.2: ")],
)
def test_chances_that_no_likeliest_value_has_are_refused(chances: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DeskModel(**chances)  # type: ignore[arg-type]


def test_the_last_cost_exceeds_what_a_question_can_add() -> None:
    """n questions add less than 1 to the chance of being right, and a single one at most 1 - open_chance."""
    assert MODEL.costs[-1] > 1 - MODEL.open_chance and 2 * MODEL.costs[-1] > 1
