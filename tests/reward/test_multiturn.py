from __future__ import annotations

import math
from pathlib import Path

import pytest

from megatron_collab.reward.multiturn import malformed_last, reward_function, turn_reward
from megatron_collab.runtime.process import RunStopped
from megatron_collab.types import Conversation, Ending, Failed, Future, Missing, Reward, Rollout, Score

DOWN = Missing("judge is down")


def test_the_reward_of_a_small_tree_computed_by_hand() -> None:
    """right: (1 + 0 + 1) / 3 = 2/3; tokens: (10 + 20 + 30) / 3 = 20; reward: 2/3 - 0.01 * 20 = 7/15."""
    futures = [{"right": 1.0, "tokens": 10.0}, {"right": 0.0, "tokens": 20.0}, {"right": 1.0, "tokens": 30.0}]
    reward = turn_reward(futures, {"right": 1.0, "tokens": -0.01})
    assert reward.value == pytest.approx(7 / 15)
    assert reward.parts == pytest.approx({"right": 2 / 3, "tokens": -0.2})
    assert reward.missing == 0
    # Sums 0.9, -0.2, 0.7: mean 7/15, squares of the deviations 0.18778, 0.44444, 0.05444.
    variance = (0.9 - 7 / 15) ** 2 + (-0.2 - 7 / 15) ** 2 + (0.7 - 7 / 15) ** 2
    assert reward.standard_error == pytest.approx(math.sqrt(variance / 2) / math.sqrt(3))


def test_a_missing_score_is_left_out_of_its_mean_alone_and_counted() -> None:
    """right: (1 + 0 + 1) / 3; style has two scores: (0.5 + 0.7) / 2 = 0.6; reward: 2/3 + 2 * 0.6."""
    futures = [{"right": 1.0, "style": 0.5}, {"right": 0.0, "style": DOWN}, {"right": 1.0, "style": 0.7}]
    reward = turn_reward(futures, {"right": 1.0, "style": 2.0})
    assert reward.value == pytest.approx(2 / 3 + 1.2)
    assert reward.missing == 1
    assert reward.standard_error == pytest.approx(0.2)  # of the two whole futures: sums 2.0 and 2.4


def test_a_metric_missing_in_every_future_leaves_no_reward() -> None:
    futures = [{"right": 1.0, "style": DOWN}, {"right": 0.0, "style": DOWN}]
    reward = turn_reward(futures, {"right": 1.0, "style": 0.1})
    assert reward.value == Missing("style: judge is down")
    assert reward.missing == 2


def test_a_metric_that_is_only_shown_does_not_decide_whether_there_is_a_reward() -> None:
    reward = turn_reward([{"right": 1.0, "style": DOWN}], {"right": 1.0, "style": 0.0})
    assert reward.value == 1.0
    assert reward.missing == 1


def test_a_metric_that_does_not_apply_is_left_out() -> None:
    assert turn_reward([{"right": 1.0}, {"right": 0.0}], {"right": 1.0, "style": 5.0}).value == 0.5


def test_a_future_that_broke_off_does_not_make_a_metric_apply() -> None:
    """The scorer cannot know what would have applied to half a conversation: it reports all as missing."""
    futures = [{"right": 1.0}, {"right": DOWN, "style": DOWN}]
    reward = turn_reward(futures, {"right": 1.0, "style": 5.0})
    assert reward.value == 1.0
    assert reward.missing == 1


def test_a_clamp_limits_the_weighted_part_of_its_metric_alone() -> None:
    """tokens: -0.01 * (10 + 190) / 2 = -1, limited to -0.4; right: 2 * 1/2 = 1, not limited. Reward: 1 - 0.4."""
    futures = [{"right": 1.0, "tokens": 10.0}, {"right": 0.0, "tokens": 190.0}]
    for mode in ("mr", "single_turn"):
        reward = turn_reward(futures, {"right": 2.0, "tokens": -0.01}, mode, {"tokens": 0.4})
        assert reward.value == pytest.approx(0.6)
        assert reward.parts == pytest.approx({"right": 1.0, "tokens": -0.4})
        assert reward.standard_error == pytest.approx((1.9 + 1.9) / 2)  # of 1.9 and -1.9, before the clamp


def test_the_clamp_is_of_the_mean_and_not_of_each_future() -> None:
    """(0.5 * 4 + 0.5 * -2) / 2 = 0.5 is within 1, though 2 is not."""
    assert turn_reward([{"m": 4.0}, {"m": -2.0}], {"m": 0.5}, "mr", {"m": 1.0}).value == pytest.approx(0.5)


def test_one_future_is_the_single_turn_reward_and_has_no_spread() -> None:
    reward = turn_reward([{"right": 1.0, "tokens": 10.0}], {"right": 1.0, "tokens": -0.01})
    assert reward.value == pytest.approx(0.9)
    assert reward.standard_error == 0.0


def test_a_task_without_any_weighted_metric_has_no_reward() -> None:
    value = turn_reward([{"shown": 1.0}], {"shown": 0.0, "right": 1.0}).value
    assert isinstance(value, Missing)
    assert "reward.weights" in value.why


def group(*rewards: tuple[Score, bool]) -> list[Rollout]:
    """Rollouts with a reward each, and whether they are malformed."""
    rollouts = []
    for value, malformed in rewards:
        start = Conversation((), ()).end(Ending.MALFORMED if malformed else Ending.USER_DONE)
        rollouts.append(Rollout(start, (Future(start, {}),), Reward(value)))
    return rollouts


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        (
            [(0.5, False), (-2.0, False), (-1.0, True)],
            [0.5, -2.0, -2.0],
        ),  # a long reply cost more than a cut one
        ([(0.5, False), (0.0, False), (-1.0, True)], [0.5, 0.0, -1.0]),
        ([(-1.0, True), (-1.0, True)], [-1.0, -1.0]),
        ([(DOWN, False), (-1.0, True)], [DOWN, -1.0]),
    ],
)
def test_a_malformed_turn_has_at_most_the_worst_reward(
    rewards: list[tuple[Score, bool]], expected: list[Score]
) -> None:
    assert [rollout.reward.value for rollout in malformed_last(group(*rewards))] == expected


OUTSIDE = """
from megatron_collab.reward.multiturn import RewardFunction
from megatron_collab.runtime.process import RunStopped
from megatron_collab.types import Missing, Reward

def raises(futures, weights):
    raise ValueError("no such\\n  thing")

def number(futures, weights):
    return 1.0

def infinite(futures, weights):
    return Reward(float("inf"))

def missing(futures, weights):
    return Reward(Missing("later"))

def finite(futures, weights):
    return Reward(weights["right"])

def stops(futures, weights):
    raise RunStopped("enough")

class Empty(RewardFunction):
    pass
"""


def test_a_function_from_outside_that_fails_gives_a_reward_that_has_failed(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OUTSIDE)

    def reward(name: str) -> Reward:
        return reward_function(f"{file}:{name}", {}, {"right": 0.5}, {})([])

    for name, reason in (
        ("raises", "ValueError: no such thing"),
        ("number", "TypeError: returned float; return a Reward"),
        ("infinite", "ValueError: a reward of inf; give a finite number, or Missing"),
        ("Empty", "NotImplementedError: "),
    ):
        assert reward(name) == Reward(Failed(f"reward.mode={file}:{name}: {reason}"), missing=1)
    assert reward("missing") == Reward(Missing("later")) and reward("finite") == Reward(0.5)
    with pytest.raises(RunStopped, match="enough"):
        reward("stops")
