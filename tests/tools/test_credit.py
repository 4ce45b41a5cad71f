"""The bench of credit: what rules are compared with, what they get besides rewards, and that it has every shipped rule.

The values of the rules themselves are tested in tests/algo/.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from megatron_collab.environments import desk, desk_language
from megatron_collab.environments.desk_behavior import DeskBehavior
from megatron_collab.environments.desk_language import MODEL
from megatron_collab.environments.desk_model import ALL
from megatron_collab.environments.desk_user import DeskGoal, read_goal, unknown
from megatron_collab.settings.schema import TURN_CREDITS
from megatron_collab.types import Conversation, Message, Task
from tools.bench import credit
from tools.bench.credit import COST, FUTURES, ROLLOUTS, TURNS, Critic, Played, Player

NEVER_ASKS = DeskBehavior(asks=0.0, asks_needlessly=0.0)


@cache
def first_message(missing: int) -> tuple[DeskGoal, Task]:
    """A request of a user who answers all, in which so many open slots are unknown."""
    for task in desk.tasks(0, 400):
        goal = replace(read_goal(task.goal), user=ALL)
        slots = unknown(goal, task.messages)
        if len(task.messages) == 1 and len(slots) == missing and set(slots) <= set(MODEL.open):
            return goal, replace(task, goal=goal.dump())
    raise AssertionError("no such task")


def replies(*texts: str) -> list[Message]:
    return [Message("assistant", text) for text in texts]


@pytest.fixture(scope="module")
def groups() -> list[Played]:
    """Two groups of different tasks, played by a policy that asks often."""
    asking = DeskBehavior(asks=0.7, asks_needlessly=0.3, asks_again=0.6)
    return [credit.play_group(asking, task, 4) for task in (first_message(1)[1], first_message(2)[1])]


def test_every_shipped_rule_is_measured() -> None:
    settings = {setting for settings in credit.RULES.values() for setting in settings}
    assert settings > {f"reward.turn_credit={name}" for name in TURN_CREDITS}
    assert settings > {"algo.advantage=turn_gae", "algo=refuel", "rollout.train_turns=all"}


@pytest.mark.seconds
def test_the_reference_is_the_advantage_of_the_turn() -> None:
    """A complete request: the policy asks for one to eight slots in half of its first replies, then guesses, rightly.

    So V = 1 - 1/2 * 4.5 * cost, and a question for n slots has Q = 1 - n * cost.
    """
    goal, task = first_message(0)
    player, value = Player(DeskBehavior(asks_needlessly=0.5), task, 400), 1 - 0.5 * 4.5 * COST
    guess, question = replies(goal.answer, desk_language.ask(MODEL.slots[:2]))
    for reply, q in [(guess, 1.0), (question, 1 - 2 * COST)]:
        assert np.mean(player.advantages(task.messages, reply)) == pytest.approx(q - value, abs=0.04)


def test_the_chance_of_the_answer_is_the_policys() -> None:
    """It guesses with the chance 3/4 and draws the unknown slot among four values; once it knows all, it is certain."""
    goal, task = first_message(1)
    player, words = Player(DeskBehavior(asks=0.25), task, 1), 2 + 2 * len(goal.values)
    (slot,) = unknown(goal, task.messages)
    question = replies(desk_language.ask([slot]))

    def answered(value: str) -> float:
        return player.answer_log_prob([*task.messages, *question, Message("user", f"{slot} {value} .")])

    assert player.answer_log_prob(task.messages) == pytest.approx(math.log(0.75 * 0.25) / words)
    assert answered(goal.values[slot]) == 0
    other = next(value for value in desk_language.VALUES[slot] if value != goal.values[slot])
    assert answered(other) == -math.inf, "the policy guesses what the user said"


def test_the_critic_has_the_mean_of_what_followed_at_the_same_state() -> None:
    """Without questions a guess is right with the chance that its drawn value has; complete requests are right."""
    (_, complete), (_, lacking) = first_message(0), first_message(1)
    critic = Critic([credit.play_group(NEVER_ASKS, task, 1) for task in (complete, lacking)], 0.9)
    players = [Player(NEVER_ASKS, task, 1) for task in (complete, lacking)]
    values = [critic.value(player, player.task.messages) for player in players]
    assert values[0] == 1 and values[1] == pytest.approx(MODEL.open_chance)
    met_nowhere = [*complete.messages, *replies(desk_language.ask(MODEL.slots)), Message("user", "not sure .")]
    assert critic.value(players[0], met_nowhere) == pytest.approx(np.mean(values))


def test_the_critic_discounts_what_is_turns_away() -> None:
    """The policy always asks for the slot, once, and is told: 1 - cost, one turn later."""
    _, task = first_message(1)
    asks = DeskBehavior(asks=1.0, asks_again=0.0)
    critic = Critic([credit.play_group(asks, task, 1)], 0.9)
    assert critic.value(Player(asks, task, 1), task.messages) == pytest.approx(0.9 * (1 - COST))


@pytest.mark.seconds
def test_rules_get_what_the_turns_brought(groups: list[Played]) -> None:
    """What the user told, and how much likelier it made the answer: numbers for each turn, which sum to the score."""
    for played in groups:
        ended = max((credit.conversation(played, i, 0) for i in range(ROLLOUTS)), key=lambda future: len(future.turns))
        facts, gains = (scores_of(played, ended, rule) for rule in ("next_user_turn", "igpo"))
        goal, states = played.player.goal, [ended.messages[:at] for at in ended.turn_positions]
        missing = [len(unknown(goal, messages)) for messages in (*states, ended.messages)]
        assert [*facts] == [before - after for before, after in pairwise(missing)]
        chances = [math.exp(played.player.answer_log_prob(messages)) for messages in states]
        assert sum(gains) == pytest.approx(chances[-1] - chances[0]) and gains[-1] == 0
        assert len(facts) == len(gains) > 1 and sum(facts) > 0


def utility_of(played: Played, ended: Conversation) -> float:
    return credit.utility(played.player.goal, ended, paid=False)["desk_utility"]


def scores_of(played: Played, ended: Conversation, rule: str) -> tuple[float, ...]:
    future = credit.future_of(played.player, ended, rule)
    ((name, scores),) = future.turn_scores.items()
    assert future.scores[name] == pytest.approx(sum(scores))
    return scores


@pytest.mark.seconds
def test_refuel_compares_the_best_and_the_worst_turn(groups: list[Played]) -> None:
    for played, credits in zip(groups, credit.credits_of(groups, "refuel", groups), strict=True):
        futures = [[credit.conversation(played, i, j) for j in range(FUTURES)] for i in range(ROLLOUTS)]
        rewards = [np.mean([utility_of(played, future) for future in row]) for row in futures]
        best, worst = int(np.argmax(rewards)), int(np.argmin(rewards))
        gap = rewards[best] - rewards[worst]
        tokens = [credit.token(i, 0, played.start, played.start) for i in (best, worst)]
        assert credits == pytest.approx(dict(zip(tokens, (gap, -gap), strict=True)), abs=1e-6) and gap > 0


@pytest.mark.seconds
def test_turn_gae_subtracts_the_critics_value(groups: list[Played]) -> None:
    """At the last turn of a conversation, before the normalization, which keeps the order: utility less V."""
    credits, critic = credit.credits_of(groups, "turn_gae", groups), Critic(groups, 0.99)
    pairs = []
    for played, of_group in zip(groups, credits, strict=True):
        for i in range(ROLLOUTS):
            ended = credit.conversation(played, i, 0)
            at = ended.turn_positions[-1]
            surplus = utility_of(played, ended) - critic.value(played.player, ended.messages[:at])
            pairs.append((of_group[credit.token(i, 0, at, played.start)], surplus))
    assert np.corrcoef(np.array(pairs).T)[0, 1] == pytest.approx(1, abs=1e-6)


@pytest.mark.seconds
def test_a_rule_has_a_correlation_for_the_turns_that_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credit, "RULES", {rule: credit.RULES[rule] for rule in ("equal", "mr_1", "refuel")})
    monkeypatch.setattr(credit, "BOOTSTRAPS", 2)
    results = credit.measure(DeskBehavior(asks=0.7, asks_again=0.6), desk.tasks(0, 4), 4)
    both = [f"{row}/{turns}" for row in ("equal", "agreement") for turns in TURNS]
    assert results.keys() == {*both, "mr_1/first", "refuel/first"}
    assert results["equal/first"][0] == pytest.approx(results["mr_1/first"][0]), "one conversation is one future"
