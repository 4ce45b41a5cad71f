"""Context parallelism by TransformerEngine's own Python over reference kernels: two ranks together are one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import parallel_state

from megatron_collab.checkpoint import hf
from megatron_collab.config import Config
from megatron_collab.launch.trainer_specs import trainer_spec
from megatron_collab.settings.schema import ParallelConfig
from megatron_collab.trainer.microbatches import context_slice
from megatron_collab.trainer.trainer import PolicyTrainer
from megatron_collab.types import Batch
from tests.ranks import init_parallel, learn, make_config, make_model, make_pairs, make_samples, run_ranks
from tests.rehearsal.te_cpu import test_layers as engine
from tests.trainer.test_routing import planted

pytestmark = pytest.mark.processes

RANKS = 2
PAIRS = {"train.stage": "dpo", "algo.dpo.precompute": False}


@pytest.fixture(scope="module")
def rank_results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = make_model(tmp_path_factory.mktemp("context") / "model", experts=True)
    return run_ranks(measure, RANKS, folder, engine=True)


def measure(folder: Path) -> dict[str, Any]:
    """As one of the ranks: by context size, states and gradients of one pass, log-probs and metrics of two updates.

    Without context parallelism the ranks are data parallel. Updates replay the experts of routers, except those by
    pairs.
    """
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    config, results = Config(), {}
    config.launch.device, config.launch.timeout = "cpu", 60.0
    for cp in (1, RANKS):
        config.parallel = ParallelConfig(cp=cp)
        FP8GlobalStateManager.reset()  # it holds the groups of the previous layout
        with init_parallel(config):
            results[f"pass {cp}"] = one_pass(config)
            replaying = make_config(folder, {"parallel.cp": cp, "rollout.routing_replay": True})
            trainer = PolicyTrainer(trainer_spec(replaying))
            batches = [Batch(planted(make_samples(11, seed))) for seed in (1, 2)]
            results[f"scored {cp}"] = trainer.log_probs(trainer.policy.chunks, batches[0])
            results[f"updates {cp}"] = [learn(trainer, batch) for batch in batches]
            of_pairs = PolicyTrainer(trainer_spec(make_config(folder, {"parallel.cp": cp, **PAIRS})))
            results[f"pairs {cp}"] = [learn(of_pairs, Batch(make_pairs(11, seed))) for seed in (1, 2)]
            del results[f"pairs {cp}"][0]["dpo/accuracy"]  # margins are rounding errors before the policy moves
    return results


def one_pass(config: Config) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """(the tokens of this rank, their states [1, t, h], its summands of the gradients by name)."""
    model = engine.build(config, {"model_type": "llama", **engine.MODELS["llama"]}, True, "float32", None)
    for chunk in model.chunks:
        chunk.zero_grad_buffer()
    bounds = np.cumsum([0, *engine.LENGTHS])
    kept = torch.from_numpy(context_slice(bounds, config.parallel.cp, parallel_state.get_context_parallel_rank()))
    tokens, positions, mask, packing = engine.inputs()
    hidden = model.chunks[0](tokens[:, kept], positions[:, kept], mask, packing)
    upstream = torch.randn((1, bounds[-1], hidden.shape[-1]), generator=torch.Generator().manual_seed(2))
    (hidden.float() * upstream[:, kept]).sum().backward()
    return kept, hidden.detach(), {name: shard.main_grad.clone() for name, shard in hf.named_shards(model.chunks)}


def test_ranks_together_are_one(rank_results: list[dict[str, Any]]) -> None:
    _, whole, gradients = rank_results[0]["pass 1"]
    for rank in rank_results:
        kept, hidden, _ = rank[f"pass {RANKS}"]
        assert engine.error(hidden, whole[:, kept]) < 1e-5
    for name, gradient in gradients.items():
        assert engine.error(sum(rank[f"pass {RANKS}"][2][name] for rank in rank_results), gradient) < 1e-5, name


def test_updates_are_the_same(rank_results: list[dict[str, Any]]) -> None:
    for rank in rank_results:
        for here, expected in zip(rank[f"scored {RANKS}"], rank["scored 1"], strict=True):
            np.testing.assert_allclose(here, expected, rtol=0, atol=1e-5)
        for which in ("updates", "pairs"):
            expected = [pytest.approx(metrics, rel=1e-5, abs=1e-5) for metrics in rank[f"{which} 1"]]
            assert rank[f"{which} {RANKS}"] == expected
