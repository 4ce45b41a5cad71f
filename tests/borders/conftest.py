from __future__ import annotations

import os

import pytest

from megatron_collab.runtime import process, signals

RANK = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def no_variables_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = [name for name in os.environ if name.startswith(("PET_", "TORCHELASTIC_"))]
    for name in (*RANK, *defaults, process.LAUNCHER, signals.LAUNCHER):
        monkeypatch.delenv(name, raising=False)
