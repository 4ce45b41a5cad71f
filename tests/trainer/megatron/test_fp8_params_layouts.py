"""Parameters kept in FP8, split over tensor, pipeline and expert parallel ranks: the runs of test_fp8_params.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_collab.trainer.megatron import config as megatron_config
from tests.helpers import make_model, selected
from tests.ranks import run_ranks
from tests.trainer.megatron.test_fp8_params import NORM, SIZES, one_run, resumed, same_metrics

pytestmark = [pytest.mark.processes, pytest.mark.slow]

# By recipe; tensorwise has experts, and its other parameters are on two data parallel ranks.
LAYOUTS = {
    "blockwise": {"tp": 2, "pp": 2, "sequence_parallel": True},
    "tensorwise": {"tp": 2, "ep": 2, "sequence_parallel": True},
}
RECIPES = ["blockwise", "tensorwise"]


@pytest.fixture(scope="module")
def rank_results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("cut")
    make_model(folder / "qwen3", family="qwen3", seed=0, **SIZES | {"layers": 2})
    make_model(folder / "qwen3_moe", family="qwen3_moe", seed=0, moe_intermediate_size=128, **SIZES)
    return run_ranks(live, 4, folder, [recipe for (recipe,) in selected(request, "recipe")], engine=True)


def live(folder: Path, recipes: list[str]) -> dict[str, Any]:
    """By recipe, the runs with and without such parameters, and the first one resumed."""
    megatron_config._engine = lambda dtype: dtype.itemsize == 2
    return {
        recipe: (
            *(one_run(folder, recipe, kept, **layout) for kept in (True, False)),
            resumed(folder, recipe, True, True, **layout),
        )
        for recipe, layout in LAYOUTS.items()
        if recipe in recipes
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_run_is_the_one_without(rank_results: list[dict[str, Any]], recipe: str) -> None:
    """Bit for bit, on every rank: log-probs, loss, masters; parameters are the masters in FP8, and servers get them."""
    for rank in rank_results:
        kept, plain, _ = rank[recipe]
        assert len(kept.kept) >= 4
        for name, parts in kept.kept.items():
            assert all(torch.equal(*pair) for pair in zip(parts, kept.requantized[name], strict=True)), name
        np.testing.assert_array_equal(np.concatenate(kept.log_probs), np.concatenate(plain.log_probs))
        same_metrics(kept.metrics, plain.metrics)
        for here, expected in zip(kept.masters, plain.masters, strict=True):
            assert all(torch.equal(here[name], expected[name]) for name in expected)
        parameters, values = kept.sent
        assert all(torch.equal(here, expected) for here, expected in zip(parameters, values, strict=True))
    assert any(rank[recipe][0].sent[0] for rank in rank_results)
    changed = [rank[recipe][0].masters for rank in rank_results if NORM in rank[recipe][0].masters[0]]
    assert changed and all(not torch.equal(masters[0][NORM], masters[-1][NORM]) for masters in changed)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_checkpoint_resumes(rank_results: list[dict[str, Any]], recipe: str) -> None:
    for rank in rank_results:
        lived, _, (log_probs, metrics, weights) = rank[recipe]
        np.testing.assert_array_equal(log_probs, lived.log_probs[-1])
        same_metrics([metrics], lived.metrics[-1:])
        assert all(torch.equal(weights[name], expected) for name, expected in lived.masters[-1].items())
