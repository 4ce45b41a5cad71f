from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from megatron_collab.algo.credit import samples_of, turn_credits
from megatron_collab.config import Config
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
    Sample,
    Score,
    Task,
    Turn,
)

TASK = Task("t", (Message("user", "hi"),), "goal", "answer", "scripted/booking")
BETWEEN = (7, 8)  # what a user says, as tokens


def config(**settings: object) -> Config:
    made = Config()
    made.reward.weights = {"right": 1.0}
    for name, value in settings.items():
        setattr(made.reward if name in ("mode", "turn_credit") else made.rollout, name, value)
    return made


def conversation(turns: int, length: int = 2, rewards: Sequence[float] = ()) -> Conversation:
    """`turns` turns of `length` tokens 10, 11, …; `rewards` are what users gave for them."""
    made = Conversation(TASK.messages, (1, 2, 3))
    for number in range(turns):
        if number:
            made = made.add_messages([Message("user", "go on")], BETWEEN)
        ids = tuple(range(10, 10 + length))
        made = made.add_turn(Turn(made.token_ids, ids, (-0.25 - number,) * length, 4, Finish.STOP, "x"))
        made = made.add_reward(rewards[number] if rewards else 0.0)
    return made


def rollout(value: Score, length: int = 2) -> Rollout:
    """One trained turn, scored alone."""
    start = conversation(1, length).end(Ending.USER_DONE)
    return Rollout(start, (Future(start, {"right": value}),), Reward(value))


def branched(*values: Score, turns: int = 2) -> Rollout:
    """A trained turn with a future of `turns` turns for each value."""
    futures = tuple(Future(conversation(turns).end(Ending.TURN_LIMIT), {"right": value}) for value in values)
    known = [value for value in values if not isinstance(value, Missing)]
    return Rollout(conversation(1), futures, Reward(sum(known) / len(known)))


def whole(value: float, rewards: Sequence[float]) -> Rollout:
    """A whole conversation with a reward for each turn, and one at its end."""
    start = conversation(len(rewards), rewards=rewards).end(Ending.TURN_LIMIT)
    return Rollout(start, (Future(start, {"right": value}),), Reward(value))


def trained(sample: Sample) -> list[float]:
    """The advantages of the trained tokens, in their order."""
    return sample.advantages[sample.loss_mask > 0].tolist()


def test_a_sample_is_the_prompt_and_the_turn_with_a_loss_on_the_turn_alone() -> None:
    first, second = samples_of(Group(TASK, (rollout(1.0), rollout(0.0, length=3))), config())
    assert first.token_ids.tolist() == [1, 2, 3, 10, 11]
    assert first.loss_mask.tolist() == [0, 0, 0, 1, 1]
    assert first.log_probs.tolist() == [0, 0, 0, -0.25, -0.25]
    assert (first.advantages[:3] == 0).all()
    assert first.advantages[3] == pytest.approx(1.0, abs=1e-3)
    assert second.advantages[3:] == pytest.approx(np.full(3, -1.0), abs=1e-3)


def test_a_rollout_without_a_reward_leaves_its_group() -> None:
    with_outage = samples_of(Group(TASK, (rollout(1.0), rollout(Missing("judge is down")), rollout(0.0))), config())
    without = samples_of(Group(TASK, (rollout(1.0), rollout(0.0))), config())
    assert [s.advantages.tolist() for s in with_outage] == [s.advantages.tolist() for s in without]


def test_a_group_with_one_reward_teaches_nothing() -> None:
    assert samples_of(Group(TASK, (rollout(1.0), rollout(Missing("judge is down")))), config()) == []


def test_what_is_said_between_two_trained_turns_is_not_trained() -> None:
    samples = samples_of(Group(TASK, (whole(1.0, [0, 0]), whole(0.0, [0, 0]))), config(futures=0))
    for sample, log_probs in zip(samples, ([0, 0, 0, -0.25, -0.25, 0, 0, -1.25, -1.25],) * 2, strict=True):
        assert sample.token_ids.tolist() == [1, 2, 3, 10, 11, *BETWEEN, 10, 11]
        assert sample.loss_mask.tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 1]
        assert sample.log_probs.tolist() == log_probs


@pytest.mark.parametrize(
    ("credit", "expected"),
    [
        ("last", [None, None, 4.5]),
        ("equal", [4.5, 4.5, 4.5]),
        ("reward_to_go(1)", [4.5, 3.5, 3.0]),
        # 3 at the end, 0.5 for the second turn, 1 for the first: 3; 0.5 + 3 / 2; 1 + 2 / 2
        ("reward_to_go(0.5)", [2.0, 2.0, 3.0]),
        ("reward_to_go(0)", [1.0, 0.5, 3.0]),
    ],
)
def test_credits_worked_out_by_hand(credit: str, expected: list[float | None]) -> None:
    assert turn_credits(whole(1.0, [1.0, 0.5, 2.0]), credit) == expected


def test_equal_credit_compares_conversations() -> None:
    good, bad = samples_of(Group(TASK, (whole(1.0, [0, 0]), whole(0.0, [0, 0, 0]))), config(futures=0))
    assert trained(good) == pytest.approx([1.0] * 4, abs=1e-3)
    assert trained(bad) == pytest.approx([-1.0] * 6, abs=1e-3)


def test_last_credit_trains_the_last_turn_alone() -> None:
    options = config(futures=0, turn_credit="last")
    good, _ = samples_of(Group(TASK, (whole(1.0, [0, 0]), whole(0.0, [0, 0]))), options)
    assert good.loss_mask.tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 1]


def test_reward_to_go_compares_all_turns_of_the_group() -> None:
    options = config(futures=0, turn_credit="reward_to_go(1)")
    samples = samples_of(Group(TASK, (whole(1.0, [1.0, 0]), whole(0.0, [0, 0]))), options)
    # Credits 2, 1 and 0, 0: mean 0.75, standard deviation sqrt(0.6875).
    expected = (np.array([2, 1, 0, 0]) - 0.75) / np.sqrt(0.6875)
    assert trained(samples[0]) + trained(samples[1]) == pytest.approx(np.repeat(expected, 2).tolist(), abs=1e-4)


def test_later_turns_are_compared_with_their_siblings_on_the_scale_of_the_group() -> None:
    group = Group(TASK, (branched(1.0, 0.0), branched(1.0, 1.0)))
    assert len(samples_of(group, config())) == 2  # the trained turns alone
    first, second, *later = samples_of(group, config(train_turns="all"))
    assert (trained(first), trained(second)) == (pytest.approx([-1, -1], abs=1e-4), pytest.approx([1, 1], abs=1e-4))
    # Values 1, 0 | 1, 1: standard deviation sqrt(3/16); the means of the siblings are 0.5 and 1.
    scale = np.sqrt(3 / 16)
    expected = [0.5 / scale, -0.5 / scale, 0.0, 0.0]
    assert [trained(sample)[0] for sample in later] == pytest.approx(expected, abs=1e-3)
    for sample in later:
        assert sample.loss_mask.tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 1]


def test_a_later_turn_without_a_score_is_not_trained() -> None:
    group = Group(TASK, (branched(1.0, Missing("down"), 0.0), branched(1.0, Missing("down"))))
    _, _, *later = samples_of(group, config(train_turns="all"))
    assert len(later) == 2  # those with a score and a sibling that has one


def test_a_trained_turn_that_ended_the_conversation_has_no_later_turns() -> None:
    group = Group(TASK, (rollout(0.0), branched(1.0, 0.0)))
    assert len(samples_of(group, config(train_turns="all"))) == 2 + 2
