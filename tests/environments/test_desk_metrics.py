"""The metrics of the desk world."""

from __future__ import annotations

import asyncio

import pytest

from megatron_collab.environments import desk, desk_language
from megatron_collab.environments.desk_user import DeskGoal
from megatron_collab.types import Message, Score, Task
from tests.reward.fakes import about, metric, play
from tests.reward.fakes import score as score_of

METRICS = "megatron_collab.environments.desk_metrics"
GOAL = DeskGoal(("cancel", "delivery"), {"item": "chair", "date": "monday", "region": "europe"}, "all", "trained")
OPEN, COMPLETE = (
    "please cancel my delivery . item chair .",
    "please cancel my delivery . item chair date monday region europe .",
)
RIGHT, WRONG = desk_language.final(GOAL.values), desk_language.final({**GOAL.values, "item": "lamp"})


def task(first: str = OPEN) -> Task:
    return Task("t", (Message("user", first),), GOAL.dump(), GOAL.answer, desk.USER)


def score(name: str, task: Task, *texts: str, **settings: float) -> Score | None:
    return score_of(f"{METRICS}:{name}", task, play(task, *texts), None, **settings)


def test_a_guess_scores_its_chance_of_being_right() -> None:
    assert score("DeskRight", task(), RIGHT) == pytest.approx(0.25 * 0.95)
    assert score("DeskRight", task(), "which date ?", "date monday .", RIGHT) == pytest.approx(0.95)
    assert score("DeskRight", task(), WRONG) == 0.0
    assert score("DeskRight", task(COMPLETE), RIGHT, "thanks .") == 1.0
    assert score("DeskRight", task(), "which date ?") == 0.0


def test_each_question_costs() -> None:
    texts = ("which date and which item ?", "date monday and item chair .", RIGHT)
    assert score("DeskQuestions", task(), *texts) == 2.0
    assert score("DeskUtility", task(), *texts) == pytest.approx(0.95 - 2 * 0.1)
    assert score("DeskUtility", task(), *texts, cost=0.2) == pytest.approx(0.95 - 2 * 0.2)


def test_a_task_may_state_the_cost() -> None:
    texts = ("which date and which item ?", "date monday and item chair .", RIGHT)
    (priced,) = desk.with_costs([task()], [0.4])
    assert "costs 0.4" in priced.messages[0].content
    assert score("DeskUtility", priced, *texts, cost=0.2) == pytest.approx(0.95 - 2 * 0.4)
    assert score("DeskUtilityIncomplete", priced, *texts) == pytest.approx(0.95 - 2 * 0.4)
    (gratis,) = desk.with_costs([task()], [0.0])
    assert score("DeskUtility", gratis, *texts) == pytest.approx(0.95)


def test_questions_before_the_trained_turn_cost_nothing() -> None:
    later = task().play_on(Message("assistant", "which date ?"), Message("user", "date monday ."))
    assert score("DeskUtility", later, RIGHT) == pytest.approx(0.95)
    assert score("DeskNeedless", later, "which date ?", "date monday .", RIGHT) == 1.0


def test_needless_questions_are_for_slots_that_are_known_or_not_needed() -> None:
    assert score("DeskNeedless", task(), "which date and which region ?", "not sure .", "which date ?") == 0.0
    assert score("DeskNeedless", task(), "which date and which item and which plan ?") == 2.0
    assert score("DeskNeedless", task(), "which date which date ?", "date monday .", "which date ?") == 2.0


def test_incomplete_requests_have_a_utility_of_their_own() -> None:
    assert score("DeskUtilityIncomplete", task(), RIGHT) == pytest.approx(0.25 * 0.95)
    assert score("DeskUtilityIncomplete", task(COMPLETE), RIGHT) is None


def test_what_the_trained_turn_asks_for_is_told_apart() -> None:
    assert score("DeskAsksOpen", task(), "which date and which plan ?") == 1.0
    assert score("DeskAsksGuessable", task(), "which date and which plan ?") == 0.0
    assert score("DeskAsksOpen", task(), RIGHT) == 0.0
    assert score("DeskAsksOpen", task(COMPLETE), RIGHT) is None is score("DeskAsksGuessable", task(COMPLETE), RIGHT)


def test_new_facts_are_in_the_users_next_message() -> None:
    verdict = metric(f"{METRICS}:DeskNewFacts", None)
    texts = ("which date and which plan ?", "date monday .", "which item ?", "not sure .", RIGHT)
    assert asyncio.run(verdict.score_turns(task(), play(task(), *texts))) == [1.0, 0.0, 0.0]
    assert score("DeskNewFacts", task(), *texts) == 1.0


def test_a_turn_gets_the_bonus_if_it_asks_for_something_unknown() -> None:
    assert score("DeskAsks", task(), "which date and which date ?", "date monday .", RIGHT) == 1.0
    assert score("DeskAsks", task(), "which item and which plan ?", "the plan can be any .", "which date ?") == 0.0
    assert score("DeskAsks", task(), RIGHT) == 0.0 == score("DeskAsks", task(COMPLETE), "which date ?")


@pytest.mark.parametrize("name", ["DeskRight", "DeskUtility", "DeskUtilityIncomplete", "DeskAsksOpen"])
def test_the_metrics_do_not_apply_to_other_worlds(name: str) -> None:
    assert score_of(f"{METRICS}:{name}", about("5"), play(about("5"), "5")) is None


def test_a_task_with_another_goal_is_refused() -> None:
    right = metric(f"{METRICS}:DeskRight")
    right.check_task(right.options, task())
    right.check_task(right.options, about("5"))
    with pytest.raises(ValueError, match="the goal must be a JSON object with kind"):
        right.check_task(right.options, Task("t", (), "{}", "", desk.USER))
