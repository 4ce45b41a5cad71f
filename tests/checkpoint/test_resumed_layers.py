"""A bfloat16 checkpoint is loaded bit for bit by the layers that wrote it and by others, TransformerEngine's or ours.

In FP8 it contains the histories of delayed scaling, also of the reference, which takes part in the loss. On a CPU the
engine's kernels are the reference ones of te_cpu.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_collab.checkpoint.checkpointer import Checkpoints
from megatron_collab.launch.trainer_specs import trainer_spec
from megatron_collab.trainer.megatron import config as megatron_config
from megatron_collab.trainer.trainer import PolicyTrainer
from megatron_collab.types import Batch
from tests import gpus
from tests.checkpoint.test_checkpointer import snapshot
from tests.helpers import selected
from tests.ranks import init_parallel, learn, make_config, make_model, make_samples, run_ranks

pytestmark = [pytest.mark.processes, pytest.mark.engine]

# NAME: (TransformerEngine's layers save?, TransformerEngine's layers load?)
LIVES = {
    "local to local": (False, False),
    "engine to engine": (True, True),
    "engine to local": (True, False),
    "local to engine": (False, True),
    "fp8 to fp8": (True, True),
}
FP8 = {"model.fp8": "hybrid", "model.fp8_recipe": "delayed", "algo.kl_coef": 0.1}


EVERY_LIFE = [
    pytest.param(name, marks=[pytest.mark.slow] * (name not in ("engine to local", "fp8 to fp8"))) for name in LIVES
]


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest, device_type: str) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("layers")
    make_model(folder / "model")
    names = [name for (name,) in selected(request, "name") if not (name == "fp8 to fp8" and lacks_fp8(device_type))]
    return run_ranks(live_in_both_layers, 1, folder, names, device_type, engine=True, device_type=device_type)[0]


def lacks_fp8(device_type: str) -> str:
    return gpus.lacking(capability=gpus.HOPPER) if device_type == "cuda" else ""


def live_in_both_layers(folder: Path, names: list[str], device_type: str) -> dict[str, Any]:
    """By name of LIVES: the saved and the loaded state, and the metrics of the next step of both."""
    os.environ["NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"] = "1"  # as runtime/gpu_environment.py has it on GPUs
    results = {}
    with init_parallel(make_config(folder, {"launch.device": device_type})):
        for name in names:
            saves, loads = LIVES[name]
            settings = {"launch.device": device_type, "model.dtype": "bfloat16", "algo.kl_coef": 0.0}
            settings |= FP8 if name == "fp8 to fp8" else {}
            first = with_layers(saves, folder, settings)
            with Checkpoints(folder / name.replace(" ", "-"), keep=1, timeout=60.0) as checkpoints:
                for step in range(2):
                    learn(first, Batch(make_samples(9, step)))
                checkpoints.save(2, first.checkpointed, {})
                saved = snapshot(first)
                second = with_layers(loads, folder, settings)
                second.step, _ = checkpoints.load_latest(second.checkpointed)
                loaded = snapshot(second)
            batch = Batch(make_samples(9, 2))
            results[name] = {"states": (saved, loaded), "metrics": [learn(actor, batch) for actor in (first, second)]}
    return results


def with_layers(engine: bool, folder: Path, settings: dict[str, Any]) -> PolicyTrainer:
    megatron_config._engine = lambda dtype: engine
    return PolicyTrainer(trainer_spec(make_config(folder / "model", settings)))


@pytest.mark.parametrize("name", EVERY_LIFE)
def test_what_was_saved_is_loaded_to_the_bit(lives: dict[str, Any], name: str) -> None:
    """Weights by name; where the layers are the same, the optimizer's state and random draws too."""
    if name not in lives:
        pytest.skip(lacks_fp8("cuda"))
    saved, loaded = lives[name]["states"]
    same = LIVES[name][0] == LIVES[name][1]
    names = [key for key in saved if same or " model " in key]
    assert len(names) > 30 and (not same or saved.keys() == loaded.keys())
    for key in names:
        np.testing.assert_array_equal(loaded[key], saved[key], err_msg=key)


@pytest.mark.parametrize("name", EVERY_LIFE)
def test_the_next_step_is_the_one_that_would_have_come(lives: dict[str, Any], name: str) -> None:
    """Between layers that round differently, to the rounding of bfloat16."""
    if name not in lives:
        pytest.skip(lacks_fp8("cuda"))
    undisturbed, resumed = lives[name]["metrics"]
    rel = 1e-5 if LIVES[name][0] == LIVES[name][1] else 2**-6
    for key in ("loss", "grad_norm", "mismatch/k3", "entropy"):
        assert resumed[key] == pytest.approx(undisturbed[key], rel=rel, abs=rel), key
