"""Parameters kept in FP8 (model.fp8_params), by TransformerEngine's own Python over reference kernels.

A run with them must equal the run without: FP8 rounds a weight to the same bytes in the optimizer's step as in the
next forward pass. Gradients are summed in another order for their norm, so nothing is clipped here. A reference model
takes part, except with delayed scaling, which refuses it: nothing would scale its parameters.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.fp8_utils import is_float8tensor

from megatron_collab.checkpoint import hf
from megatron_collab.checkpoint.checkpointer import Checkpoints
from megatron_collab.config import Config
from megatron_collab.launch.trainer_specs import sync_spec, trainer_layout, trainer_spec
from megatron_collab.rehearsal.te_cpu.tensors import value
from megatron_collab.trainer.megatron import config as megatron_config
from megatron_collab.trainer.trainer import PolicyTrainer
from megatron_collab.types import Batch
from megatron_collab.weight_sync.node_routing import written
from megatron_collab.weight_sync.plan import plan_sync
from megatron_collab.weight_sync.sender import Sender
from megatron_collab.weight_sync.transports.registry import places_of
from tests.helpers import make_model, policy_servers, selected
from tests.ranks import init_parallel, learn, make_config, make_samples, run_ranks
from tests.trainer.test_precision import WIDE, fp8

pytestmark = [pytest.mark.processes, pytest.mark.slow]

RECIPES = ["blockwise", "tensorwise", "delayed"]
# By number of ranks: the recipe whose model has experts; delayed scaling does not support them.
EXPERTS = {1: "blockwise", 2: "tensorwise", 4: "tensorwise"}
CASES = [(ranks, recipe) for ranks in (2, 1) for recipe in RECIPES]
every_case = pytest.mark.parametrize(("ranks", "recipe"), CASES)
# The shards of two ranks then meet inside a block, in row 192 of a feed-forward layer's first matrix.
SIZES = WIDE | {"layers": 1, "ffn": 384}
STEPS = 3
NORM = "decoder.final_layernorm.weight"
# NAME: whether the run that saved keeps parameters in FP8, and whether the one that loads does
RESUMED = {"kept": (True, True), "kept to plain": (True, False), "plain to kept": (False, True)}

Weights = dict[str, torch.Tensor]


class Lived(NamedTuple):
    """A run: log-probs before each step, metrics and masters of each, and the loaded weights.

    Of its last parameters in FP8, by name: `kept` as stored, and `requantized` from the masters. `sent`: the buffers
    for servers, from the parameters and from their values in bfloat16.
    """

    log_probs: list[np.ndarray]
    metrics: list[dict[str, float]]
    masters: list[Weights]
    loaded: Weights
    kept: dict[str, list[torch.Tensor]]
    requantized: dict[str, list[torch.Tensor]]
    sent: tuple[list[torch.Tensor], list[torch.Tensor]]


@pytest.fixture(scope="module")
def lives(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], list[dict[str, Any]]]:
    """Results of so many ranks, each measured once."""

    @cache
    def of_ranks(ranks: int) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("kept")
        make_model(folder / "qwen3", family="qwen3", seed=0, **SIZES)
        make_model(folder / "qwen3_moe", family="qwen3_moe", seed=0, moe_intermediate_size=128, **SIZES)
        recipes = [recipe for number, recipe in selected(request, "ranks", "recipe") if number == ranks]
        return run_ranks(live, ranks, folder, recipes, engine=True)

    return of_ranks


@pytest.fixture
def rank_results(lives: Callable[[int], list[dict[str, Any]]], ranks: int) -> list[dict[str, Any]]:
    return lives(ranks)


def live(folder: Path, recipes: list[str]) -> dict[str, Any]:
    """As one of the data parallel ranks: by recipe, the runs with and without such parameters, and resumed ones."""
    megatron_config._engine = lambda dtype: dtype.itemsize == 2
    os.environ["NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"] = "1"  # as runtime/gpu_environment.py has it on GPUs
    results: dict[str, Any] = {}
    for recipe in recipes:
        for kept in (True, False):
            results[f"{recipe} {kept}"] = one_run(folder, recipe, kept)
        for name, (saved, kept) in RESUMED.items():
            results[f"{recipe} {name}"] = resumed(folder, recipe, saved, kept)
    return results


def one_run(folder: Path, recipe: str, kept: bool, **layout: object) -> Lived:
    """`layout`: settings of parallel.*"""
    config = configure(folder, recipe, kept, **layout)
    with init_parallel(config):
        trainer = make(folder, recipe, kept, **layout)
        published = sent(trainer, config) if kept else ([], [])
        loaded = {name: shard.detach().clone() for name, shard in hf.named_shards(trainer.chunks)}
        lived = Lived([], [], [masters(trainer)], {} if kept else loaded, {}, {}, published)
        for step in range(STEPS):
            batch = Batch(make_samples(12, seed=step))
            if step == STEPS - 1:
                with Checkpoints(folder / f"{recipe}-{kept}", keep=1, timeout=60.0) as checkpoints:
                    checkpoints.save(step, trainer.checkpointed, {})
            lived.log_probs.append(np.concatenate(trainer.log_probs(trainer.chunks, batch)))
            lived.metrics.append(learn(trainer, batch))
            lived.masters.append(masters(trainer))
        for name, shard in hf.named_shards(trainer.chunks):
            if is_float8tensor(shard):
                whole = lived.masters[-1][name].view(shard.shape).bfloat16()
                lived.kept[name], lived.requantized[name] = numbers(shard), numbers(shard._quantizer(whole))
        return lived


def resumed(
    folder: Path, recipe: str, saved: bool, kept: bool, **layout: object
) -> tuple[np.ndarray, dict[str, float], Weights]:
    """The last step of a run, by another one that loaded its checkpoint: log-probs, metrics and masters."""
    with init_parallel(configure(folder, recipe, kept, **layout)):
        trainer = make(folder, recipe, kept, **layout)
        with Checkpoints(folder / f"{recipe}-{saved}", keep=1, timeout=60.0) as checkpoints:
            trainer.step, _ = checkpoints.load_latest(trainer.checkpointed)
        batch = Batch(make_samples(12, STEPS - 1))
        log_probs = np.concatenate(trainer.log_probs(trainer.chunks, batch))
        return log_probs, learn(trainer, batch), masters(trainer)


def configure(folder: Path, recipe: str, kept: bool, **layout: object) -> Any:
    ranks = int(os.environ["WORLD_SIZE"])
    family = "qwen3_moe" if EXPERTS[ranks] == recipe else "qwen3"
    settings = {"model.fp8_params": kept, "optim.clip_grad": 0.0, "algo.kl_coef": 0.0 if recipe == "delayed" else 0.1}
    settings["launch.nproc_per_node"] = ranks
    settings |= {f"parallel.{name}": value for name, value in layout.items()}
    return make_config(folder / family, fp8(recipe) | settings)


def make(folder: Path, recipe: str, kept: bool, **layout: object) -> PolicyTrainer:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()  # it holds the groups and scales of the previous run
    return PolicyTrainer(trainer_spec(configure(folder, recipe, kept, **layout)))


def masters(trainer: PolicyTrainer) -> Weights:
    """The optimizer's float32 weights of this rank's shards, flat, by name, gathered from all ranks (collective)."""
    whole = {name: torch.zeros(shard.numel()) for name, shard in hf.named_shards(trainer.chunks)}
    for part in trainer.policy.optimizer.chained_optimizers:
        for name, shard in hf.named_shards(trainer.chunks):
            if shard in part.model_param_group_index_map:
                span = part._get_model_param_range_map(shard)["param"]
                whole[name][span.start : span.end] = shard.main_param
    for name, shard in hf.named_shards(trainer.chunks):
        expert = not getattr(shard, "allreduce", True)
        get_group = parallel_state.get_expert_data_parallel_group if expert else parallel_state.get_data_parallel_group
        dist.all_reduce(whole[name], group=get_group())
    return whole


def numbers(quantized: Any) -> list[torch.Tensor]:
    """Its bytes by rows and by columns, and the values they encode."""
    return [*quantized.get_data_tensors(), value(quantized, rowwise=True), value(quantized, rowwise=False)]


def sent(trainer: PolicyTrainer, config: Config) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Buffers of every round for the servers, from the parameters and from the values they encode."""
    spec, shards = policy_servers(config), dict(hf.named_shards(trainer.chunks))
    plan = plan_sync(trainer.shape, trainer_layout(config), spec.layout, 2)
    rounds = written(plan, places_of(sync_spec(config), spec.placement, on_gpus=True), dist.get_rank())
    both = []
    for parameters in (shards, {name: hf.values(shard) for name, shard in shards.items()}):
        sender = Sender(rounds, lambda target, piece: [0], parameters, torch.bfloat16)
        both.append([torch.zeros(sender.largest, dtype=torch.uint8) for _ in rounds])
        for number, buffer in enumerate(both[-1]):
            sender.write(number, sender.packed(number, buffer))
    return both[0], both[1]


@every_case
def test_masters_begin_with_what_was_loaded(rank_results: list[dict[str, Any]], recipe: str) -> None:
    """Not with the FP8 rounding of it."""
    for rank in rank_results:
        kept, plain = rank[f"{recipe} True"], rank[f"{recipe} False"]
        for name, loaded in plain.loaded.items():
            assert torch.equal(kept.masters[0][name], loaded.float().flatten()), name
        assert all(
            not torch.equal(kept.requantized[name][2].flatten(), kept.masters[-1][name]) for name in kept.requantized
        )


@every_case
def test_parameters_are_their_masters_in_fp8(rank_results: list[dict[str, Any]], recipe: str) -> None:
    """Bit for bit after a step: bytes by rows and by columns, and their scales; in every linear layer."""
    for rank in rank_results:
        lived = rank[f"{recipe} True"]
        names = [name for name in lived.masters[-1] if ".linear_" in name and "norm" not in name]
        assert set(lived.kept) == set(names)
        for name, parts in lived.kept.items():
            for here, expected in zip(parts, lived.requantized[name], strict=True):
                assert torch.equal(here, expected), name


@every_case
def test_the_run_is_the_one_without(rank_results: list[dict[str, Any]], recipe: str) -> None:
    for rank in rank_results:
        kept, plain = rank[f"{recipe} True"], rank[f"{recipe} False"]
        np.testing.assert_array_equal(np.concatenate(kept.log_probs), np.concatenate(plain.log_probs))
        same_metrics(kept.metrics, plain.metrics)
        for here, expected in zip(kept.masters, plain.masters, strict=True):
            assert all(torch.equal(here[name], expected[name]) for name in expected)
        assert not torch.equal(kept.masters[0][NORM], kept.masters[-1][NORM])


@every_case
@pytest.mark.parametrize("way", RESUMED)
def test_a_checkpoint_resumes(rank_results: list[dict[str, Any]], recipe: str, way: str) -> None:
    """Runs with and without parameters in FP8 resume each other with the same next step."""
    for rank in rank_results:
        lived = rank[f"{recipe} {RESUMED[way][0]}"]
        log_probs, metrics, weights = rank[f"{recipe} {way}"]
        np.testing.assert_array_equal(log_probs, lived.log_probs[-1])
        same_metrics([metrics], lived.metrics[-1:])
        assert all(torch.equal(weights[name], expected) for name, expected in lived.masters[-1].items())


def same_metrics(actual: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for metrics, reference in zip(actual, expected, strict=True):
        assert metrics["loss"] == reference["loss"] and metrics["entropy"] == reference["entropy"]
        assert metrics["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-6)


@every_case
def test_servers_get_the_values_that_parameters_encode(rank_results: list[dict[str, Any]], recipe: str) -> None:
    for rank in rank_results:
        kept, values = rank[f"{recipe} True"].sent
        assert len(kept) and all(torch.equal(here, expected) for here, expected in zip(kept, values, strict=True))
