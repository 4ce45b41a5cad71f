from __future__ import annotations

import pytest

from megatron_collab.config import future_range, load, reward_to_go_gamma


@pytest.mark.parametrize(
    ("futures", "expected"), [(3, (3, 3)), ("0", (0, 0)), ("adaptive(2,6)", (2, 6)), ("adaptive(3, 5)", (3, 5))]
)
def test_futures_are_a_number_or_a_range(futures: int | str, expected: tuple[int, int]) -> None:
    assert future_range(futures) == expected


@pytest.mark.parametrize("futures", [-1, "many", "adaptive(1,6)", "adaptive(4,4)", "adaptive(2)", "2.5"])
def test_other_futures_are_refused(futures: int | str) -> None:
    with pytest.raises(ValueError, match="adaptive"):
        future_range(futures)


def test_turn_credits_and_their_discount() -> None:
    assert reward_to_go_gamma("last") is reward_to_go_gamma("equal") is None
    assert [reward_to_go_gamma(f"reward_to_go({gamma})") for gamma in ("1", "0.95", ".5")] == [1.0, 0.95, 0.5]


@pytest.mark.parametrize("credit", ["first", "reward_to_go", "reward_to_go(2)", "reward_to_go(-1)", "reward_to_go(x)"])
def test_other_credits_are_refused(credit: str) -> None:
    with pytest.raises(ValueError, match="gamma"):
        reward_to_go_gamma(credit)


def test_calls_need_no_quotes_of_hydra() -> None:
    config = load(["experiment=gsm8k", "rollout.futures=adaptive(2,6)", "reward.turn_credit=reward_to_go(0.9)"])
    assert config.rollout.futures == "adaptive(2,6)"
    assert config.reward.turn_credit == "reward_to_go(0.9)"


def test_settings_of_a_metric_and_of_the_two_budgets() -> None:
    config = load(["experiment=gsm8k", "reward.metrics.accuracy.judge=false", "rollout.future.max_new_tokens=7"])
    assert config.reward.metrics == {"accuracy": {"judge": False}}
    assert (config.rollout.turn.max_new_tokens, config.rollout.future.max_new_tokens) == (32, 7)
