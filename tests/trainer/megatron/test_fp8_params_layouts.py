"""Parameters that are kept in FP8, cut over tensor, pipeline and expert parallel ranks: test_fp8_params.py's runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_collab.trainer.megatron import config as megatron_config
from tests.helpers import make_model
from tests.ranks import run_ranks
from tests.trainer.megatron.test_fp8_params import NORM, SIZES, one_run, resumed, same_metrics

pytestmark = pytest.mark.processes

# By recipe, of which tensorwise has experts, and two data parallel ranks of the rest.
LAYOUTS = {
    "blockwise": {"tp": 2, "pp": 2, "sequence_parallel": True},
    "tensorwise": {"tp": 2, "ep": 2, "sequence_parallel": True},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("cut")
    make_model(folder / "qwen3", family="qwen3", seed=0, **SIZES | {"layers": 2})
    make_model(folder / "qwen3_moe", family="qwen3_moe", seed=0, moe_intermediate_size=128, **SIZES)
    return run_ranks(live, 4, folder, engine=True)


def live(folder: Path) -> dict[str, Any]:
    """By recipe the run with such parameters and without, and the first, resumed."""
    megatron_config._engine = lambda dtype: dtype.itemsize == 2
    return {
        recipe: (
            *(one_run(folder, recipe, kept, **layout) for kept in (True, False)),
            resumed(folder, recipe, True, True, **layout),
        )
        for recipe, layout in LAYOUTS.items()
    }


@pytest.mark.parametrize("recipe", LAYOUTS)
def test_the_run_is_the_one_without(found: list[dict[str, Any]], recipe: str) -> None:
    """To the bit, on every rank: log-probs, loss, masters; parameters are these in FP8, and servers are sent them."""
    for rank in found:
        kept, plain, _ = rank[recipe]
        assert len(kept.kept) >= 4
        for name, parts in kept.kept.items():
            assert all(torch.equal(*pair) for pair in zip(parts, kept.made[name], strict=True)), name
        np.testing.assert_array_equal(np.concatenate(kept.log_probs), np.concatenate(plain.log_probs))
        same_metrics(kept.metrics, plain.metrics)
        for here, wanted in zip(kept.masters, plain.masters, strict=True):
            assert all(torch.equal(here[name], wanted[name]) for name in wanted)
        parameters, values = kept.sent
        assert all(torch.equal(here, wanted) for here, wanted in zip(parameters, values, strict=True))
    assert any(rank[recipe][0].sent[0] for rank in found)
    changed = [rank[recipe][0].masters for rank in found if NORM in rank[recipe][0].masters[0]]
    assert changed and all(not torch.equal(each[0][NORM], each[-1][NORM]) for each in changed)


@pytest.mark.parametrize("recipe", LAYOUTS)
def test_a_checkpoint_resumes(found: list[dict[str, Any]], recipe: str) -> None:
    for rank in found:
        lived, _, (log_probs, metrics, weights) = rank[recipe]
        np.testing.assert_array_equal(log_probs, lived.log_probs[-1])
        same_metrics([metrics], lived.metrics[-1:])
        assert all(torch.equal(weights[name], wanted) for name, wanted in lived.masters[-1].items())
