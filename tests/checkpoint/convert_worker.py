"""One rank of test_convert.py: `convert_worker FOLDER`.

For every family and layout: start from the converted checkpoint FOLDER/FAMILY/start, in a model of other weights,
and save FOLDER/FAMILY/LAYOUT, a checkpoint of training. Rank 0 adds what it saw to FOLDER/FAMILY/LAYOUT.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

from megatron_collab.checkpoint.checkpointer import Checkpoints
from megatron_collab.trainer.megatron import model as policies
from megatron_collab.trainer.trainer import PolicyTrainer
from tests.ranks import make_config, process_group

FAMILIES = ("qwen3", "qwen2", "llama", "mistral", "qwen3_moe")
TIED = ("qwen2",)
LAYOUTS: dict[str, dict[str, object]] = {"tp2": {"parallel.tp": 2}, "pp2": {"parallel.pp": 2}}


def convert(folder: Path, layout: str, settings: dict[str, object]) -> None:
    if "moe" in folder.name and "parallel.tp" in settings:
        settings = settings | {"parallel.sequence_parallel": True, "parallel.ep": 2}
    config = make_config(folder / "other", {**settings, "algo.kl_coef": 0.0, "optim.weight_decay": 0.0})
    model, _ = policies.load(config)
    actor = PolicyTrainer(config, model)
    with Checkpoints(folder / "start", keep=1, timeout=60.0) as checkpoints:
        began = checkpoints.load_latest(actor)
    for optimizer in actor.policy.optimizer.chained_optimizers:  # a step with no gradient: state, and the same weights
        optimizer._init_optimizer_states_with_dummy_values()
    with Checkpoints(folder / layout, keep=1, timeout=60.0) as checkpoints:
        checkpoints.save(1, actor, {})
    if dist.get_rank() == 0:
        (folder / f"{layout}.json").write_text(json.dumps(began))


def main(folder: Path) -> None:
    for layout, settings in LAYOUTS.items():
        with process_group(make_config(folder, settings)):
            for family in FAMILIES:
                convert(folder / family, layout, settings)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
