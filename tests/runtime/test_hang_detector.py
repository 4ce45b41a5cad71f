"""A run that hangs is aborted with a report of which ranks wait for which."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from megatron_collab.checkpoint.checkpointer import Checkpoints
from megatron_collab.config import Config
from megatron_collab.runtime import hang_detector
from megatron_collab.runtime.hang_detector import Account, describe
from megatron_collab.runtime.process import EXIT_HUNG, beat
from megatron_collab.runtime.rank0 import from_leader
from tests.ranks import run_side_by_side

TIMEOUT = 3.0  # launch.timeout
BEAT = 0.3  # seconds: a loaded machine makes much more of it


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the output of all ranks of all cases."""
    root = tmp_path_factory.mktemp("hang_detector")
    for case in CASES:
        (root / case).mkdir()
    for case, ended in run_side_by_side(run, {case: ranks for case, (_, ranks) in CASES.items()}, root).items():
        (root / case / "codes.json").write_text(json.dumps([code for code, _ in ended]))
    return root


def run(case: str, root: Path) -> None:
    """Run on a rank of `case`; its output is in said-RANK.txt."""
    rank, folder = int(os.environ["RANK"]), root / case
    os.dup2(os.open(folder / f"said-{rank}.txt", os.O_WRONLY | os.O_CREAT), 2)
    dist.init_process_group("gloo", timeout=hang_detector.collective_timeout(TIMEOUT))
    with hang_detector.watch(TIMEOUT, folder):
        CASES[case][0](rank, folder)
        dist.barrier()


def skip(rank: int, folder: Path) -> None:
    """Rank 1 skips a collective in which rank 0 waits for it."""
    beat("rollouts" if rank else "update")
    if rank:
        from_leader(lambda: None)
    else:
        dist.all_reduce(torch.zeros(1))
        dist.all_reduce(torch.zeros(1))


def stop(rank: int, folder: Path) -> None:
    """Rank 1 is stopped by the kernel."""
    while True:
        from_leader(lambda: time.sleep(0.05))
        dist.barrier()
        if rank:
            os.kill(os.getpid(), signal.SIGSTOP)


def slow(rank: int, folder: Path) -> None:
    """Rank 1 takes longer than launch.timeout but makes progress; rank 0 waits for it."""
    for _ in range(int(2 * TIMEOUT / BEAT) if rank else 0):
        time.sleep(BEAT)
        beat()
    dist.barrier()


def frozen(rank: int, folder: Path) -> None:
    """The file system of the checkpoint blocks every write."""
    os.mkfifo(folder / "pipe")  # without a reader
    checkpoints = Checkpoints(folder, keep=1, timeout=TIMEOUT)
    checkpoints._writing = checkpoints._thread.submit(lambda: (folder / "pipe").write_bytes(b".") and None)
    checkpoints.finish()


CASES: dict[str, tuple[Callable[[int, Path], None], int]] = {  # with their ranks
    "skip": (skip, 2),
    "stop": (stop, 2),
    "slow": (slow, 2),
    "frozen": (frozen, 1),
}


def ended(folder: Path) -> tuple[list[int], str]:
    """Exit codes, and the output of all ranks."""
    output = "".join(file.read_text() for file in sorted(folder.glob("said-*.txt")))
    return json.loads((folder / "codes.json").read_text()), output


@pytest.mark.processes
@pytest.mark.slow
def test_a_rank_that_skips_a_collective_is_named(root: Path) -> None:
    codes, output = ended(root / "skip")
    assert codes == [EXIT_HUNG] * 2, output
    assert output.count("megatron-collab: no rank made progress for launch.timeout=3 s; aborting") == 1
    assert re.search(r"rank 0: update, .*, in torch\.distributed\.all_reduce, for \d+ s", output)
    place = r"rank 1: rollouts, megatron_collab/runtime/rank0\.py:\d+ \(shared\)"
    assert re.search(place + r", in torch\.distributed\.broadcast_object_list, for \d+ s", output)
    assert "rank 0 waits for rank 1" in output
    for rank, function in enumerate(("skip", "shared")):
        written = (root / "skip" / "stacks" / f"rank-{rank}.txt").read_text()
        assert f" in {function}\n" in written


@pytest.mark.processes
@pytest.mark.slow
def test_a_rank_that_is_stopped_ends_the_others(root: Path) -> None:
    codes, output = ended(root / "stop")
    assert codes == [EXIT_HUNG, None], output
    assert "rank 1: no answer; the process is stopped or has ended, or its machine is down" in output
    assert "rank 0 waits for rank 1" in output


@pytest.mark.processes
@pytest.mark.slow
def test_a_slow_rank_that_makes_progress_is_not_aborted(root: Path) -> None:
    codes, output = ended(root / "slow")
    assert codes == [0, 0], output
    assert not list((root / "slow" / "stacks").iterdir()), "empty files are removed"


@pytest.mark.processes
@pytest.mark.slow
def test_a_frozen_file_system_is_a_hang(root: Path) -> None:
    codes, output = ended(root / "frozen")
    assert codes == [EXIT_HUNG], output
    assert (
        "rank 0: waiting for the last checkpoint to be written, megatron_collab/checkpoint/checkpointer.py:" in output
    )
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


def test_with_nccl_the_oldest_open_operation_is_named(one_rank: Config) -> None:
    """The dump has NCCL's form, which torch uses for gloo's operations as well."""
    dist.all_reduce(torch.zeros(1))
    entry = json.loads(c10d._dump_fr_trace_json(includeCollectives=True, onlyActive=False))["entries"][-1]
    kinds = [("all_reduce", "completed", "tp"), ("send", "started", "pp"), ("all_gather", "scheduled", "dp")]
    entries = [
        entry | {"profiling_name": f"nccl:{name}", "state": state, "process_group": ["1", group], "time_created_ns": at}
        for at, (name, state, group) in enumerate(kinds)
    ]
    assert entry.keys() == entries[0].keys()

    def dump(**_: bool) -> bytes:
        return json.dumps({"entries": entries}).encode()

    assert hang_detector.nccl_operation(dump) == "nccl:send of pp"
    entries[1:] = []
    assert hang_detector.nccl_operation(dump) == ""
    assert hang_detector.nccl_operation(lambda **_: b'{"version": "2.10"}') == ""  # as before the first operation
    assert hang_detector.nccl_operation() == ""  # without NCCL


@pytest.mark.gpu
def test_on_a_gpu_the_operation_that_waits_is_named(one_gpu: Config) -> None:
    dist.all_reduce(torch.zeros(1, device="cuda"))  # the first waits for the GPU while it starts NCCL
    torch.cuda.synchronize()
    torch.cuda._sleep(10**10)  # cycles
    dist.all_reduce(torch.zeros(1, device="cuda"))
    assert hang_detector.nccl_operation().startswith("nccl:all_reduce of ")
    torch.cuda.synchronize()
    assert hang_detector.nccl_operation() == ""
