"""One rank of test_actor.py: `update_worker FOLDER OUT`; FOLDER is the model, rank 0 writes OUT, JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from megatron_collab.trainer.critic import Critic
from megatron_collab.trainer.megatron import model as policies
from megatron_collab.trainer.trainer import PolicyTrainer
from megatron_collab.types import Batch
from tests.ranks import learn, make_config, make_samples, process_group

LAYOUTS: dict[str, dict[str, object]] = {
    "tp2": {"parallel.tp": 2},
    "tp2-sp": {"parallel.tp": 2, "parallel.sequence_parallel": True, "train.tokens_per_micro_batch": 80},
    "pp2": {"parallel.pp": 2, "train.tokens_per_micro_batch": 80},
    "pp2-vpp2": {"parallel.pp": 2, "parallel.vpp": 2, "train.tokens_per_micro_batch": 40},
    "dp2": {"train.tokens_per_micro_batch": 50},
}
# Those of a model with experts, which lies in the folder `experts` beside the other.
EXPERT_LAYOUTS: dict[str, dict[str, object]] = {
    "ep2": {"parallel.ep": 2, "train.tokens_per_micro_batch": 50},
    "tp2-sp-ep2": {"parallel.tp": 2, "parallel.sequence_parallel": True, "parallel.ep": 2},
}
STAGES: dict[str, dict[str, object]] = {
    "rl": {},
    "rl-mini": {"algo.mini_batches": 3, "algo.clip_low": 0.01, "algo.clip_high": 0.02},
    "gspo": {"algo.loss": "gspo", "algo.average": "sequence", "algo.advantage": "rloo", "algo.mini_batches": 2},
    "cispo": {"algo.loss": "cispo", "algo.correction": "truncated", "algo.kl": "k2", "algo.entropy_coef": 0.01},
    "gae": {"algo.advantage": "gae", "algo.kl_in": "reward", "algo.kl": "k1", "algo.critic_lr": 1e-3},
    "sft": {"train.stage": "sft"},
}


def train(folder: Path, settings: Mapping[str, object]) -> dict[str, object]:
    """Inside a process group: metrics of three updates on two batches, and the log-probs after them."""
    config = make_config(folder, settings)
    policy, _ = policies.load(config)
    critic = Critic(config) if config.algo.advantage == "gae" else None
    actor = PolicyTrainer(config, policy, policies.frozen_copy(policy), critic)
    batches = [Batch(make_samples(11, seed)) for seed in (1, 2, 1)]
    metrics = [learn(actor, batch) for batch in batches]
    found = {"metrics": metrics, "log_probs": [row.tolist() for row in actor.log_probs(batches[0].samples)]}
    everywhere: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    assert all(other == found for other in everywhere), "the ranks disagree"
    return found


def main(folder: Path, out: Path) -> None:
    found = {}
    for layout, settings in LAYOUTS.items():
        with process_group(make_config(folder, settings)):
            found |= {f"{layout} {stage}": train(folder, settings | STAGES[stage]) for stage in STAGES}
            leader = dist.get_rank() == 0
    for layout, settings in EXPERT_LAYOUTS.items():
        with process_group(make_config(folder, settings)):
            found[layout] = train(folder.with_name("experts"), settings)
    if leader:
        out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
