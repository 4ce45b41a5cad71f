"""One rank of test_checkpoint.py: `checkpoint_worker LIFE FOLDER`, LIFE is first or second.

The first life of each layout trains six steps and saves after each of the first three; the second loads and
trains the last three, and once more in another layout than was saved. Of every NAME and LIFE rank N writes
FOLDER/NAME-LIFE-rankN.npz (its parameters, optimizer state and random draws at the end) and all write
FOLDER/NAME-LIFE.json (the metrics of the last three steps).
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megatron_collab.actor import model as policies
from megatron_collab.actor.actor import Actor
from megatron_collab.actor.checkpoint import Checkpoints
from megatron_collab.types import Batch
from tests.actor.ranks import make_config, make_samples, process_group

LAYOUTS: dict[str, dict[str, object]] = {
    "tp2": {"parallel.tp": 2},
    "pp2": {"parallel.pp": 2, "model.dtype": "bfloat16"},
    "dp2": {},
}
RESHARDED: dict[str, object] = {"parallel.pp": 2}
STATE = {"version": 3, "curve": [0.5, 1.0]}


def live(folder: Path, source: str, name: str, settings: Mapping[str, object], life: str) -> None:
    config = make_config(folder / "model", settings)
    policy, _ = policies.load(config)
    actor = Actor(config, policy, policies.frozen_copy(policy))
    checkpoints = Checkpoints(folder / source, keep=2)
    if life == "first":
        assert checkpoints.load_latest(actor) is None
        seed_everything(dist.get_rank())
        for step in range(3):
            actor.update(Batch(make_samples(9, step)))
            checkpoints.save(step + 1, actor, STATE if dist.get_rank() == 0 else {})
    else:
        assert checkpoints.load_latest(actor) == (3, STATE)
    metrics = [actor.update(Batch(make_samples(9, step))) for step in range(3, 6)]
    (folder / f"{name}-{life}.json").write_text(json.dumps(metrics))
    np.savez(folder / f"{name}-{life}-rank{dist.get_rank()}.npz", **snapshot(actor))


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def snapshot(actor: Actor) -> dict[str, np.ndarray]:
    found = {f"model {name}": shard for name, shard in policies.named_shards(actor.policy)}
    for index, optimizer in enumerate(actor.optimizer.chained_optimizers):
        for number, state in enumerate(optimizer.optimizer.state.values()):
            found |= {f"optimizer {index} {number} {name}": value for name, value in state.items()}
    draws = {"python": random.random(), "numpy": np.random.random(), "torch": torch.rand(2).numpy()}
    return {name: value.detach().float().numpy() for name, value in found.items()} | draws


def main(life: str, folder: Path) -> None:
    for layout, settings in LAYOUTS.items():
        with process_group(make_config(folder, settings)):
            live(folder, layout, layout, settings, life)
    if life == "second":
        with process_group(make_config(folder, RESHARDED)):
            live(folder, "tp2", "resharded", RESHARDED, life)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
