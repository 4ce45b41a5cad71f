"""A rank of tests/rollout/test_scheduler.py: `manager_worker.py FOLDER`. The servers are gone once."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from megatron_collab.rollout import scheduler
from tests.rollout.simulated import DIFFERENT, FakeRay, World


def main(folder: Path) -> None:
    os.environ["MASTER_PORT"] = os.environ["PORTS"]
    dist.init_process_group("gloo")
    scheduler.ray = FakeRay()
    world = World(folder, lambda task: DIFFERENT, max_staleness=1)
    world.outage, world.broken = 1, {"train-0-3"}
    batch = world.next(0)
    found = {"revived": world.revived, "trained": world.trained(batch), "asked": sum(world.calls.values())}
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
