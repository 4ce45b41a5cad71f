"""A Ray session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_collab.config import Config, RewardConfig
from megatron_collab.runtime.ray_cluster import ray_session


@pytest.fixture(scope="module")
def session() -> Iterator[None]:
    with ray_session(Config(reward=RewardConfig(workers=2))):
        yield
