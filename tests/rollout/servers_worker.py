"""A rank of tests/rollout/test_servers.py: `servers_worker.py FOLDER`. Rank 0's server comes back once, no more."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megatron_collab.runtime.process import RunStopped
from tests.rollout.test_servers import Stage


def main(folder: Path) -> None:
    os.environ["MASTER_PORT"] = os.environ["PORTS"]
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    leads = dist.get_rank() == 0
    run = Stage(folder / str(dist.get_rank()), replicas=1, colocated=True, staleness=0)
    if leads:
        run.begin()
    else:
        run.of_run.pool = None
        run.weights.publish = lambda version: None  # type: ignore[method-assign]

    def lose() -> None:
        if leads:
            run.servers[0].die()
            assert run.pool.lost_all()

    reason = "nothing was raised"
    try:
        run.phase(0, lose)
        run.servers[0].starts = False
        run.phase(1, lose)
        run.phase(2)
    except RunStopped as error:
        reason = str(error)
    finally:
        run.servers[0].stop()
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(reason))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
