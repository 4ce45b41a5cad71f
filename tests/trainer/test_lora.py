"""Adapters equal PEFT's on transformers in every layout: log-probs, gradients, three steps, exports.

Also: the reference is the base, only adapters are saved, dropout applies only in training, resuming is exact.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

from megatron_collab.checkpoint import convert, hf, storage
from megatron_collab.checkpoint.adapters import read_peft, write_peft
from megatron_collab.checkpoint.checkpointer import Checkpoints
from megatron_collab.commands.__main__ import run
from megatron_collab.config import Config
from megatron_collab.launch.trainer_specs import network_spec, trainer_spec
from megatron_collab.models import hf_config, lora
from megatron_collab.runtime.process import EXIT_BAD_INPUT, RunStopped
from megatron_collab.trainer.megatron import lora as adapters
from megatron_collab.trainer.megatron import model as policies
from megatron_collab.trainer.trainer import PolicyTrainer
from megatron_collab.types import Batch
from tests.helpers import selected
from tests.ranks import init_parallel, learn, make_config, make_model, make_samples, run_ranks

pytestmark = pytest.mark.processes

TOLERANCE = 1e-5
STEPS = 3
SAMPLES = make_samples(7, seed=3)
# By name: (experts?, fields of config.json, targets)
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
# Without those whose parts are in others.
FAST = ("tp2", "pp2-vpp2", "experts-tp2-sp-ep2")
EVERY_LAYOUT = [pytest.param(layout, marks=[pytest.mark.slow] * (layout not in FAST)) for layout in LAYOUTS]


def configure(folder: Path, name: str, settings: dict[str, object]) -> Config:
    defaults = {
        "train.stage": "sft",
        "model.lora.rank": 4,
        "model.lora.alpha": 6.0,
        "model.lora.targets": MODELS[name][2],
        "optim.warmup_steps": 0,
        "optim.lr": 3e-4,  # AdamW amplifies gradients that are only rounding
    }
    return make_config(folder / name, defaults | settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, random adapters of each in PEFT's format, and PEFT's results with them."""
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
def rank_results(folder: Path, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    layouts = {"tp2"} | {layout for (layout,) in selected(request, "layout")}
    return run_ranks(measure, 2, folder, [layout for layout in LAYOUTS if layout in layouts])


def measure(folder: Path, layouts: list[str]) -> dict[str, Any]:
    """As one of two ranks: by layout, log-probs, gradients and exported adapters."""
    results: dict[str, Any] = {}
    for layout in layouts:
        name, settings = LAYOUTS[layout]
        config = configure(folder, name, settings)
        with init_parallel(config):
            results[layout] = in_layout(config, folder, layout, name)
    results["lives"] = live(folder)
    return results


def in_layout(config: Config, folder: Path, layout: str, name: str) -> dict[str, Any]:
    batch, trainer = Batch(SAMPLES), PolicyTrainer(trainer_spec(config))
    first = trainer.log_probs(trainer.policy.chunks, batch)
    loaded = read_peft(folder / "peft" / name / "adapters")
    for parameter in factors_of(trainer):
        axis, whole = parameter.factor.axis, loaded[parameter.factor.key]
        tp, rank = config.parallel.tp, parallel_state.get_tensor_model_parallel_rank()
        with torch.no_grad():
            parameter.copy_(whole if axis is None else whole.chunk(tp, axis)[rank])
    trainer.policy.optimizer.reload_model_params()
    before = trainer.log_probs(trainer.policy.chunks, batch)
    with adapters.switched(trainer.chunks, active=False):
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
    return {"first": first, "base": base, "before": before, "after": after, "gradients": gradients}


RL = {"train.stage": "rl", "algo.kl_coef": 0.1, "model.lora.dropout": 0.3}
LIVES: dict[str, dict[str, object]] = {
    "tp2-sp": {**RL, **SEQUENCE},
    "dp2-gae": {**RL, "algo.advantage": "gae", "algo.critic_lr": 1e-3},
}


def live(folder: Path) -> dict[str, Any]:
    """As one of two ranks: adapters that learn from rewards, from the start and resumed from a checkpoint."""
    results: dict[str, Any] = {}
    batch = Batch(SAMPLES)
    for name, settings in LIVES.items():
        config, saved = configure(folder, "qwen3", settings), folder / "lives" / name
        with init_parallel(config):
            trainer = PolicyTrainer(trainer_spec(config))
            base = trainer.log_probs(trainer.policy.chunks, batch)
            for _ in range(2):
                learn(trainer, batch)
            reference = trainer.score(batch).reference_log_probs
            now, repeated = (trainer.log_probs(trainer.policy.chunks, batch) for _ in range(2))
            with Checkpoints(saved, 1, 60.0) as checkpoints:
                checkpoints.save(2, trainer.checkpointed, {})
            metrics = [learn(trainer, batch) for _ in range(2)]
            other = PolicyTrainer(trainer_spec(config))
            with Checkpoints(saved, 1, 60.0) as checkpoints:
                checkpoints.load_latest(other.checkpointed)
            other.step = 2
            resumed = [learn(other, batch) for _ in range(2)]
            pairs = zip(weights_of(trainer), weights_of(other), strict=True)
            results[name] = {
                "reference": [base, reference],
                "still": [now, repeated],
                "metrics": [metrics, resumed],
                "same": all(torch.equal(*pair) for pair in pairs),
                "copies": trainer.reference,
            }
    with init_parallel(configure(folder, "qwen3", RL | {"parallel.pp": 2})):
        trainer = PolicyTrainer(trainer_spec(configure(folder, "qwen3", RL | {"parallel.pp": 2})))
        with Checkpoints(folder / "lives" / "tp2-sp", 1, 60.0) as checkpoints:
            checkpoints.load_latest(trainer.checkpointed)
        results["resharded"] = [trainer.log_probs(trainer.policy.chunks, batch), results["tp2-sp"]["still"][0]]
        if torch.distributed.get_rank() == 0:
            convert.to_checkpoint(folder / "qwen3", folder / "whole", None, 1 << 30)
        torch.distributed.barrier()
        with Checkpoints(folder / "whole", 1, 60.0) as checkpoints, pytest.raises(RunStopped) as refused:
            checkpoints.load_latest(trainer.checkpointed)
        results["refused"] = str(refused.value)
    return results


def weights_of(trainer: PolicyTrainer) -> list[torch.Tensor]:
    """All trained parameters."""
    networks = trainer.trainables.values()
    return [p for network in networks for chunk in network.chunks for p in chunk.parameters() if p.requires_grad]


def factors_of(trainer: PolicyTrainer) -> list[torch.nn.Parameter]:
    return [p for chunk in trainer.chunks for p in chunk.parameters() if hasattr(p, "factor")]


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_log_probs_equal_peft_before_and_after_three_steps(
    folder: Path, rank_results: list[dict[str, Any]], layout: str
) -> None:
    theirs = folder / "peft" / LAYOUTS[layout][0]
    for when in ("before", "after"):
        expected = np.load(theirs / f"{when}.npz")
        for number, (sample, row) in enumerate(zip(SAMPLES, rank_results[0][layout][when], strict=True)):
            assert np.abs(row[sample.loss_mask > 0] - expected[f"arr_{number}"]).max() < TOLERANCE
    before, base = (np.concatenate(rank_results[0][layout][which]) for which in ("before", "base"))
    assert np.abs(before - base).max() > 0.1


@pytest.mark.parametrize("layout", [layout for layout in EVERY_LAYOUT if "dp2" not in layout.values])
def test_gradients_equal_peft(folder: Path, rank_results: list[dict[str, Any]], layout: str) -> None:
    references = load_file(folder / "peft" / LAYOUTS[layout][0] / "gradients.safetensors")
    seen = set()
    for rank, results in enumerate(rank_results):
        for key, gradient in results[layout]["gradients"].items():
            expected = references[f"base_model.model.{key}"]
            if expected.shape != gradient.shape:
                axis = next(axis for axis in (0, 1) if expected.shape[axis] != gradient.shape[axis])
                expected = expected.chunk(2, axis)[rank]
            assert (gradient - expected).abs().max() < TOLERANCE, key
            seen.add(f"base_model.model.{key}")
    assert seen == references.keys()


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_three_steps_equal_peft_and_are_exported_in_its_format(folder: Path, layout: str, rank_results: object) -> None:
    expected = load_file(folder / "peft" / LAYOUTS[layout][0] / "trained.safetensors")
    ours = load_file(folder / "out" / layout / "peft" / "adapter_model.safetensors")
    before = load_file(folder / "peft" / LAYOUTS[layout][0] / "adapters" / "adapter_model.safetensors")
    assert ours.keys() == expected.keys()
    for name in expected:
        assert (before[name] - expected[name]).abs().max() > 50 * TOLERANCE
        assert (ours[name] - expected[name]).abs().max() < TOLERANCE, name


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_a_run_exports_its_merged_checkpoint(folder: Path, layout: str, rank_results: object) -> None:
    run, converted = (load_file(folder / "out" / layout / name / "model.safetensors") for name in ("hf", "merged"))
    base = load_file(folder / LAYOUTS[layout][0] / "model.safetensors")
    assert run.keys() == converted.keys() == base.keys()
    changed = {name for name in base if not torch.equal(base[name], run[name])}
    assert {name.split(".")[-2] for name in changed} == set(MODELS[LAYOUTS[layout][0]][2])
    assert all((run[name] - converted[name]).abs().max() < 1e-6 for name in base)


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_at_the_start_the_model_is_the_base(rank_results: list[dict[str, Any]], layout: str) -> None:
    for results in rank_results:
        assert all(map(np.array_equal, results[layout]["first"], results[layout]["base"]))


def test_convert_writes_adapters_or_merges_them(
    folder: Path, rank_results: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def tool(*words: object) -> int:
        return run("convert", [str(word) for word in words])

    checkpoint, out, base = folder / "out" / "tp2" / "checkpoints", folder / "out" / "tp2", folder / "qwen3"
    assert tool(checkpoint, tmp_path / "peft", "--model", base, "--peft") == 0
    assert tool(checkpoint, tmp_path / "hf", "--model", base) == 0
    for written, exported in ((tmp_path / "peft", out / "peft"), (tmp_path / "hf", out / "merged")):
        (file,) = written.glob("*.safetensors")
        assert file.read_bytes() == (exported / file.name).read_bytes()
    assert json.loads((tmp_path / "peft" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    capsys.readouterr()
    for words, message in (
        ((checkpoint, tmp_path / "no", "--model", folder / "experts"), "give the model that the run started from"),
        ((folder / "whole", tmp_path / "no", "--model", base, "--peft"), "holds whole weights"),
        ((checkpoint, tmp_path / "no", "--model", base, "--verify"), "--verify: adapters are always compared"),
    ):
        assert tool(*words) == EXIT_BAD_INPUT
        assert message in (error := capsys.readouterr().err) and error.count("\n") == 1
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("name", LIVES)
def test_a_resumed_run_is_the_same_including_dropout(rank_results: list[dict[str, Any]], name: str) -> None:
    for rank in rank_results:
        lived = rank["lives"][name]
        first, second = lived["metrics"]
        assert lived["same"] and first == second
        assert first[0]["grad_norm"] > 0 and first[0]["kl"] > 0


@pytest.mark.parametrize("name", LIVES)
def test_the_reference_is_the_base_without_a_copy(rank_results: list[dict[str, Any]], name: str) -> None:
    lived = rank_results[0]["lives"][name]
    base, reference = (np.concatenate(rows) for rows in lived["reference"])
    now, repeated = (np.concatenate(rows) for rows in lived["still"])
    assert lived["copies"] is None and np.array_equal(base, reference)
    assert np.array_equal(now, repeated)  # no dropout outside of training
    assert np.abs(now - base).max() > 1e-3


def test_another_layout_resumes_from_a_checkpoint_and_full_weights_are_refused(
    rank_results: list[dict[str, Any]],
) -> None:
    ours, theirs = (np.concatenate(rows) for rows in rank_results[0]["lives"]["resharded"])
    assert np.abs(ours - theirs).max() < TOLERANCE
    assert "contains whole weights, and with model.lora.rank" in rank_results[0]["lives"]["refused"]


def test_a_checkpoint_contains_only_adapters(folder: Path, rank_results: object) -> None:
    checkpoint = storage.find_checkpoint(folder / "lives" / "dp2-gae")
    keys = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    config = configure(folder, "qwen3", {})
    expected = {f.key for f in lora.factors(hf_config.read(folder / "qwen3" / "config.json"), config.model.lora)}
    stored = {re.sub(r"^(critic\.)?(optimizer\.state\.\w+?\.)?", "", key) for key in keys if "_extra_state" not in key}
    assert stored == expected | {"value_head.weight"}


def test_dropout_drops_inputs_of_adapters(one_rank: Config, folder: Path) -> None:
    config = configure(folder, "qwen3", {"model.lora.dropout": 0.25})
    (chunk,) = policies.load(network_spec(config))
    adapter = next(module for module in chunk.modules() if isinstance(module, adapters.Adapters))
    for part in (*adapter.a.values(), *adapter.b.values()):
        torch.nn.init.ones_(part.data)
    x = torch.ones(4000, 1, 32)
    whole = adapter(x)
    with adapters.switched([chunk], dropping=True):
        dropped = adapter(x)
    assert not torch.equal(whole, dropped)
    assert float(dropped.mean()) == pytest.approx(float(whole.mean()), rel=0.01)
    kept = 0.75 * dropped / whole * 32  # number of inputs kept, of 32
    assert torch.allclose(kept, kept.round(), atol=1e-3)
    assert torch.equal(adapter(x), whole)
