"""The published reward formulas, each against values worked out by hand."""

from __future__ import annotations

import math

import pytest

from megatron_collab.reward.multiturn import turn_reward
from megatron_collab.types import Missing, Score

DOWN = Missing("judge is down")
WEIGHTS = {"accuracy": 1.0, "interactivity": 1.0, "token_amount": -5e-4}

# Three futures: 400, 1,000 and 4,000 tokens.
FUTURES: list[dict[str, Score]] = [
    {"accuracy": 1.0, "interactivity": 0.5, "token_amount": 400.0},
    {"accuracy": 0.0, "interactivity": 1.0, "token_amount": 1000.0},
    {"accuracy": 1.0, "interactivity": 0.9, "token_amount": 4000.0},
]


def test_paper() -> None:
    """R_ext + R_int a future, R_int = -min(5e-4 * tokens, 1) + R_LLM:

    1 + 0.5 - 0.2 = 1.3; 0 + 1 - 0.5 = 0.5; 1 + 0.9 - min(2, 1) = 0.9; mean 2.7 / 3 = 0.9.
    """
    reward = turn_reward(FUTURES, WEIGHTS, "paper")
    assert reward.value == pytest.approx(0.9)
    assert reward.parts == pytest.approx({"accuracy": 2 / 3, "interactivity": 0.8, "token_amount": -1.7 / 3})
    # Deviations from the mean 0.9: 0.4, -0.4, 0.
    assert reward.standard_error == pytest.approx(math.sqrt((0.16 + 0.16) / 2 / 3))


def test_collabllm() -> None:
    """Tokens in thousands, weight -0.5, no clamp:

    1 + 0.5 - 0.2 = 1.3; 0 + 1 - 0.5 = 0.5; 1 + 0.9 - 2 = -0.1; mean 1.7 / 3.
    """
    thousands = [{**future, "token_amount": future["token_amount"] / 1000} for future in FUTURES]  # type: ignore[operator]
    reward = turn_reward(thousands, {**WEIGHTS, "token_amount": -0.5}, "collabllm")
    assert reward.value == pytest.approx(1.7 / 3)
    assert reward.parts == pytest.approx({"accuracy": 2 / 3, "interactivity": 0.8, "token_amount": -0.9})
    squares = (1.3 - 1.7 / 3) ** 2 + (0.5 - 1.7 / 3) ** 2 + (-0.1 - 1.7 / 3) ** 2
    assert reward.standard_error == pytest.approx(math.sqrt(squares / 2 / 3))


def test_verl_clamps_each_weighted_mean() -> None:
    """Weight -1e-3 on the mean of 1,800 tokens is -1.8, clamped to -1 (the paper clamps each future, here the mean):

    2 * 2/3 is 4/3, clamped to 1; 1 * 0.8; -1: 0.8 in all.
    """
    reward = turn_reward(FUTURES, {"accuracy": 2.0, "interactivity": 1.0, "token_amount": -1e-3}, "verl")
    assert reward.parts == pytest.approx({"accuracy": 1.0, "interactivity": 0.8, "token_amount": -1.0})
    assert reward.value == pytest.approx(0.8)


def test_verl_with_the_recipes_weights() -> None:
    """Words weigh -1e-4: 2/3 + 0.8 - 0.18."""
    reward = turn_reward(FUTURES, {**WEIGHTS, "token_amount": -1e-4}, "verl")
    assert reward.value == pytest.approx(2 / 3 + 0.8 - 0.18)


def test_single_turn() -> None:
    """1 + 0.5 - 5e-4 * 400."""
    reward = turn_reward(FUTURES[:1], WEIGHTS, "single_turn")
    assert (reward.value, reward.standard_error) == (pytest.approx(1.3), 0.0)


def test_mr_clamps_nothing_unless_told() -> None:
    """2/3 + 0.8 - 5e-4 * 1800."""
    assert turn_reward(FUTURES, WEIGHTS).value == pytest.approx(2 / 3 + 0.8 - 0.9)


def test_only_the_metric_called_token_amount_is_cut_in_the_papers_formula() -> None:
    """-min(0.5 * 4, 1) = -1, and cost -2."""
    reward = turn_reward([{"token_amount": 4.0, "cost": 4.0}], {"token_amount": -0.5, "cost": -0.5}, "paper")
    assert reward.parts == pytest.approx({"token_amount": -1.0, "cost": -2.0})


LACKING: list[dict[str, Score]] = [FUTURES[0], {**FUTURES[1], "interactivity": DOWN}, FUTURES[2]]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("paper", (1.3 + 0.9) / 2),  # the futures that have all
        ("collabllm", (1.3 - 0.1) / 2),
        ("verl", 2 / 3 + 0.7 - 0.9),  # each metric over the futures that have it
        ("mr", 2 / 3 + 0.7 - 0.9),
    ],
)
def test_a_missing_score_is_never_a_zero(mode: str, expected: float) -> None:
    reward = turn_reward(LACKING, WEIGHTS, mode)
    assert reward.value == pytest.approx(expected)
    assert reward.missing == 1


@pytest.mark.parametrize("mode", ["paper", "collabllm"])
def test_without_a_whole_future_the_mean_of_sums_is_missing(mode: str) -> None:
    futures = [{"accuracy": 1.0, "interactivity": DOWN}, {"accuracy": Missing("no truth"), "interactivity": 1.0}]
    weights = {"accuracy": 1.0, "interactivity": 1.0}
    assert turn_reward(futures, weights, mode).value == Missing("accuracy: no truth")
    assert turn_reward(futures, weights, "verl").value == 2.0


@pytest.mark.parametrize("mode", ["mr", "paper", "collabllm", "verl", "single_turn"])
def test_a_metric_that_no_future_has_leaves_no_reward(mode: str) -> None:
    futures = [{**future, "interactivity": DOWN} for future in FUTURES]
    reward = turn_reward(futures, WEIGHTS, mode)
    assert isinstance(reward.value, Missing) and "judge is down" in reward.value.why
    assert reward.missing == 3
