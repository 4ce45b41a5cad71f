"""Stand-in metrics in this process, and a Ray session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_collab.config import Config, RewardConfig
from megatron_collab.reward import metrics
from megatron_collab.runtime.ray_cluster import ray_session
from tests.reward.stand_ins import split


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "split", split)


@pytest.fixture(scope="module")
def session() -> Iterator[None]:
    with ray_session(Config(reward=RewardConfig(workers=2))):
        yield
