"""The plan of a node's pinned memory against what torch's allocator would reserve for the run's own optimizer."""

from __future__ import annotations

import pytest

from megatron_collab.launch.trainer_specs import network_spec
from megatron_collab.planning import memory
from megatron_collab.rehearsal.ledger import PINNED
from megatron_collab.rehearsal.world import rank_on_paper
from megatron_collab.trainer.megatron import model
from megatron_collab.trainer.network import Trainable

# Layers without TransformerEngine, in which this process has imported Megatron: they have the same parameters.
LOCAL = ["launch.device=cpu", "model.fp8=null", "model.fp8_recipe=delayed", "rollout.server.fp8=false"]


@pytest.mark.processes
@pytest.mark.parametrize(
    "experiment", ["train_8b", *(pytest.param(name, marks=pytest.mark.slow) for name in ("train_70b", "qwen3_0_6b"))]
)
def test_a_node_pins_what_is_planned(experiment: str) -> None:
    """What torch's allocator reserves for the storages of the run's own optimizer, first the masters alone."""
    config, shape = memory.read_run([f"experiment={experiment}", *LOCAL])
    stages = memory.plan_memory(config, shape)
    fullest = max(range(len(stages)), key=lambda stage: sum(part.host for part in stages[stage]))
    with rank_on_paper(config, shape, fullest * config.launch.ranks // len(stages)) as ledger:
        trainable = Trainable(model.build(network_spec(config), shape), config.optim, config.parallel.offload)
        with trainable.offloaded():
            masters = ledger.usage.now[PINNED]
        for optimizer in trainable.optimizer.chained_optimizers:
            optimizer._init_optimizer_states_with_dummy_values()
        with trainable.offloaded():
            pinned = ledger.usage.now[PINNED]
    assert 0 < masters < pinned * 0.4
    assert memory.host_memory(config, stages) == pytest.approx(pinned * config.launch.nproc_per_node, rel=0.05)
