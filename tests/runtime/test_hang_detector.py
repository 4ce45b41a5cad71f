"""A run that hangs is aborted with a report of which ranks wait for which."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_collab.runtime.hang_detector import Account, describe
from megatron_collab.runtime.process import EXIT_HUNG

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all ranks of all cases of hang_detector_worker.py left."""
    root = tmp_path_factory.mktemp("hang_detector")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.runtime.hang_detector_worker", str(root)]
    subprocess.run(command, cwd=REPOSITORY, env=environment, check=True, timeout=240)
    return root


def ended(folder: Path) -> tuple[list[int], str]:
    """Exit codes, and what all ranks said."""
    said = "".join(file.read_text() for file in sorted(folder.glob("said-*.txt")))
    return json.loads((folder / "codes.json").read_text()), said


@pytest.mark.slow
def test_a_rank_that_skips_a_collective_is_named(root: Path) -> None:
    codes, said = ended(root / "skip")
    assert codes == [EXIT_HUNG] * 2, said
    assert said.count("megatron-collab: no rank made progress for launch.timeout=3 s; aborting") == 1
    assert re.search(r"rank 0: update, .*, in torch\.distributed\.all_reduce, for \d+ s", said)
    place = r"rank 1: rollouts, megatron_collab/runtime/rank0\.py:\d+ \(shared\)"
    assert re.search(place + r", in torch\.distributed\.broadcast_object_list, for \d+ s", said)
    assert "rank 0 waits for rank 1" in said
    for rank, function in enumerate(("skip", "shared")):
        written = (root / "skip" / "stacks" / f"rank-{rank}.txt").read_text()
        assert f" in {function}\n" in written


@pytest.mark.slow
def test_a_rank_that_is_stopped_ends_the_others(root: Path) -> None:
    codes, said = ended(root / "stop")
    assert codes == [EXIT_HUNG, None], said
    assert "rank 1: no answer; the process is stopped or has ended, or its machine is down" in said
    assert "rank 0 waits for rank 1" in said


@pytest.mark.slow
def test_a_rank_that_is_slow_and_moves_is_waited_for(root: Path) -> None:
    codes, said = ended(root / "slow")
    assert codes == [0, 0], said
    assert not list((root / "slow" / "stacks").iterdir()), "empty files are removed"


@pytest.mark.slow
def test_a_frozen_file_system_is_a_hang(root: Path) -> None:
    codes, said = ended(root / "frozen")
    assert codes == [EXIT_HUNG], said
    assert "rank 0: waiting for the last checkpoint to be written, megatron_collab/checkpoint/checkpointer.py:" in said
    assert "in write_bytes" in (root / "frozen" / "stacks" / "rank-0.txt").read_text()


def test_ranks_in_the_same_place_share_a_line() -> None:
    update = ("update", "a.py:1 (f)", "torch.distributed.all_reduce")
    accounts = {rank: Account(*update, 600.0 + rank) for rank in (0, 1, 2, 5)}
    accounts[4] = Account("rollouts", "b.py:2 (g)", "", 30.0)
    assert describe(accounts, 6, 600.0, Path("run/stacks")).splitlines() == [
        "no rank made progress for launch.timeout=600 s; aborting; stacks are in run/stacks",
        "  ranks 0-2, 5: update, a.py:1 (f), in torch.distributed.all_reduce, for 600 s",
        "  rank 4: rollouts, b.py:2 (g), for 30 s",
        "  rank 3: no answer; the process is stopped or has ended, or its machine is down",
        "  ranks 0-2, 5 wait for ranks 3-4",
    ]
