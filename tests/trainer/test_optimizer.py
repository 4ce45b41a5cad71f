from __future__ import annotations

import pytest

from megatron_collab.settings import OptimConfig
from megatron_collab.trainer.network import learning_rate


def rates(**options: object) -> list[float]:
    return [learning_rate(OptimConfig(lr=1.0, **options), steps=6, step=step) for step in range(6)]


def test_constant():
    assert rates() == [1.0] * 6


def test_warm_up_reaches_the_peak_in_its_last_step():
    assert rates(warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


def test_linear_would_be_zero_after_the_last_step():
    assert rates(schedule="linear") == pytest.approx([1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])
    assert rates(schedule="linear", warmup_steps=2) == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])
