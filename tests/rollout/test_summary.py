"""Metrics of a step and of an evaluation, computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binomtest

from megatron_collab import statistics
from megatron_collab.rollout import summary as numbers
from megatron_collab.rollout.summary import refuse_incomplete, refuse_missing
from megatron_collab.runtime.process import RunStopped
from megatron_collab.types import (
    Conversation,
    Ending,
    Finish,
    Future,
    Group,
    Message,
    Missing,
    Reward,
    Rollout,
    Score,
    Task,
    Turn,
)

CHAT = Task("chat", (Message("user", "hi"),), "goal", "", "scripted/booking")
TASK = Task("t", (Message("user", "hi"),), "goal", "answer", "scripted/booking")


def applying(task: Task) -> list[str]:
    return ["right"] if task.answer else []


def summary(groups: list[Group]) -> dict[str, float]:
    return numbers.summary(groups, applying)


def evaluated(groups: list[Group]) -> dict[str, float]:
    return numbers.evaluation_summary(groups, applying)


def rollout(value: Score, length: int = 2, missing: int = 0) -> Rollout:
    turn = Turn((1, 2, 3), tuple(range(10, 10 + length)), (-0.25,) * length, (4,) * length, Finish.STOP, "x")
    conversation = Conversation(TASK.messages, (1, 2, 3)).add_turn(turn).end(Ending.USER_DONE)
    return Rollout(conversation, (Future(conversation, {"right": value}),), Reward(value, 0.1, missing=missing))


def test_too_many_missing_scores_stop_the_run_with_the_reason() -> None:
    group = Group(TASK, (rollout(1.0), rollout(0.0), rollout(Missing("judge is down"))))
    refuse_missing([group], max_missing=0.34)
    with pytest.raises(RunStopped, match=r"1 of 3 .*reward.max_missing=0.3 .*judge is down"):
        refuse_missing([group], max_missing=0.3)


def test_too_many_incomplete_conversations_end_the_evaluation() -> None:
    """Two of four lack a score: a failed conversation, and a missing score beside a reward."""
    rollouts = (played(1.0), played(0.0), played(1.0, ending=Ending.ERROR), played(0.5, Missing("judge is down")))
    groups = [Group(TASK, rollouts)]
    refuse_incomplete("after", groups, max_missing=0.5)
    with pytest.raises(RunStopped, match=r"2 of 4 conversations of evaluation after lack a score, more than .*=0.4"):
        refuse_incomplete("after", groups, max_missing=0.4)
    shown = evaluated(groups)
    assert (shown["incomplete"], shown["missing/right"]) == (2, 1)


def test_the_summary_leaves_missing_scores_out_of_the_means_and_counts_them() -> None:
    shown = summary([Group(TASK, (rollout(1.0), rollout(0.5), rollout(Missing("down"), missing=1)))])
    assert shown["reward"] == pytest.approx(0.75)
    assert shown["score/right"] == pytest.approx(0.75)
    assert shown["missing"] == 1
    assert shown["spread"] == pytest.approx(0.25)
    assert shown["ending/user_done"] == 1.0


def simulated(rng: np.random.Generator, between: float, within: float, futures: int) -> Group:
    """Eight turns of variance `between` with futures of variance `within` about them."""
    rollouts = []
    for turn in between**0.5 * rng.standard_normal(8):
        scores = turn + within**0.5 * rng.standard_normal(futures)
        error = float(scores.std(ddof=1)) / futures**0.5
        rollouts.append(replace(played(*scores.tolist()), reward=Reward(float(scores.mean()), error)))
    return Group(TASK, tuple(rollouts))


@pytest.mark.seconds
@pytest.mark.parametrize(("between", "within", "futures"), [(1.0, 3.0, 3), (0.5, 3.0, 3), (0.0, 2.0, 2), (1.0, 0.0, 2)])
def test_the_reliability_is_the_share_of_the_turns_in_the_variance(between: float, within: float, futures: int) -> None:
    rng = np.random.default_rng(0)
    shown = numbers.comparison_summary([simulated(rng, between, within, futures) for _ in range(400)])
    assert shown["reliability"] == pytest.approx(between / (between + within / futures), abs=0.05)
    assert shown["equal_rewards"] == 0


@pytest.mark.seconds
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    ("between", "level", "counted"), [(8.0, 0.25, 1.0), (1.0, 0.25, 0.88), (0.3, 0.25, 0.5), (0.3, 0.05, 0.24)]
)
def test_the_decision_density_is_the_share_of_groups_whose_replies_differ(
    share: float, between: float, level: float, counted: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer of them are `counted` if they differ by little beside the chance in their futures; 0 if none differ."""
    monkeypatch.setattr(numbers, "_LEVEL", level)
    rng = np.random.default_rng(0)
    groups = [simulated(rng, between * (i < 800 * share), 1.0, 3) for i in range(800)]
    assert numbers.comparison_summary(groups)["decision_density"] == pytest.approx(counted * share, abs=0.05)


@pytest.mark.seconds
def test_futures_of_unequal_spread_raise_the_decision_density_a_little() -> None:
    rng = np.random.default_rng(0)
    pairs = [(simulated(rng, 0.0, 1.0, 3), simulated(rng, 0.0, 0.01, 3)) for _ in range(800)]
    groups = [Group(TASK, (*wide.rollouts[:4], *narrow.rollouts[:4])) for wide, narrow in pairs]
    assert numbers.comparison_summary(groups)["decision_density"] == pytest.approx(0.06, abs=0.05)


def test_the_decision_density_is_by_an_analysis_of_variance() -> None:
    """Two futures each: mean squares 1/4 between and 1/4 within, with 1 and 2 degrees of freedom, so p = 1 - 1/sqrt(3).

    Beside a reply without futures the mean of equal replies is known: 5/8 between, with 2 and 2, so p = 2/7; or, if its
    reward is far from theirs, p = 1/86.
    """
    replies = (replace(played(1.0, 0.0), reward=Reward(0.5, 0.5)), replace(played(0.0, 0.0), reward=Reward(0.0)))
    for group, differs in [(replies, 0), ((*replies, ended(-0.25)), 0), ((*replies, ended(-3.0)), 1)]:
        shown = numbers.comparison_summary([Group(TASK, group)])["decision_density"]
        assert shown == pytest.approx((differs - 0.25) / 0.75)


def test_the_decision_density_needs_no_test_if_nothing_varies() -> None:
    thirds = Group(TASK, tuple(replace(played(0.7, 0.7, 0.7), reward=Reward(r, 1e-17)) for r in (0.7, 0.7 + 1e-16)))
    differ = Group(TASK, (played(1.0, 1.0), replace(played(0.0, 0.0), reward=Reward(0.0))))
    varying = replace(played(1.0, 0.0), reward=Reward(0.5, 0.5))
    for group, density in [(thirds, 0), (differ, 1), (Group(TASK, (ended(0.0), ended(0.1), varying)), 1)]:
        assert numbers.comparison_summary([group])["decision_density"] == density


def test_groups_without_two_scored_futures_a_turn_have_no_reliability() -> None:
    group = Group(TASK, (played(1.0, 0.0), replace(played(0.0, 0.0), reward=Reward(0.0))))
    reliable = numbers.comparison_summary([group])
    assert reliable == {"equal_rewards": 0, "decision_density": 1.0, "reliability": 1.0}
    lost = Group(TASK, (*group.rollouts, replace(played(1.0, Missing("down")), reward=Reward(0.5))))
    assert numbers.comparison_summary([lost]) == {"equal_rewards": 0}
    assert numbers.comparison_summary([group, lost]) == reliable
    malformed = Group(TASK, (*group.rollouts, played()))
    assert numbers.comparison_summary([malformed]) == reliable, "the reward of a malformed turn has no error"
    no_reward = replace(played(Missing("down")), reward=Reward(Missing("down")))
    assert numbers.comparison_summary([Group(TASK, (*group.rollouts, no_reward))]) == reliable


def test_the_reward_of_a_turn_that_ends_the_conversation_has_no_error() -> None:
    """In most groups some turn ends it; without them the reliability would be that of other turns."""
    uncertain = replace(played(1.0, 0.0), reward=Reward(0.5, standard_error=0.5))
    asks = uncertain, replace(uncertain, reward=Reward(-0.5, standard_error=0.5))
    shown = numbers.comparison_summary([Group(TASK, (*asks, ended(0.0)))])
    assert shown["reliability"] == pytest.approx(1 - (2 * 0.25 / 3) / 0.25)
    whole = Group(TASK, (rollout(0.0), rollout(1.0)))
    assert numbers.comparison_summary([whole]) == {"equal_rewards": 0}, "conversations without futures"


def test_equal_rewards_are_counted_over_groups_that_are_compared() -> None:
    equal, other = Group(TASK, (played(1.0), played(1.0))), Group(TASK, (played(1.0), played()))
    assert numbers.comparison_summary([equal, other, Group(TASK, (played(1.0),))]) == {"equal_rewards": 0.5}
    assert numbers.comparison_summary([Group(TASK, (played(1.0),))]) == {}
    twice = Group(TASK, (played(0.5, 0.5), played(0.5, 0.5)))
    assert numbers.comparison_summary([twice]) == {"equal_rewards": 1.0, "decision_density": 0}, "no variance to divide"


def test_the_summary_of_nothing_scored_is_not_a_zero() -> None:
    assert math.isnan(summary([Group(TASK, (rollout(Missing("down")),))])["reward"])


def played(*scores: Score, ending: Ending = Ending.USER_DONE) -> Rollout:
    """A rollout with one future per score; without scores its turn is malformed."""
    (future,) = rollout(0.0).futures
    if not scores:
        malformed = Future(future.conversation.end(Ending.MALFORMED), {})
        return Rollout(malformed.conversation, (malformed,), Reward(-1.0))
    futures = tuple(Future(future.conversation.end(ending), {"right": score}) for score in scores)
    return Rollout(replace(future.conversation, ending=None), futures, Reward(1.0))


def ended(reward: float) -> Rollout:
    """A rollout whose turn ends the conversation, so that its reward has no error."""
    return replace(rollout(reward), reward=Reward(reward))


def test_every_rollout_counts_once_and_a_malformed_one_is_not_left_out() -> None:
    """Of 100 rollouts with three futures each three are malformed: 3 %, and not 3 of 294 futures."""
    rollouts = [played(1.0, 1.0, 0.0) for _ in range(97)] + [played() for _ in range(3)]
    shown = summary([Group(TASK, tuple(rollouts[at : at + 4])) for at in range(0, 100, 4)])
    assert shown["ending/malformed"] == pytest.approx(0.03)
    assert shown["ending/user_done"] == pytest.approx(0.97)
    # The last group is malformed in three of four rollouts; the fourth shows that the metric applies.
    assert shown["score/right"] == pytest.approx(0.97 * 2 / 3)
    assert shown["reward"] == pytest.approx(0.97 - 0.03)


@pytest.mark.parametrize(("task", "right"), [(TASK, 0.25), (CHAT, 0.5)], ids=["applies", "does not apply"])
def test_a_task_whose_rollouts_are_all_malformed_counts_if_a_metric_applies_to_it(task: Task, right: float) -> None:
    shown = summary([Group(task, (played(), played())), Group(TASK, (played(0.5), played(0.5)))])
    assert shown["score/right"] == right and shown["ending/malformed"] == 0.5


def test_a_rollout_of_several_futures_weighs_as_much_as_one_of_a_single_future() -> None:
    shown = summary([Group(TASK, (played(0.0, 0.0, 0.0, Missing("down")), played(1.0, ending=Ending.TURN_LIMIT)))])
    assert shown["score/right"] == 0.5
    assert shown["ending/user_done"] == shown["ending/turn_limit"] == 0.5


def test_sampled_tokens_are_those_of_the_trained_turn_once_and_of_all_futures() -> None:
    turn = Turn((1, 2), (7, 8, 9), (-0.25,) * 3, (4,) * 3, Finish.STOP, "x")
    start = Conversation(TASK.messages, (1, 2)).add_turn(turn)
    longer = start.add_messages([Message("user", "and?")], (5, 6)).add_turn(
        Turn((*start.token_ids, 5, 6), (3, 4), (-0.5,) * 2, (4,) * 2, Finish.STOP, "y")
    )
    futures = tuple(Future(conversation.end(Ending.USER_DONE), {}) for conversation in (start, longer, longer))
    group = Group(TASK, (Rollout(start, futures, Reward(1.0)), rollout(1.0, length=5)))
    assert summary([group])["sampled_tokens"] == (3 + 2 + 2) + 5


def test_the_intervals_of_an_evaluation_are_over_its_tasks() -> None:
    values = [[1.0, 1.0], [0.0, 0.0], [1.0, 1.0], [0.0, 1.0]]
    shown = evaluated([Group(TASK, tuple(rollout(value) for value in task)) for task in values])
    means = [1.0, 0.0, 1.0, 0.5]
    assert shown["score/right"] == shown["reward"] == np.mean(means)
    expected = statistics.mean(values)
    assert shown["score_low/right"] == shown["reward_low"] == expected.low > 0
    assert shown["score_high/right"] == shown["reward_high"] == expected.high < 1
    assert "reward_se" not in shown, "which is of a turn's reward over its futures"
    assert shown["score/right_pass@2"] == 0.75 and shown["score/right_pass^2"] == 0.5
    assert shown["score_low/right_pass@2"] == pytest.approx(binomtest(3, 4).proportion_ci(method="wilson").low)


def test_a_task_without_a_score_is_not_among_those_of_an_interval() -> None:
    groups = [Group(TASK, (rollout(value),)) for value in (1.0, 0.0, Missing("down"))]
    shown = evaluated(groups)
    assert shown["score/right"] == 0.5
    assert shown["score_low/right"] == pytest.approx(binomtest(1, 2).proportion_ci(method="wilson").low)
    assert math.isnan(evaluated(groups[:1])["score_low/right"])
