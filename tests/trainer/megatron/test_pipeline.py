"""Pipeline stages know the shapes they exchange: training equals, bit for bit, that of stages that exchange shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron_collab.launch.trainer_specs import trainer_spec
from megatron_collab.trainer import network
from megatron_collab.trainer.microbatches import MicroBatch
from megatron_collab.trainer.trainer import PolicyTrainer
from megatron_collab.types import Batch
from tests.helpers import selected
from tests.ranks import init_parallel, learn, make_config, make_model, make_samples, run_ranks

pytestmark = [pytest.mark.processes, pytest.mark.slow]

RANKS = 4
# Each receives micro-batches in a different order; layouts of fewer stages and slices are data parallel.
LAYOUTS: dict[str, dict[str, object]] = {
    "pp2": {"parallel.pp": 2},
    "pp2-vpp4": {"parallel.pp": 2, "parallel.vpp": 4},
    "pp4-vpp2": {"parallel.pp": 4, "parallel.vpp": 2},
    "tp2-pp2-sp": {"parallel.tp": 2, "parallel.pp": 2, "parallel.sequence_parallel": True},
    "cp2-pp2": {"parallel.cp": 2, "parallel.pp": 2, "model.dtype": "bfloat16", "train.tokens_per_micro_batch": 16},
}
Trained = dict[str, Any]


@pytest.fixture(scope="module")
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, dict[str, Trained]]]:
    """On every rank, by layout, the results of `train` with planned and with exchanged shapes."""
    folder = make_model(tmp_path_factory.mktemp("pipeline") / "model", num_hidden_layers=8)
    layouts = [layout for (layout,) in selected(request, "layout")]
    return run_ranks(train_in_layouts, RANKS, folder, layouts, engine=True)  # context parallelism needs the engine


@pytest.mark.parametrize("layout", LAYOUTS)
def test_planned_shapes_train_bit_for_bit_like_exchanged_ones(
    trained: list[dict[str, dict[str, Trained]]], layout: str
) -> None:
    for rank in trained:
        planned, exchanged = rank[layout]["planned"], rank[layout]["exchanged"]
        assert len(set(planned["lengths"])) > 1
        assert planned["metrics"] == exchanged["metrics"]
        assert planned["log_probs"] == exchanged["log_probs"]
        assert len(planned["gradients"]) == len(exchanged["gradients"])
        for ours, stock in zip(planned["gradients"], exchanged["gradients"], strict=True):
            assert torch.equal(ours, stock) and ours.any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_shape_is_exchanged_and_no_stage_waits_for_its_device(
    trained: list[dict[str, dict[str, Trained]]], layout: str
) -> None:
    for rank in trained:
        assert rank[layout]["planned"]["calls"] == {}
        calls = rank[layout]["exchanged"]["calls"]
        assert calls["shapes"] == calls["waits"] > 0  # otherwise the counters do not work


def train_in_layouts(folder: Path, layouts: Sequence[str]) -> dict[str, dict[str, Trained]]:
    """As one of the ranks."""
    results = {}
    for layout in layouts:
        settings = {"train.tokens_per_micro_batch": 30} | LAYOUTS[
            layout
        ]  # some micro-batches have one sequence, some more
        with init_parallel(make_config(folder, settings)):
            planned = train(folder, settings, network.PlannedCommunicator)
            results[layout] = {"planned": planned, "exchanged": train(folder, settings, stock)}
    return results


def stock(config: Any, lengths: Sequence[int]) -> P2PCommunicator:
    """Megatron's communicator, whose stages exchange shapes."""
    return P2PCommunicator(parallel_state.get_pipeline_model_parallel_group(), config)


def train(folder: Path, settings: dict[str, object], communicator: Callable[..., P2PCommunicator]) -> Trained:
    """Metrics and gradients of an update and log-probs after it, and what the exchanges called."""
    calls: Counter[str] = Counter()
    lengths: list[int] = []

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def count(*arguments: Any, **options: Any) -> Any:
            calls[name] += 1
            return function(*arguments, **options)

        return count

    schedule = network._schedule

    def watched(chunks: Any, micro_batches: Sequence[MicroBatch], *arguments: Any, **options: Any) -> Any:
        lengths.extend(micro_batch.token_ids.shape[1] for micro_batch in micro_batches)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(network, "PlannedCommunicator", communicator)
            patch.setattr(
                P2PCommunicator, "_communicate_shapes", counted("shapes", P2PCommunicator._communicate_shapes)
            )
            patch.setattr(torch.cuda, "synchronize", counted("waits", torch.cuda.synchronize))
            return schedule(chunks, micro_batches, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "_schedule", watched)
        trainer = PolicyTrainer(trainer_spec(make_config(folder, settings)), communicator=communicator)
        batch = Batch(make_samples(13, seed=3))
        metrics = learn(trainer, batch)
        gradients = [gradient.clone() for gradient in trainer.policy.gradients()]
        log_probs = [row.tolist() for row in trainer.log_probs(trainer.chunks, batch)]
    return {
        "metrics": metrics,
        "gradients": gradients,
        "log_probs": log_probs,
        "calls": dict(calls),
        "lengths": lengths,
    }
