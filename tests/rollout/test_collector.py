from __future__ import annotations

import math

import pytest

from megatron_collab.rollout.collector import TooManyMissing, refuse_missing, summary
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

TASK = Task("t", (Message("user", "hi"),), "goal", "answer", "scripted/booking")


def rollout(value: Score, length: int = 2, missing: int = 0) -> Rollout:
    turn = Turn((1, 2, 3), tuple(range(10, 10 + length)), (-0.25,) * length, (4,) * length, Finish.STOP, "x")
    conversation = Conversation(TASK.messages, (1, 2, 3)).add_turn(turn).end(Ending.USER_DONE)
    return Rollout(conversation, (Future(conversation, {"right": value}),), Reward(value, 0.1, missing=missing))


def test_too_many_missing_scores_stop_the_run_with_the_reason() -> None:
    group = Group(TASK, (rollout(1.0), rollout(0.0), rollout(Missing("judge is down"))))
    refuse_missing([group], max_missing=0.34)
    with pytest.raises(TooManyMissing, match=r"1 of 3 .*reward.max_missing=0.3 .*judge is down"):
        refuse_missing([group], max_missing=0.3)


def test_the_summary_leaves_missing_scores_out_of_the_means_and_counts_them() -> None:
    shown = summary([Group(TASK, (rollout(1.0), rollout(0.5), rollout(Missing("down"), missing=1)))])
    assert shown["reward"] == pytest.approx(0.75)
    assert shown["score/right"] == pytest.approx(0.75)
    assert shown["missing"] == 1
    assert shown["spread"] == pytest.approx(0.25)
    assert shown["ending/user_done"] == 1.0


def test_the_summary_of_nothing_scored_is_not_a_zero() -> None:
    assert math.isnan(summary([Group(TASK, (rollout(Missing("down")),))])["reward"])
