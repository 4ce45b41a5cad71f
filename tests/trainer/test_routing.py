"""Routing replay: routers use the given experts in every layout, forward, backward and when recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from megatron.core import parallel_state

from megatron_collab.algo.advantages import with_advantages
from megatron_collab.checkpoint.hf import unwrap
from megatron_collab.config import Config
from megatron_collab.launch.trainer_specs import trainer_spec
from megatron_collab.trainer.megatron.routing import ReplayedRouter
from megatron_collab.trainer.microbatches import collate, replayed
from megatron_collab.trainer.prefix_tree import plan_trees
from megatron_collab.trainer.trainer import PolicyTrainer
from megatron_collab.types import Batch, Sample, ScoredBatch
from tests.ranks import EXPERTS, HF, init_parallel, make_config, make_model, make_samples, run_ranks

LAYERS, COUNT, WIDTH = HF["num_hidden_layers"], EXPERTS["num_experts"], EXPERTS["num_experts_per_tok"]
SETTINGS: dict[str, object] = {
    "rollout.routing_replay": True,
    "rollout.turn.temperature": 1.0,
    "algo.kl_coef": 0.0,
    "optim.clip_grad": 1e9,
    "train.tokens_per_micro_batch": 60,  # several on each rank: forward and backward passes interleave
}
LAYOUTS: dict[str, dict[str, object]] = {
    "tp2-sp-selective": {"parallel.tp": 2, "parallel.sequence_parallel": True, "parallel.recompute": "selective"},
    "ep2-full": {"parallel.ep": 2, "parallel.recompute": "full"},
    "pp2-selective": {"parallel.pp": 2, "parallel.recompute": "selective"},
    "pp2-vpp2-full": {"parallel.pp": 2, "parallel.vpp": 2, "parallel.recompute": "full"},
}


def planted(samples: Sequence[Sample], seed: int = 0) -> tuple[Sample, ...]:
    """The samples with random experts for every token of every layer."""
    rng = np.random.default_rng(seed)

    def routing(tokens: int) -> np.ndarray:
        chosen = rng.permuted(np.tile(np.arange(COUNT), (tokens, LAYERS, 1)), axis=-1)[..., :WIDTH]
        return chosen.reshape(tokens, -1).astype(np.uint8)

    return tuple(replace(sample, routing=routing(len(sample.token_ids))) for sample in samples)


def test_a_router_uses_the_given_experts_and_learns_from_them() -> None:
    config = SimpleNamespace(sequence_parallel=False, moe_router_topk=2)
    router: Any = SimpleNamespace(config=config, layer_number=2)
    replay = ReplayedRouter(router)
    scores = torch.tensor([[1.0, 2.0, 3.0, 4.0]] * 2, requires_grad=True)

    def chosen() -> tuple[torch.Tensor, torch.Tensor]:
        return router.router_replay.get_replay_topk(
            scores, 2, None, None, lambda scores, k, num_groups, group_topk: torch.topk(scores, k, dim=1)
        )

    assert chosen()[1].tolist() == [[3, 2], [3, 2]]
    replay.take(torch.tensor([[3, 2, 0, 1], [3, 2, -1, -1]], dtype=torch.int16))
    values, experts = chosen()
    assert experts.tolist() == [[0, 1], [3, 2]] and values.tolist() == [[1.0, 2.0], [4.0, 3.0]]
    values.sum().backward()
    assert scores.grad is not None and scores.grad.tolist() == [[1, 1, 0, 0], [0, 0, 1, 1]]
    replay.take(None)
    assert chosen()[1].tolist() == [[3, 2], [3, 2]]


def test_a_shared_position_has_the_experts_of_its_first_sample() -> None:
    ids = [np.arange(40), np.concatenate([np.arange(30), np.arange(90, 100)])]
    routing = [np.full((40, 2), number + 1, np.uint8) for number in range(2)]
    (tree,) = plan_trees(ids, [1, 1], 1000, 1)
    assert tree.shared == (0, 30)
    packed = collate(ids, [tree], total=32)
    experts = replayed(routing, tree.samples, packed)
    assert experts.shape == (64, 2) and experts.dtype == np.int16
    assert experts[:, 0].tolist() == [1] * 39 + [2] * 9 + [-1] * 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("routing") / "experts", experts=True)


def chosen_alone(trainer: PolicyTrainer, samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """The samples with the experts that the model chooses itself on one rank, each sample in a separate pass."""
    routers, routed = unwrap(trainer.chunks[0]).routers, []
    for sample in samples:
        chosen: list[torch.Tensor] = []

        def noting(router: ReplayedRouter, *arguments: Any, chosen: list[torch.Tensor] = chosen, **options: Any) -> Any:
            values, experts = ReplayedRouter.get_replay_topk(router, *arguments, **options)
            chosen.append(experts)
            return values, experts

        for router in routers:
            router.get_replay_topk = noting.__get__(router)
        trainer.log_probs(trainer.chunks, Batch((sample,)))
        for router in routers:
            del router.get_replay_topk
        rows = torch.cat(chosen, dim=1).numpy().astype(np.uint8)
        routed.append(replace(sample, routing=np.concatenate([rows, rows[:1]])))
    return tuple(routed)


def learned(config: Config, samples: tuple[Sample, ...]) -> dict[str, Any]:
    """Log-probs before and after an update, its metrics, and whether the routers have changed."""
    trainer = PolicyTrainer(trainer_spec(config))
    before = np.concatenate(trainer.log_probs(trainer.chunks, Batch(samples)))
    routers = [value for chunk in trainer.chunks for name, value in chunk.named_parameters() if "router" in name]
    old = [value.detach().clone() for value in routers]
    metrics = trainer.update(with_advantages(trainer.score(Batch(samples)), config.algo))
    after = np.concatenate(trainer.log_probs(trainer.chunks, Batch(samples)))
    moved = all(not torch.equal(value, was) for value, was in zip(routers, old, strict=True))
    return {"before": before, "after": after, "metrics": metrics, "moved": moved}


def learn_in_layouts(folder: Path, layouts: Sequence[str], ways: dict[str, tuple[Sample, ...]]) -> dict[str, Any]:
    """As one of two ranks."""
    results: dict[str, Any] = {}
    for layout in layouts:
        config = make_config(folder, SETTINGS | LAYOUTS[layout])
        with init_parallel(config):
            results[layout] = {way: learned(config, samples) for way, samples in ways.items()}
            assert parallel_state.get_data_parallel_world_size() == (2 if "ep2" in layout else 1)
    return results


def transformers_with(folder: Path, samples: Sequence[Sample]) -> tuple[np.ndarray, float]:
    """Log-probs of the trained tokens (0 elsewhere) and norm of the gradient, in float64 by transformers."""
    from transformers import AutoModelForCausalLM

    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **eager)
    rows = [sample.log_probs for sample in samples]
    scored = with_advantages(ScoredBatch(tuple(samples), old_log_probs=rows), Config().algo)
    assert scored.advantages is not None
    outputs, objective = [], torch.zeros((), dtype=torch.float64)
    for sample, advantage in zip(samples, scored.advantages, strict=True):
        assert sample.routing is not None
        experts = torch.from_numpy(sample.routing[:-1].astype(np.int64)).reshape(-1, LAYERS, WIDTH)
        for number, layer in enumerate(model.model.layers):
            layer.mlp.gate.forward = gated(layer.mlp.gate, experts[:, number])
        tokens = torch.from_numpy(sample.token_ids)
        log_probs = model(tokens[None, :-1]).logits[0].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        log_probs = F.pad(log_probs, (1, 0)) * torch.from_numpy(sample.loss_mask)
        objective = objective + (log_probs * torch.from_numpy(advantage)).sum()
        outputs.append(log_probs.detach().numpy())
    (objective / sum(sample.loss_mask.sum() for sample in samples)).backward()
    norm = torch.nn.utils.get_total_norm([weight.grad for weight in model.parameters() if weight.grad is not None])
    return np.concatenate(outputs), float(norm)


def gated(gate: Any, experts: torch.Tensor) -> Any:
    def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = F.linear(hidden, gate.weight)
        weights = logits.softmax(-1).gather(1, experts)
        return logits, weights / weights.sum(-1, keepdim=True), experts

    return forward


@pytest.mark.seconds
@pytest.mark.parametrize("settings", [{}, {"model.lora.rank": 4, "model.lora.targets": ["o_proj"]}])
def test_reference_and_critic_choose_for_themselves(
    folder: Path, one_rank: Config, settings: dict[str, object]
) -> None:
    """Old log-probs use the replayed experts."""
    changed = {"algo.kl_coef": 0.1, "algo.advantage": "gae", "algo.mini_batches": 2, **settings}
    trainer = PolicyTrainer(trainer_spec(make_config(folder, SETTINGS | changed)))
    assert trainer.critic
    torch.nn.init.constant_(trainer.critic.chunks[0].module.value_head.weight, 0.1)
    samples = make_samples(4, seed=2)
    free, forced = (trainer.score(Batch(batch)) for batch in (samples, planted(samples)))

    def apart(name: str) -> float:
        return max(np.abs(a - b).max() for a, b in zip(getattr(free, name), getattr(forced, name), strict=True))

    assert apart("reference_log_probs") == apart("values") == 0.0
    assert apart("old_log_probs") > 0.1


@pytest.mark.processes
@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(("ep2-full", "pp2-vpp2-full"), id="experts and virtual stages"),
        pytest.param([*LAYOUTS], marks=pytest.mark.slow, id="all"),
    ],
)
def test_experts_are_replayed_in_every_layout(folder: Path, one_rank: Config, layouts: Sequence[str]) -> None:
    """Replaying the router's own choice changes no bit; another choice changes everything, as in transformers."""
    samples = make_samples(12, seed=1)
    chosen = chosen_alone(PolicyTrainer(trainer_spec(make_config(folder, SETTINGS))), samples)
    other = planted(samples)
    log_probs, norm = transformers_with(folder, other)
    for rank in run_ranks(learn_in_layouts, 2, folder, layouts, {"none": samples, "own": chosen, "other": other}):
        for layout, ways in rank.items():
            none, same, changed = ways["none"], ways["own"], ways["other"]
            assert same["metrics"] == none["metrics"], layout
            assert np.array_equal(same["before"], none["before"]), layout
            assert np.abs(changed["before"] - none["before"]).max() > 0.1
            assert np.abs(changed["before"] - log_probs).max() < 2e-5, layout
            assert changed["metrics"]["grad_norm"] == pytest.approx(norm, rel=2e-5), layout
            assert changed["moved"] and np.abs(changed["after"] - changed["before"]).max() > 1e-3
    after = [ways["other"]["after"] for ways in rank.values()]
    assert max(np.abs(row - after[0]).max() for row in after) < 2e-5, "no layout learns anything else"
