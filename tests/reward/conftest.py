"""A Ray session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_collab.runtime.ray_cluster import ray_session


@pytest.fixture(scope="module")
def session() -> Iterator[None]:
    with ray_session(3):
        yield
