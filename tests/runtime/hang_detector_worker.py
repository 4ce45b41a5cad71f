"""The ranks of tests/runtime/test_hang_detector.py: `… FOLDER` forks those of all cases, which run side by side.

What rank N of a case says is in FOLDER/CASE/said-N.txt, the exit codes in FOLDER/CASE/codes.json.
"""
# ruff: noqa: E402 (patches come before Megatron-Core)

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_collab import patches

patches.apply("megatron")

from megatron_collab.checkpoint.checkpointer import Checkpoints
from megatron_collab.config import Config
from megatron_collab.runtime import hang_detector, heartbeat
from megatron_collab.runtime.rank0 import from_leader
from tests.helpers import free_port

TIMEOUT = 3.0  # launch.timeout
BEAT = 0.3  # seconds: a loaded machine makes much more of it
PATIENCE = 120.0  # seconds until what has not ended never will


def skip(rank: int, folder: Path) -> None:
    """Rank 1 goes on to something else where rank 0 waits for it."""
    heartbeat.at("rollouts" if rank else "update")
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
        (folder / f"ready-{rank}").touch()


def slow(rank: int, folder: Path) -> None:
    """Rank 1 takes longer than launch.timeout, and moves; rank 0 waits for it."""
    for _ in range(int(2 * TIMEOUT / BEAT) if rank else 0):
        time.sleep(BEAT)
        heartbeat.beat()
    dist.barrier()


def frozen(rank: int, folder: Path) -> None:
    """What a checkpoint is written to takes nothing."""
    os.mkfifo(folder / "pipe")  # which nobody reads
    checkpoints = Checkpoints(folder, keep=1, timeout=TIMEOUT)
    checkpoints._writing = checkpoints._thread.submit(lambda: (folder / "pipe").write_bytes(b".") and None)
    checkpoints.finish()


CASES: dict[Callable[[int, Path], None], int] = {skip: 2, stop: 2, slow: 2, frozen: 1}  # with their ranks


def run(case: Callable[[int, Path], None], rank: int, folder: Path) -> None:
    os.dup2(os.open(folder / f"said-{rank}.txt", os.O_WRONLY | os.O_CREAT), 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    config = Config()
    config.run.dir, config.launch.timeout = str(folder), TIMEOUT
    dist.init_process_group("gloo", timeout=hang_detector.collective_timeout(TIMEOUT))
    with hang_detector.armed(config):
        case(rank, folder)
        dist.barrier()


def main(root: Path) -> None:
    fork = multiprocessing.get_context("fork")
    started: dict[str, list[Any]] = {}
    for case, ranks in CASES.items():
        folder = root / case.__name__
        folder.mkdir()
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        started[case.__name__] = [fork.Process(target=run, args=(case, rank, folder)) for rank in range(ranks)]
        for process in started[case.__name__]:
            process.start()
    stopped, deadline = started["stop"][1], time.monotonic() + PATIENCE
    while not (root / "stop" / "ready-1").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(stopped.pid, signal.SIGSTOP)
    for name, processes in started.items():
        for process in processes:
            if process is not stopped:
                process.join(max(0.0, deadline - time.monotonic()))
        (root / name / "codes.json").write_text(json.dumps([process.exitcode for process in processes]))
        for process in processes:
            process.kill()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
