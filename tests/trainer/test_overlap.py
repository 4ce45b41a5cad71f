"""Exchanges between ranks go on while products are computed, as a profile of an update shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megatron_collab.launch.trainer_specs import trainer_spec
from megatron_collab.trainer.trainer import PolicyTrainer
from megatron_collab.types import Batch
from tests.ranks import init_parallel, learn, make_config, make_model, make_samples, run_ranks

pytestmark = pytest.mark.processes

LAYOUTS: dict[str, dict[str, object]] = {
    "sequences gathered": {"parallel.tp": 2, "parallel.sequence_parallel": True},
    "virtual stages": {"parallel.pp": 2, "parallel.vpp": 2},
}
SIZES = {"hidden_size": 2048, "intermediate_size": 4096, "head_dim": 64, "num_attention_heads": 16}
ACTIVITIES = {"cpu": ProfilerActivity.CPU, "cuda": ProfilerActivity.CUDA}
# Parts of recorded names, in lower case: kernels on a GPU, operations on a CPU.
EXCHANGES = {"cpu": ("gloo:",), "cuda": ("nccl",)}
PRODUCTS = {"cpu": ("aten::mm", "aten::addmm"), "cuda": ("gemm", "cutlass", "nvjet", "xmma")}
Span = tuple[float, float]  # microseconds


def covered(spans: Iterable[Span], cover: Iterable[Span]) -> float:
    """The part of the time within `spans` that is also within `others`."""
    merged, under = union(spans), union(cover)
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in merged for b in under)
    return both / sum(end - start for start, end in merged)


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time as sorted spans that do not overlap."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def test_time_shared_by_two_sets_of_spans() -> None:
    assert union([(3, 4), (0, 2), (1, 3), (6, 7)]) == [(0, 4), (6, 7)]
    assert covered([(0, 2), (1, 3), (6, 7)], [(2, 6.5)]) == pytest.approx(1.5 / 4)
    assert covered([(0, 1)], [(1, 2)]) == 0


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, device_type: str) -> dict[str, tuple[list[Span], list[Span]]]:
    """By layout, when the first of two ranks communicated, and when it computed matrix products."""
    folder = tmp_path_factory.mktemp("overlap") / "model"
    make_model(folder, **(SIZES if device_type == "cuda" else {}))
    return run_ranks(record, 2, folder, device_type, device_type=device_type)[0]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_exchanges_go_on_while_products_are_computed(
    recorded: dict[str, tuple[list[Span], list[Span]]],
    layout: str,
    device_type: str,
    record_property: Callable[[str, object], None],
) -> None:
    """On a CPU only that both are found in a profile: gloo's time is no figure."""
    exchanges, products = recorded[layout]
    assert exchanges and products
    if device_type == "cuda":
        share = covered(exchanges, products)
        record_property("part of NCCL's time beside products", f"{share:.2f}")
        assert share > 0.05


def record(folder: Path, device_type: str) -> dict[str, tuple[list[Span], list[Span]]]:
    """As one of two ranks: when the second update communicates and computes products, by layout."""
    results = {}
    dtype = "bfloat16" if device_type == "cuda" else "float32"
    for layout, settings in LAYOUTS.items():
        settings = settings | {"launch.device": device_type, "model.dtype": dtype, "train.tokens_per_micro_batch": 1024}
        config = make_config(folder, settings)
        batch = Batch(make_samples(400 if device_type == "cuda" else 8, seed=0))
        with init_parallel(config):
            trainer = PolicyTrainer(trainer_spec(config))
            learn(trainer, batch)
            with profile(activities=[ACTIVITIES[device_type]]) as recording:
                learn(trainer, batch)
                if device_type == "cuda":
                    torch.cuda.synchronize()
        results[layout] = (
            spans(recording, EXCHANGES[device_type]),
            spans(recording, PRODUCTS[device_type]),
        )
    return results


def spans(recording: profile, names: tuple[str, ...]) -> list[Span]:
    """Time spans of events whose name contains one of `names`."""
    return [
        (event.time_range.start, event.time_range.end)
        for event in recording.events()
        if any(name in event.name.lower() for name in names)
    ]
