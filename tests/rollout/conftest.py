"""Fixtures for tests of the collector and of the servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.rollout.simulated import World


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def world(tmp_path: Path, alone: None) -> Callable[..., World]:
    """Makes simulated runs."""
    return partial(World, tmp_path)
