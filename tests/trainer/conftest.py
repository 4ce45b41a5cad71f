"""What the tests of the actor share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_collab.actor import model as policies
from megatron_collab.config import Config
from tests.helpers import free_port


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Config]:
    """The configuration of a single fp32 rank on CPU, inside its process group."""
    config = Config()
    config.launch.device = "cpu"
    config.model.dtype = "float32"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": free_port()}.items():
            patch.setenv(name, str(value))
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        with policies.init_parallel(config):
            yield config
