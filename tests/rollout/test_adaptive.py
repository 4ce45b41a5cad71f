from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_collab.rollout.adaptive import allocate


def test_futures_go_where_the_reward_is_uncertain() -> None:
    # Sums of squares 1/2, 0, 0 with 3 degrees of freedom: 1/6 for the group. Shrunk variances 1/3, 1/12, 1/12. One
    # more future removes 1/3 / (2 * 3), then / (3 * 4), then / (4 * 5) = 1/60 of the first, and 1/72 of the others.
    assert allocate([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]], extra=3, most=6) == [3, 0, 0]
    assert allocate([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]], extra=4, most=6) == [3, 1, 0]


def test_nothing_exceeds_the_most() -> None:
    assert allocate([[1.0, 0.0], [1.0, 1.0]], extra=6, most=4) == [2, 2]


def test_without_uncertainty_they_are_spread_evenly() -> None:
    assert allocate([[1.0, 1.0]] * 4, extra=8, most=6) == [2] * 4


def test_a_turn_without_a_value_gets_none() -> None:
    assert allocate([[], [1.0, 0.0], [0.0, 1.0]], extra=4, most=6) == [0, 2, 2]


@given(
    st.lists(st.lists(st.floats(-10, 10), min_size=2, max_size=4), min_size=1, max_size=8),
    st.integers(0, 20),
    st.integers(4, 8),
)
def test_as_many_are_given_as_there_is_room_for(values: list[list[float]], extra: int, most: int) -> None:
    given_G = allocate(values, extra, most)
    room = [most - len(had) for had in values]
    assert sum(given_G) == min(extra, sum(room))
    assert all(0 <= count <= free for count, free in zip(given_G, room, strict=True))


def test_the_variance_of_the_means_falls_at_the_same_number_of_futures() -> None:
    """Turns of unequal uncertainty: the advantages' summed variance over their futures, by simulation."""
    rng = np.random.default_rng(0)
    spreads, low, high = np.array([0.02, 0.05, 0.1, 1.0]), 2, 6
    errors: dict[str, list[float]] = {"fixed": [], "adaptive": []}
    for _ in range(2000):
        drawn = rng.normal(0.0, spreads[:, None], (4, high))
        errors["fixed"].append(float(np.sum(drawn[:, :4].mean(axis=1) ** 2)))
        counts = low + np.array(allocate(drawn[:, :low].tolist(), extra=8, most=high))
        assert counts.sum() == 16
        means = [drawn[i, :count].mean() for i, count in enumerate(counts)]
        errors["adaptive"].append(float(np.sum(np.square(means))))
    assert np.mean(errors["adaptive"]) < 0.8 * np.mean(errors["fixed"])
