"""Errors of an update by TransformerEngine's layers in 16 bits, in FP8 and on two ranks, against our layers in float32.

The unit is the error of our own layers in bfloat16 on a CPU: `errors` are multiples of it. On a CPU the engine has the
reference kernels of te_cpu; tests/rehearsal/te_cpu/test_layers.py looks at single layers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_collab.launch.trainer_specs import trainer_spec
from megatron_collab.trainer.megatron import config as megatron_config
from megatron_collab.trainer.trainer import PolicyTrainer
from megatron_collab.types import Batch
from tests import gpus
from tests.helpers import make_model
from tests.ranks import init_parallel, learn, make_config, make_samples, run_ranks

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.engine]

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"]
RECIPES = ["tensorwise", "delayed", "blockwise"]
WIDE: dict[str, Any] = {"layers": 2, "hidden": 256, "ffn": 512, "heads": 8, "kv_heads": 4, "head_dim": 32}
BFLOAT16 = {"model.dtype": "bfloat16"}


def fp8(recipe: str, **more: object) -> dict[str, object]:
    form = "e4m3" if recipe == "blockwise" else "hybrid"
    return BFLOAT16 | {"model.fp8": form, "model.fp8_recipe": recipe} | more


# name: (family, settings of the layers)
ALONE: dict[str, tuple[str, dict[str, object]]] = {
    **{f"bfloat16 {family}": (family, BFLOAT16) for family in FAMILIES},
    **{f"fp8 {recipe}": ("qwen3", fp8(recipe)) for recipe in RECIPES},
    "fp8 of experts": ("qwen3_moe", fp8("tensorwise")),
}
SEQUENCE = {"parallel.tp": 2, "parallel.sequence_parallel": True}
PAIRS: dict[str, tuple[str, dict[str, object]]] = {
    "tp2": ("qwen3", BFLOAT16 | SEQUENCE),
    "ep2": ("qwen3_moe", BFLOAT16 | {"parallel.ep": 2}),
    "cp2": ("qwen3", BFLOAT16 | {"parallel.cp": 2}),
    "fp8 blocks, tp2": ("qwen3", fp8("blockwise") | SEQUENCE),
    **{f"fp8 {recipe}, cp2": ("qwen3", fp8(recipe) | {"parallel.cp": 2}) for recipe in RECIPES},
}
SAMPLES = make_samples(16, seed=3)
# Over the reference kernels log-probs are 0.76 to 1.08 of the unit away in bfloat16, 7.6 to 9.6 in FP8.
BFLOAT16_AGAIN, FP8 = 2.0, 20.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("precision")
    for seed, family in enumerate(FAMILIES):
        experts = {"moe_intermediate_size": 128} if family == "qwen3_moe" else {}
        make_model(folder / family, family=family, seed=seed, **WIDE, **experts)
    return folder


@pytest.fixture(scope="module")
def local(folder: Path) -> dict[str, Any]:
    """Results of our own layers on a CPU, by "dtype family"."""
    settings = {
        f"{dtype} {family}": (family, {"model.dtype": dtype})
        for dtype in ("float32", "bfloat16")
        for family in FAMILIES
    }
    return run_ranks(measure, 1, folder, settings, "cpu", False)[0]


@pytest.fixture(scope="module")
def alone(folder: Path, device_type: str) -> dict[str, Any]:
    cases = without(ALONE, device_type)
    return run_ranks(measure, 1, folder, cases, device_type, True, engine=True, device_type=device_type)[0]


@pytest.fixture(scope="module")
def pairs(folder: Path, device_type: str) -> dict[str, Any]:
    cases = without(PAIRS, device_type)
    return run_ranks(measure, 2, folder, cases, device_type, True, engine=True, device_type=device_type)[0]


def without(cases: dict[str, Any], device_type: str) -> dict[str, Any]:
    """The cases that this device supports."""
    lacks_fp8 = device_type == "cuda" and gpus.lacking(capability=gpus.HOPPER)
    return {name: case for name, case in cases.items() if not (lacks_fp8 and name.startswith("fp8"))}


def measure(folder: Path, cases: dict[str, Any], device_type: str, engine: bool) -> dict[str, Any]:
    """As a rank: log-probs of all samples before an update, and its gradient norm."""
    results = {}
    megatron_config._engine = lambda dtype: engine and dtype.itemsize == 2
    for name, (family, settings) in cases.items():
        config = make_config(folder / family, settings | {"launch.device": device_type, "algo.kl_coef": 0.0})
        with init_parallel(config):
            actor = PolicyTrainer(trainer_spec(config))
            batch = Batch(SAMPLES)
            rows = np.concatenate(actor.log_probs(actor.chunks, batch))
            results[name] = {"log_probs": rows, "grad_norm": learn(actor, batch)["grad_norm"]}
    return results


def errors(result: dict[str, Any], local: dict[str, Any], family: str) -> dict[str, float]:
    """Of log-probs (root mean square), their mean and the gradient's norm, in units of bfloat16's own log-probs."""
    exact, rounded = local[f"float32 {family}"], local[f"bfloat16 {family}"]
    mean = abs(float(np.mean(result["log_probs"] - exact["log_probs"])))
    relative = abs(result["grad_norm"] / exact["grad_norm"] - 1)
    return {
        name: error / apart(rounded, exact)
        for name, error in (("log_probs", apart(result, exact)), ("loss", mean), ("norm", relative))
    }


def apart(first: dict[str, Any], second: dict[str, Any]) -> float:
    """Root mean square difference of their log-probs."""
    return float(np.sqrt(np.mean((first["log_probs"] - second["log_probs"]) ** 2)))


@pytest.mark.parametrize("case", ALONE)
def test_the_engines_layers_round_as_their_precision_does(
    alone: dict[str, Any], local: dict[str, Any], case: str, record_property: Callable[[str, object], None]
) -> None:
    """Loss and log-probs of FP8 and of bfloat16, of every family, against float32."""
    if case not in alone:
        pytest.skip(gpus.lacking(capability=gpus.HOPPER))
    check(alone[case], local, ALONE[case][0], FP8 if case.startswith("fp8") else BFLOAT16_AGAIN, record_property)


@pytest.mark.parametrize("case", PAIRS)
def test_two_ranks_round_as_one_does(
    pairs: dict[str, Any], local: dict[str, Any], case: str, record_property: Callable[[str, object], None]
) -> None:
    """Tensor and sequence parallel, in FP8 too, experts over two ranks, and context parallel 2 against 1."""
    if case not in pairs:
        pytest.skip(gpus.lacking(capability=gpus.HOPPER))
    check(pairs[case], local, PAIRS[case][0], FP8 if case.startswith("fp8") else BFLOAT16_AGAIN, record_property)


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_context_parallel_ranks_are_nearer_to_one_than_fp8_is_to_float32(
    pairs: dict[str, Any], alone: dict[str, Any], local: dict[str, Any], recipe: str
) -> None:
    """0.44 to 0.47 as far as measured: FP8 rounds what attention sums in another order. Scales are no others here."""
    if f"fp8 {recipe}" not in alone:
        pytest.skip(gpus.lacking(capability=gpus.HOPPER))
    single = alone[f"fp8 {recipe}"]
    assert 0 < apart(pairs[f"fp8 {recipe}, cp2"], single) < 0.7 * apart(single, local["float32 qwen3"])


def check(result: Any, local: Any, family: str, bound: float, record_property: Callable[[str, object], None]) -> None:
    for name, error in errors(result, local, family).items():
        record_property(f"{name} in roundings of bfloat16", f"{error:.2f}")
        assert error < (bound if name == "log_probs" else bound / 4), name
    assert result["log_probs"].std() > 0.5
