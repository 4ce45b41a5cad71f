"""What policies reach in the desk world: against simulated conversations, and against enumeration in a small world."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from itertools import combinations, permutations

import numpy as np
import pytest

from megatron_collab.environments import desk
from megatron_collab.environments.desk_language import MODEL
from megatron_collab.environments.desk_metrics import DeskUtility, DeskUtilityOptions
from megatron_collab.environments.desk_model import USERS, DeskModel, DeskState
from megatron_collab.environments.desk_optimum import (
    ALWAYS,
    MYOPIC,
    NOW,
    OPEN_BONUS,
    OPTIMAL,
    POLICIES,
    DeskPredictions,
)
from megatron_collab.environments.desk_user import read_goal
from tests.environments.desk_players import answers, play_out
from tests.reward.fakes import metric

COST = 0.2
STARTS = {DeskState(1, 1): 1.0, DeskState(1, 2): 1.0, DeskState(2, 3): 1.0}
FEW_STARTS = {DeskState(1, 1): 1.0, DeskState(1, 2): 1.0}
SEEN = MODEL.seen_users
ROWS = [*desk.tasks(0, 400, desk.GOALS), *desk.tasks(0, 400, desk.PEOPLE)]


@pytest.fixture(scope="module")
def predictions() -> DeskPredictions:
    return DeskPredictions(MODEL, COST, STARTS, SEEN)


@pytest.mark.seconds
@pytest.mark.parametrize("name", POLICIES)
def test_played_conversations_reach_what_is_predicted(name: str, predictions: DeskPredictions) -> None:
    """In text, with users and metric of the world: the mean over conversations, within 4 standard errors."""
    utility = metric("megatron_collab.environments.desk_metrics:DeskUtility", cost=COST)
    assert isinstance(utility, DeskUtility) and isinstance(utility.options, DeskUtilityOptions)
    game, policy = predictions.game, predictions.policies[name]
    values: dict[tuple[DeskState, str], float] = {}
    errors = []
    for i, task in enumerate(ROWS * 3):
        goal = read_goal(task.goal)
        start = desk.state_of(goal, task.messages)
        if start == DeskState(0, 0):
            continue
        if (start, goal.user) not in values:
            values[start, goal.user] = game.value(policy, {start: 1.0}, goal.user).utility(COST)
        conversation = play_out(game, policy, task, f"simulation {i}")
        errors.append(utility.measure(goal, task, conversation) - values[start, goal.user])
    assert len(errors) >= 1000
    standard_error = np.std(errors, ddof=1) / math.sqrt(len(errors))
    assert abs(np.mean(errors)) <= 4 * standard_error + 1e-12, (np.mean(errors), standard_error)
    if name != NOW:
        assert 0.002 < standard_error < 0.02, "the comparison is no sharper than this"


def enumerated(
    model: DeskModel,
    cost: float,
    weights: Mapping[str, float],
    unknown: frozenset[str],
    answered: frozenset[str],
    turn: int,
) -> float:
    """The best utility, summed over users by weight, by trying every ordered set of questions and every answer.

    With the rules of the users written anew, slot by slot.
    """
    best = 0.0
    for user, weight in weights.items():
        for slot in unknown:
            weight *= model.open_chance if slot in model.open else model.guessable_chance
        for slot in answered if user == "wrong" else ():
            weight *= 1 - model.wrong if slot in model.open else 1.0
        best += weight
    if turn == model.turns:
        return best
    for number in range(1, len(unknown) + 1):
        for slots in permutations(sorted(unknown), number):
            branches: dict[tuple[frozenset[str], str], dict[str, float]] = defaultdict(dict)
            for user, weight in weights.items():
                for (stated, back), chance in answers(model, user, slots, answered, turn).items():
                    branches[stated, back][user] = weight * chance
            value = -cost * number * sum(weights.values())
            for (stated, back), later in branches.items():
                known = (answered | stated) - {back}
                value += enumerated(model, cost, later, (unknown - stated) | ({back} - {""}), known, turn + 1)
            best = max(best, value)
    return best


@pytest.mark.parametrize("cost", [0.02, 0.1, 0.2])
def test_the_optimum_is_that_of_enumeration_in_a_small_world(cost: float) -> None:
    """Orders of questions and single slots are enumerated too, which the recursion leaves out."""
    model = DeskModel(
        guessable=("region",), open=("item", "date"), turns=2, guessable_chance=0.8, open_chance=0.3, answers=0.4
    )
    utility, action = DeskPredictions(model, cost, {}, USERS).game.best(DeskState(1, 2), (1 / 6,) * 6)
    weights = dict.fromkeys(USERS, 1 / 6)
    expected = enumerated(model, cost, weights, frozenset(model.slots), frozenset(), 0)
    assert utility == pytest.approx(expected, abs=1e-7)
    assert action is not None, "answering at once would be no test of the recursion"


def test_the_optimal_policy_reaches_its_value(predictions: DeskPredictions) -> None:
    total = sum(predictions.game.best(start, predictions.game.prior)[0] for start in STARTS)
    assert predictions.utility(OPTIMAL, SEEN, STARTS) == pytest.approx(total / len(STARTS), abs=1e-7)


def test_no_policy_surpasses_the_optimal_one(predictions: DeskPredictions) -> None:
    optimal, open_bonus, myopic, always, now = (predictions.utility(name, SEEN, STARTS) for name in POLICIES)
    assert optimal > myopic + 0.1 and open_bonus > myopic >= max(always, now)
    assert predictions.value(NOW, SEEN, STARTS).questions == 0
    assert predictions.value(ALWAYS, SEEN, STARTS).questions > 3


@pytest.mark.seconds
@pytest.mark.parametrize("cost", MODEL.costs[:-1])
def test_a_bonus_for_open_slots_alone_is_nearly_optimal(cost: float) -> None:
    """Who knows which questions pay needs no futures: docs/explanation/desk.md."""
    predictions = DeskPredictions(MODEL, cost, desk.evaluated_sets(0)[desk.GOALS].starts, SEEN)
    optimal, open_bonus = (predictions.utility(name, SEEN, predictions.starts) for name in (OPTIMAL, OPEN_BONUS))
    assert 0 < optimal - open_bonus < 0.003


def test_asking_never_pays_at_the_last_cost() -> None:
    predictions = DeskPredictions(MODEL, MODEL.costs[-1], STARTS, SEEN)
    for name in (OPTIMAL, OPEN_BONUS, MYOPIC):
        assert predictions.value(name, USERS, STARTS) == predictions.value(NOW, USERS, STARTS)


def test_a_known_user_is_asked_as_suits_it() -> None:
    """If all users answer only the first question, the optimal policy asks one question at a time."""
    game = DeskPredictions(MODEL, 0.1, STARTS, ("first",)).game
    assert game.best(DeskState(0, 2), game.prior)[1] == (0, 1)
    game = DeskPredictions(MODEL, 0.1, STARTS, ("all",)).game
    assert game.best(DeskState(0, 2), game.prior)[0] == pytest.approx(1 - 2 * 0.1)
    game = DeskPredictions(MODEL, 0.1, STARTS, ("leaves",)).game
    assert game.best(DeskState(0, 2), game.prior)[1] == (0, 2)


def gaps_of_unseen_users(model: DeskModel, cost: float) -> list[float]:
    """By how much the optimal policy surpasses the best bonus with each pair of kinds of users that training lacks.

    A negative gap reverses the comparison: the measure is then no test of what was learned.
    """
    gaps = []
    for unseen in combinations(USERS, 2):
        prediction = DeskPredictions(model, cost, FEW_STARTS, tuple(user for user in USERS if user not in unseen))
        optimal, myopic = (prediction.utility(name, unseen, FEW_STARTS) for name in (OPTIMAL, MYOPIC))
        gaps.append(optimal - myopic)
    return gaps


@pytest.mark.seconds
@pytest.mark.parametrize("cost", MODEL.costs[:-1])
def test_no_choice_of_unseen_users_reverses_the_comparison(cost: float) -> None:
    gaps = gaps_of_unseen_users(MODEL, cost)
    assert len(gaps) == 15 and min(gaps) > 0.03


@pytest.mark.seconds
def test_with_alike_slots_and_cheap_questions_unseen_users_reverse_it() -> None:
    """The setting of a prototype: the check has something to find."""
    alike = DeskModel(guessable_chance=0.80, open_chance=0.35)
    assert min(gaps_of_unseen_users(alike, 0.05)) < -0.01
