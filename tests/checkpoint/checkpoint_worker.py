"""One rank of test_checkpoint.py: `checkpoint_worker LIFE FOLDER`, LIFE is first or second.

The first life of each layout trains the policy (in dp2 also a critic) for six steps and saves after each of the
first three; the second loads and trains the last three, and once more in layouts other than was saved. Of every
NAME and LIFE rank N writes FOLDER/NAME-LIFE-rankN.npz (parameters, optimizer state and random draws at the end)
and all write FOLDER/NAME-LIFE.json (the metrics of the last three steps). The second life also saves with a disk
that is full for rank 1 alone, and each rank writes what it was told to FOLDER/full-rankN.txt.
"""

from __future__ import annotations

import json
import random
import resource
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megatron_collab.checkpoint import hf
from megatron_collab.checkpoint.checkpointer import Checkpoints
from megatron_collab.runtime.process import RunStopped
from megatron_collab.trainer.critic import Critic
from megatron_collab.trainer.megatron import model as policies
from megatron_collab.trainer.trainer import PolicyTrainer
from megatron_collab.types import Batch
from tests.ranks import learn, make_config, make_samples, process_group

LAYOUTS: dict[str, dict[str, object]] = {
    "tp2": {"parallel.tp": 2},
    "pp2": {"parallel.pp": 2, "model.dtype": "bfloat16"},
    "vpp2": {"parallel.pp": 2, "parallel.vpp": 2},
    "dp2": {"algo.advantage": "gae", "algo.critic_lr": 1e-3},
}
# NAME: (the layout that saved, the layout that goes on from it)
RESHARDED: dict[str, tuple[str, dict[str, object]]] = {
    "tp2-pp2": ("tp2", {"parallel.pp": 2}),
    "tp2-dp2": ("tp2", {}),
    "tp2-vpp2": ("tp2", LAYOUTS["vpp2"]),
    "vpp2-tp2": ("vpp2", LAYOUTS["tp2"]),
    "dp2-tp2": ("dp2", LAYOUTS["dp2"] | LAYOUTS["tp2"]),
}
STATE = {"version": 3, "curve": [0.5, 1.0]}


def build(folder: Path, settings: Mapping[str, object]) -> PolicyTrainer:
    config = make_config(folder / "model", {**settings, "algo.kl_coef": 0.0})
    critic = Critic(config) if config.algo.advantage == "gae" else None
    return PolicyTrainer(config, policies.load(config)[0], critic=critic)


def live(folder: Path, source: str, name: str, settings: Mapping[str, object], life: str) -> None:
    actor = build(folder, settings)
    with Checkpoints(folder / source, keep=2, timeout=60.0) as checkpoints:
        if life == "first":
            assert checkpoints.load_latest(actor) is None
            seed_everything(dist.get_rank())
            for step in range(3):
                learn(actor, Batch(make_samples(9, step)))
                checkpoints.save(step + 1, actor, STATE if dist.get_rank() == 0 else {})
        else:
            assert checkpoints.load_latest(actor) == (3, STATE)
        metrics = [learn(actor, Batch(make_samples(9, step))) for step in range(3, 6)]
    (folder / f"{name}-{life}.json").write_text(json.dumps(metrics))
    np.savez(folder / f"{name}-{life}-rank{dist.get_rank()}.npz", **snapshot(actor))


def fill_the_disk(folder: Path) -> None:
    actor = build(folder, LAYOUTS["tp2"])
    learn(actor, Batch(make_samples(9, 0)))
    checkpoints = Checkpoints(folder / "full", keep=2, timeout=60.0)
    checkpoints.save(1, actor, {})
    checkpoints.finish()
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))
    checkpoints.save(2, actor, {})
    try:
        checkpoints.finish()
    except RunStopped as error:
        (folder / f"full-rank{dist.get_rank()}.txt").write_text(str(error))


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def snapshot(actor: PolicyTrainer) -> dict[str, np.ndarray]:
    found = {}
    for network, trainable in actor.trainables.items():
        found |= {f"{network} model {name}": shard for name, shard in hf.named_shards(trainable.chunks)}
        for index, optimizer in enumerate(trainable.optimizer.chained_optimizers):
            for number, state in enumerate(optimizer.optimizer.state.values()):
                found |= {f"{network} optimizer {index} {number} {name}": value for name, value in state.items()}
    draws = {"python": random.random(), "numpy": np.random.random(), "torch": torch.rand(2).numpy()}
    return {name: value.detach().float().numpy() for name, value in found.items()} | draws


def main(life: str, folder: Path) -> None:
    for layout, settings in LAYOUTS.items():
        with process_group(make_config(folder, settings)):
            live(folder, layout, layout, settings, life)
    if life == "second":
        for name, (source, settings) in RESHARDED.items():
            with process_group(make_config(folder, settings)):
                live(folder, source, name, settings, life)
        with process_group(make_config(folder, LAYOUTS["tp2"])):
            fill_the_disk(folder)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
