"""The supervised behavior as a policy: against the supervised conversations, and against enumeration slot by slot."""

from __future__ import annotations

import math
import random
from itertools import combinations

import numpy as np
import pytest

from megatron_collab.environments import desk, desk_language
from megatron_collab.environments.desk_behavior import BehaviorValues, DeskBehavior
from megatron_collab.environments.desk_language import KINDS, MODEL, STOP
from megatron_collab.environments.desk_model import USERS, DeskModel, DeskState, Questions
from megatron_collab.environments.desk_user import DeskGoal, chance_right, read_goal, unknown
from megatron_collab.types import Message
from tests.environments.desk_players import answers

COST = 0.1
SMALL = DeskModel(guessable=("region",), open=("item", "date"), guessable_chance=0.8, open_chance=0.3, answers=0.4)
BEHAVIOR = DeskBehavior(asks=0.6, asks_all=0.4, asks_again=0.5)


def test_the_chances_of_replies_sum_to_one() -> None:
    for state in (DeskState(0, 0), DeskState(0, 0, 1), DeskState(1, 3), DeskState(2, 1, 2, 1, 1)):
        chances = BEHAVIOR.chances(MODEL, state)
        assert sum(chances.values()) == pytest.approx(1) and min(chances.values()) > 0
    assert BEHAVIOR.chances(MODEL, DeskState(0, 1))[Questions(0, 1)] == pytest.approx(0.6)
    assert BEHAVIOR.chances(MODEL, DeskState(0, 1, 1))[None] == pytest.approx(0.5)
    assert BEHAVIOR.chances(MODEL, DeskState(0, 0, 1)) == {None: 1.0}
    assert BEHAVIOR.chances(MODEL, DeskState(0, 0))[None] == pytest.approx(1 - DeskBehavior().asks_needlessly)


def test_a_behavior_asks_by_its_chances() -> None:
    rng = random.Random(0)
    for task in desk.tasks(0, 200, desk.GOALS):
        goal = read_goal(task.goal)
        if slots := unknown(goal, task.messages):
            asking = DeskBehavior(asks=1.0, asks_all=1.0, asks_needlessly=0.0)
            assert desk_language.slots_asked(asking.reply(rng, goal, task.messages).content) == slots
            guessing = DeskBehavior(asks=0.0, asks_needlessly=1.0).reply(rng, goal, task.messages)
        else:
            needless = DeskBehavior(asks=0.0, asks_needlessly=1.0).reply(rng, goal, task.messages)
            assert desk_language.slots_asked(needless.content)
            guessing = DeskBehavior(asks=1.0, asks_needlessly=0.0).reply(rng, goal, task.messages)
        assert desk_language.guess(guessing.content).keys() == goal.values.keys()
        later = [*task.messages, Message("assistant", "which item ?"), Message("user", desk_language.UNSURE)]
        second = DeskBehavior(asks_again=1.0).reply(rng, goal, later)
        assert bool(desk_language.slots_asked(second.content)) == bool(slots), "a complete request needs no second one"


@pytest.fixture(scope="module")
def conversations() -> list[tuple[Message, ...]]:
    return desk.conversations(0, 2400)


@pytest.mark.seconds
@pytest.mark.parametrize("complete", [False, True])
def test_the_supervised_conversations_reach_the_behaviors_value(
    complete: bool, conversations: list[tuple[Message, ...]]
) -> None:
    """The mean over conversations within 4 standard errors, of the chance to be right and of the questions."""
    values, right, questions = BehaviorValues(MODEL, DeskBehavior()), [], []
    for messages in conversations:
        kind = next(kind for kind in KINDS if set(kind) <= set(messages[0].content.split()))
        goal = DeskGoal(kind, dict.fromkeys(desk_language.needed(kind), ""), "all", "trained")
        start = desk.state_of(goal, messages[:1])
        if (start == DeskState(0, 0)) != complete:
            continue
        expected = [values.of_turn(start, user) for user in MODEL.seen_users]
        right.append(chance_right(goal, messages, desk_language.guess(messages[-1].content)))
        right[-1] -= np.mean([value.right for value in expected])
        questions.append(sum(len(desk_language.slots_asked(m.content)) for m in messages if m.role == "assistant"))
        questions[-1] -= np.mean([value.questions for value in expected])
        assert STOP not in messages[-1].content
    for errors in (right, questions):
        standard_error = np.std(errors, ddof=1) / math.sqrt(len(errors))
        assert len(errors) >= 1000 and 1e-4 < standard_error < 0.05
        assert abs(np.mean(errors)) <= 4 * standard_error, (np.mean(errors), standard_error)


def enumerated(user: str, unknown: frozenset[str], answered: frozenset[str], turn: int, user_turns: int) -> float:
    """The utility of the behavior's next turn, over every set of slots that it may ask for and every answer."""
    asks = (BEHAVIOR.asks_again if turn else BEHAVIOR.asks) if unknown else 0.0
    right = 1.0
    for slot in unknown:
        likeliest = SMALL.open_chance if slot in SMALL.open else SMALL.guessable_chance
        right *= sum(chance**2 for chance in [likeliest, *[(1 - likeliest) / 3] * 3])
    if user == "wrong":
        right *= (1 - SMALL.wrong) ** len(answered & {*SMALL.open})
    utility, slots = (1 - asks) * right, [slot for slot in SMALL.slots if slot in unknown]
    for size in range(1, len(slots) + 1):
        for part in combinations(slots, size):
            share = (1 - BEHAVIOR.asks_all) / len(slots) / math.comb(len(slots), size)
            share += BEHAVIOR.asks_all * (size == len(slots))
            utility += asks * share * reply_value(user, part, unknown, answered, turn, user_turns)
    return utility


def reply_value(
    user: str, part: tuple[str, ...], unknown: frozenset[str], answered: frozenset[str], turn: int, user_turns: int
) -> float:
    utility = -COST * len(part)
    for (stated, back), chance in answers(SMALL, user, part, answered, turn).items() if user_turns else ():
        missing, known = (unknown - stated) | ({back} - {""}), (answered | stated) - {back}
        utility += chance * enumerated(user, missing, known, turn + 1, user_turns - 1)
    return utility


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("user_turns", [0, 1, 2, 3])
def test_the_recursion_is_that_of_enumeration_at_each_window(user: str, user_turns: int) -> None:
    values, every = BehaviorValues(SMALL, BEHAVIOR), frozenset(SMALL.slots)
    expected = enumerated(user, every, frozenset(), 0, user_turns)
    assert values.of_turn(DeskState(1, 2), user, user_turns).utility(COST) == pytest.approx(expected, abs=1e-12)
    for part, action in ((("item", "region"), Questions(1, 1)), (("date",), Questions(0, 1))):
        expected = reply_value(user, part, every, frozenset(), 0, user_turns)
        value = values.of_reply(DeskState(1, 2), action, user, user_turns)
        assert value.utility(COST) == pytest.approx(expected, abs=1e-12)


def test_a_complete_request_is_asked_about_once_at_most() -> None:
    """Then a guess is right, unless the user left: parts of all sizes from 1 to 8 are equally likely."""
    values, complete = BehaviorValues(MODEL, DeskBehavior()), DeskState(0, 0)
    leaves = np.mean([MODEL.leaving(size, 0) for size in range(1, 9)])
    assert values.of_turn(complete, "leaves").right == pytest.approx(1 - DeskBehavior().asks_needlessly * leaves)
    for user in USERS:
        assert values.of_turn(complete, user).questions == pytest.approx(DeskBehavior().asks_needlessly * 4.5)


@pytest.mark.seconds
def test_a_longer_window_than_the_longest_changes_nothing() -> None:
    values, often = BehaviorValues(MODEL, DeskBehavior(asks=0.9, asks_again=0.8)), DeskState(4, 1)
    for user in USERS:
        assert values.of_turn(often, user).right == pytest.approx(values.of_turn(often, user, 80).right, abs=1e-6)
