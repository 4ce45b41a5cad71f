"""The order of rows: unchanged for one source, by shares for several, and from the position alone."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from megatron_collab.data.mixture import Mixture, Pick
from megatron_collab.data.sources import TrainingSource
from megatron_collab.settings import ConfigError


def mixture(*settings: dict, counts: tuple[int, ...], per_step: int = 4, keys: tuple = ()) -> Mixture:
    entries = [TrainingSource(source=f"{number}.jsonl", **entry) for number, entry in enumerate(settings)]
    return Mixture(entries, counts, per_step, keys)


def picks_at(mixture: Mixture, positions: range, seed: int = 3) -> list[Pick]:
    return [mixture.place(position, seed) for position in positions]


def test_the_order_of_a_single_source_never_changes() -> None:
    """Every epoch has an order from (seed, epoch); a run of an earlier version resumes with the same rows."""
    alone = mixture({}, counts=(10,))
    expected = [int(np.random.default_rng((3, at // 10)).permutation(10)[at % 10]) for at in range(40)]
    assert [pick.row for pick in picks_at(alone, range(40))] == expected
    assert [pick.row for pick in picks_at(alone, range(40), seed=4)] != expected


def test_shares_hold_at_every_position_and_every_epoch_takes_every_row_once() -> None:
    mixed = mixture({"weight": 2}, {"weight": 1}, {"weight": 0.5}, counts=(7, 5, 3))
    picks = picks_at(mixed, range(700))
    for source, share in enumerate((4 / 7, 2 / 7, 1 / 7)):
        counts = np.cumsum([pick.source == source for pick in picks])
        assert np.abs(counts - share * np.arange(1, 701)).max() <= 1
    for source, count in enumerate((7, 5, 3)):
        rows = [pick.row for pick in picks if pick.source == source]
        epochs = [tuple(rows[at : at + count]) for at in range(0, len(rows) - count, count)]
        assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
        assert len(set(epochs)) > 2


def test_a_position_depends_on_nothing_before_it() -> None:
    settings = {"until_step": 50}, {"weight": 3}, {"from_step": 10, "until_step": 60}
    whole = picks_at(mixture(*settings, counts=(7, 5, 3)), range(400))
    for at in (399, 0, 201, 40, 239):  # a fresh one each time, as after a resume
        assert mixture(*settings, counts=(7, 5, 3)).place(at, 3) == whole[at]


def test_epochs_are_passes_over_each_source() -> None:
    mixed = mixture({"epochs": 3}, {"epochs": 1}, counts=(20, 90))
    counts = Counter(pick for pick in picks_at(mixed, range(150)))
    assert {counts[Pick(0, row)] for row in range(20)} == {3} and {counts[Pick(1, row)] for row in range(90)} == {1}
    with pytest.raises(ConfigError, match="all have epochs or none has"):
        mixture({"epochs": 3}, {}, counts=(20, 90))


def test_steps_bound_when_a_source_is_used() -> None:
    mixed = mixture({"until_step": 3}, {"from_step": 2, "until_step": 6}, counts=(5, 6))
    by_step = [{pick.source for pick in picks_at(mixed, range(step * 4, step * 4 + 4))} for step in range(6)]
    assert by_step == [{0}, {0}, {0, 1}, {1}, {1}, {1}]
    rows = [pick.row for pick in picks_at(mixed, range(24)) if pick.source == 1]
    assert sorted(rows[:6]) == list(range(6))  # an epoch goes on over the border of a phase
    assert mixed.empty_step(6, 4) is None and mixed.empty_step(7, 4) == 6


def test_far_positions_need_no_list_of_all_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A billion steps cost no memory, and windows of any size give the same rows."""
    far = mixture({"weight": 3, "until_step": 10**9}, {}, {"weight": 0.01}, counts=(5, 6, 7))
    near = mixture({"weight": 3}, {}, {"weight": 0.01}, counts=(5, 6, 7))
    assert picks_at(far, range(3000)) == picks_at(near, range(3000))
    assert [pick.source for pick in picks_at(far, range(4 * 10**9 - 8, 4 * 10**9 + 4))].count(0) == 6
    expected = picks_at(near, range(500))
    monkeypatch.setattr("megatron_collab.data.mixture._WINDOW", 7)
    assert picks_at(near, range(500)) == expected


def test_a_curriculum_is_sorted_in_every_epoch() -> None:
    levels = np.array([3, 1, 2, 1, 3, 2])
    for sign in (1, -1):
        sorted_by = mixture({}, counts=(6,), keys=(sign * levels,))
        epochs = [[pick.row for pick in picks_at(sorted_by, range(at, at + 6))] for at in range(0, 60, 6)]
        assert all([levels[row] for row in epoch] == sorted(levels, reverse=sign < 0) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 2  # equal ones are shuffled
