"""Adapters equal PEFT's on transformers in every layout: log-probs, gradients, three steps, what is exported.

And beside PEFT: the reference is the base, only adapters are saved, dropout is where the model learns, resume is exact.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from safetensors.torch import load_file

from megatron_collab.checkpoint import convert, hf, storage
from megatron_collab.checkpoint.adapters import read_peft, write_peft
from megatron_collab.checkpoint.checkpointer import Checkpoints
from megatron_collab.config import Config
from megatron_collab.models import hf_config, lora
from megatron_collab.trainer.megatron import lora as adapters
from megatron_collab.trainer.megatron import parallel
from megatron_collab.trainer.trainer import PolicyTrainer
from megatron_collab.types import Batch
from tests.ranks import make_config, make_model, make_samples, run_ranks

pytestmark = pytest.mark.processes

TOLERANCE = 1e-5
STEPS = 3
SAMPLES = make_samples(7, seed=3)
# By name: whether the model has experts, fields of its config.json, the targets.
MODELS: dict[str, tuple[bool, dict[str, Any], list[str]]] = {
    "qwen3": (False, {}, ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
    "qwen2-some": (False, {"model_type": "qwen2"}, ["q_proj", "v_proj", "down_proj", "up_proj"]),
    "experts": (True, {}, ["q_proj", "k_proj", "v_proj", "o_proj"]),
}
SEQUENCE = {"parallel.tp": 2, "parallel.sequence_parallel": True}
LAYOUTS: dict[str, tuple[str, dict[str, object]]] = {
    "tp2": ("qwen3", {"parallel.tp": 2}),
    "tp2-sp": ("qwen3", SEQUENCE),
    "pp2": ("qwen3", {"parallel.pp": 2, "parallel.recompute": "full"}),
    "pp2-vpp2": ("qwen2-some", {"parallel.pp": 2, "parallel.vpp": 2, "train.tokens_per_micro_batch": 40}),
    "some-tp2-sp": ("qwen2-some", {**SEQUENCE, "parallel.recompute": "selective"}),
    "dp2": ("qwen3", {}),
    "experts-tp2-sp-ep2": ("experts", {**SEQUENCE, "parallel.ep": 2}),
}


def configure(folder: Path, name: str, settings: dict[str, object]) -> Config:
    own = {
        "train.stage": "sft",
        "model.lora.rank": 4,
        "model.lora.alpha": 6.0,
        "model.lora.targets": MODELS[name][2],
        "optim.warmup_steps": 0,
        "optim.lr": 1e-3,
    }
    return make_config(folder / name, own | settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, random adapters of each as PEFT has them, and what PEFT and the ranks make of them."""
    folder = tmp_path_factory.mktemp("lora")
    aside = {**os.environ, "PYTHONPATH": str(Path(sys.prefix) / "compared")}  # see tools/setup_env.sh
    program = [sys.executable, str(Path(__file__).with_name("peft_reference.py"))]
    arrays = {
        name: np.array([*(getattr(s, name) for s in SAMPLES), None], dtype=object)[:-1]
        for name in ("token_ids", "loss_mask")
    }
    for name, (experts, fields, _) in MODELS.items():
        make_model(folder / name, experts=experts, **fields)
        config = configure(folder, name, {})
        shape, generator = hf_config.read(folder / name / "config.json"), torch.Generator().manual_seed(1)
        factors = {
            f.key: torch.randn(f.shape, generator=generator) * 0.2 for f in lora.factors(shape, config.model.lora)
        }
        theirs = folder / "peft" / name
        (theirs / "adapters").mkdir(parents=True)
        write_peft(theirs / "adapters", config.model.lora, factors, str(folder / name))
        adamw = {"lr": config.optim.lr, "betas": [config.optim.beta1, config.optim.beta2]}
        adamw |= {"weight_decay": config.optim.weight_decay, "eps": 1e-8}
        case = {"model": str(folder / name), "adapters": str(theirs / "adapters"), "adamw": adamw, "steps": STEPS}
        (theirs / "case.json").write_text(json.dumps(case | {"clip_grad": config.optim.clip_grad}))
        np.savez(theirs / "samples.npz", **arrays)
    subprocess.run([*program, *(str(folder / "peft" / name) for name in MODELS)], env=aside, check=True)
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(measure, 2, folder)


def measure(folder: Path) -> dict[str, Any]:
    """As one of two ranks: by layout what it has of the log-probs, the gradients and the exported adapters."""
    results: dict[str, Any] = {}
    for layout, (name, settings) in LAYOUTS.items():
        config = configure(folder, name, settings)
        with parallel.init_parallel(config):
            results[layout] = in_layout(config, folder, layout, name)
    return results


def in_layout(config: Config, folder: Path, layout: str, name: str) -> dict[str, Any]:
    batch, trainer = Batch(SAMPLES), PolicyTrainer(config)
    first = trainer.log_probs(trainer.policy.chunks, batch)
    given = read_peft(folder / "peft" / name / "adapters")
    for parameter in factors_of(trainer):
        axis, whole = parameter.factor.axis, given[parameter.factor.key]
        tp, rank = config.parallel.tp, parallel_state.get_tensor_model_parallel_rank()
        with torch.no_grad():
            parameter.copy_(whole if axis is None else whole.chunk(tp, axis)[rank])
    trainer.policy.optimizer.reload_model_params()
    before = trainer.log_probs(trainer.policy.chunks, batch)
    with adapters.base_alone(trainer.chunks):
        base = trainer.log_probs(trainer.policy.chunks, batch)
    norms = [trainer.update(batch)["grad_norm"]]
    gradients = {p.factor.key: p.main_grad.clone() / min(1, 0.5 / norms[0]) for p in factors_of(trainer)}
    norms += [trainer.update(batch)["grad_norm"] for _ in range(STEPS - 1)]
    after = trainer.log_probs(trainer.policy.chunks, batch)
    out = folder / "out" / layout
    with Checkpoints(out / "checkpoints", 1, 60.0) as checkpoints:
        checkpoints.save(STEPS, trainer.checkpointed, {})
    hf.save_hf(trainer.chunks, out / "hf", folder / name)
    if torch.distributed.get_rank() == 0:
        checkpoint = storage.find_checkpoint(out)
        convert.to_peft(checkpoint, out / "peft", folder / name, "base", None)
        convert.to_hf(checkpoint, out / "merged", folder / name, None, 1 << 30)
    torch.distributed.barrier()
    state = sum(part.numel() for part in trainer.policy.gradients())
    return {"first": first, "base": base, "before": before, "after": after, "gradients": gradients, "state": state}


def factors_of(trainer: PolicyTrainer) -> list[torch.nn.Parameter]:
    return [p for chunk in trainer.chunks for p in chunk.parameters() if hasattr(p, "factor")]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probs_equal_peft_before_and_after_three_steps(
    folder: Path, found: list[dict[str, Any]], layout: str
) -> None:
    theirs = folder / "peft" / LAYOUTS[layout][0]
    for when in ("before", "after"):
        wanted = np.load(theirs / f"{when}.npz")
        for number, (sample, row) in enumerate(zip(SAMPLES, found[0][layout][when], strict=True)):
            assert np.abs(row[sample.loss_mask > 0] - wanted[f"arr_{number}"]).max() < TOLERANCE
    before, base = (np.concatenate(found[0][layout][which]) for which in ("before", "base"))
    assert np.abs(before - base).max() > 0.1


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "dp2"])
def test_gradients_equal_peft(folder: Path, found: list[dict[str, Any]], layout: str) -> None:
    wanted = load_file(folder / "peft" / LAYOUTS[layout][0] / "gradients.safetensors")
    seen = set()
    for rank, results in enumerate(found):
        for key, gradient in results[layout]["gradients"].items():
            expected = wanted[f"base_model.model.{key}"]
            if expected.shape != gradient.shape:
                axis = next(axis for axis in (0, 1) if expected.shape[axis] != gradient.shape[axis])
                expected = expected.chunk(2, axis)[rank]
            assert (gradient - expected).abs().max() < TOLERANCE, key
            seen.add(f"base_model.model.{key}")
    assert seen == wanted.keys()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_steps_equal_peft_and_are_exported_as_it_has_them(folder: Path, layout: str, found: object) -> None:
    wanted = load_file(folder / "peft" / LAYOUTS[layout][0] / "trained.safetensors")
    ours = load_file(folder / "out" / layout / "peft" / "adapter_model.safetensors")
    before = load_file(folder / "peft" / LAYOUTS[layout][0] / "adapters" / "adapter_model.safetensors")
    assert ours.keys() == wanted.keys()
    for name in wanted:
        assert (before[name] - wanted[name]).abs().max() > 100 * TOLERANCE
        assert (ours[name] - wanted[name]).abs().max() < TOLERANCE, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_run_exports_is_its_checkpoint_merged(folder: Path, layout: str, found: object) -> None:
    run, converted = (load_file(folder / "out" / layout / name / "model.safetensors") for name in ("hf", "merged"))
    base = load_file(folder / LAYOUTS[layout][0] / "model.safetensors")
    assert run.keys() == converted.keys() == base.keys()
    changed = {name for name in base if not torch.equal(base[name], run[name])}
    assert {name.split(".")[-2] for name in changed} == set(MODELS[LAYOUTS[layout][0]][2])
    assert all((run[name] - converted[name]).abs().max() < 1e-6 for name in base)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_at_the_start_the_model_is_the_base(found: list[dict[str, Any]], layout: str) -> None:
    for results in found:
        assert all(map(np.array_equal, results[layout]["first"], results[layout]["base"]))
