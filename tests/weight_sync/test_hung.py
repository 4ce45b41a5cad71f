"""A server that hangs costs itself only, and a rank that is slow nobody: several ranks, SGLang played by threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.weight_sync.hung_worker import DEAD, DEAD_RANKS, HANGING, SLOW, SLOW_RANKS

pytestmark = [pytest.mark.processes, pytest.mark.slow]

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every rank of every case found."""
    folder = tmp_path_factory.mktemp("hung")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    worker = Path(__file__).with_name("hung_worker.py")
    subprocess.run([sys.executable, str(worker), str(folder)], env=environment, check=True, timeout=200)
    return folder


def read(folder: Path, name: str, ranks: int) -> list[dict[str, Any]]:
    found = [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(ranks)]
    assert not any("error" in own for own in found), "\n".join(own.get("error", "") for own in found)
    return found


@pytest.mark.parametrize("name", HANGING)
def test_a_server_that_hangs_is_left_out_and_the_other_has_the_version(folder: Path, name: str) -> None:
    """One that goes on reading when it was given up, maybe what was overwritten, is left out too."""
    found = read(folder, name, HANGING[name][0])
    assert [own["version"] for own in found] == [1] * HANGING[name][0]
    assert list(found[0]["reasons"]) == ["1"]


def test_a_failed_publish_is_left_when_the_slowest_rank_is_through(folder: Path) -> None:
    """Otherwise the next one would wipe what that rank waits for."""
    found = read(folder, SLOW, SLOW_RANKS)
    assert [own["version"] for own in found] == [3] * SLOW_RANKS
    assert [own["through"] for own in found] == [[True] * 3] * SLOW_RANKS


def test_a_rank_that_dies_ends_the_publish_on_every_other(folder: Path) -> None:
    """Killed when it has a bucket from the other node: whoever takes from it notices at once, and the rest by them."""
    found = read(folder, DEAD, DEAD_RANKS - 1)
    assert not (folder / f"{DEAD}-{DEAD_RANKS - 1}.json").exists()
    assert all(own["said"] and "imed out" not in own["said"] for own in found)
    assert any(f"waits for ranks [2, {DEAD_RANKS - 1}] in round" in own["said"] for own in found[:2])
