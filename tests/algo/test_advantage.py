from __future__ import annotations

import numpy as np
import pytest

from megatron_collab.algo.advantage import grpo


def test_by_hand():
    # mean 2, population variance (1 + 0 + 1 + 4 + 4) / 5 = 2
    np.testing.assert_allclose(grpo(np.array([1.0, 2.0, 3.0, 0.0, 4.0]), epsilon=0.0) * np.sqrt(2), [-1, 0, 1, -2, 2])


def test_invariant_to_shift_and_scale():
    rewards = np.random.default_rng(0).normal(size=8)
    np.testing.assert_allclose(grpo(rewards * 7 - 3), grpo(rewards), atol=1e-5)
    assert abs(grpo(rewards).mean()) < 1e-12
    assert grpo(rewards).std() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, 1e6])
def test_a_group_without_spread_teaches_nothing(reward):
    assert (grpo(np.full(7, reward)) == 0).all()


@pytest.mark.parametrize("reward", [np.nan, np.inf])
def test_a_missing_reward_is_refused(reward):
    with pytest.raises(ValueError, match="finite"):
        grpo(np.array([1.0, reward]))
