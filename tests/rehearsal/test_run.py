"""A rehearsed run: the memory of its ranks is as planned, and what does not fit is named."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_collab.commands.__main__ import run
from megatron_collab.config import Config
from megatron_collab.models import hf_to_megatron
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.planning.memory import (
    model_config_file,
    plan_memory,
    read_run,
    rotary_table,
    server_adapters,
    server_weights,
)
from megatron_collab.rehearsal import run as rehearsal
from megatron_collab.rehearsal import servers
from megatron_collab.rehearsal.compare import lines, ratios, table
from megatron_collab.rehearsal.publishing import Publishing
from megatron_collab.rehearsal.run import RankMemory, rehearse
from megatron_collab.settings import ConfigError
from megatron_collab.trainer import logprobs
from tests.helpers import policy_servers

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 2048,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
# Expert parallel ranks get a few more tokens: 6 experts do not divide those of a micro-batch.
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
}
# train_70b on four GPUs of one node: tensor and pipeline parallel, a server of four ranks on the same.
SMALL = [
    "experiment=train_70b",
    "launch.nodes=1",
    "launch.nproc_per_node=4",
    "parallel.tp=2",
    "parallel.pp=2",
    "parallel.vpp=1",
    "rollout.server.tp=4",
    "rollout.server.replicas=1",
    "rollout.server.fp8=false",
    "rollout.server.max_total_tokens=4096",
    "rollout.context_length=1024",
    "rollout.turn.max_new_tokens=256",
    "rollout.future.max_new_tokens=256",
    "train.tokens_per_micro_batch=1024",
]
# This process has imported Megatron without TransformerEngine, whose layers are in test_engine.py.
LOCAL = [*SMALL, "launch.device=cpu", "model.fp8=null", "model.fp8_recipe=delayed"]


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    return [*LOCAL, f"model.path={folder(tmp_path, {})}"]


def folder(where: Path, changes: dict[str, Any]) -> Path:
    """The config.json of a small Llama."""
    (where / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return where


def load_run(options: Sequence[str]) -> tuple[Config, ModelShape, dict[str, Any]]:
    config, shape = read_run(options)
    return config, shape, json.loads(model_config_file(config.model.path).read_text())


@pytest.mark.slow
@pytest.mark.processes
def test_every_class_holds_what_the_plan_says(options: list[str]) -> None:
    config, shape, hf = load_run(options)
    memories, plan = list(rehearse(config, shape, hf)), plan_memory(config, shape)
    assert [(memory.kind.stage, list(memory.ranks)) for memory in memories] == [(0, [0, 1]), (1, [2, 3])]
    every = ratios((memory, plan[memory.kind.stage]) for memory in memories)
    assert len(every) > 20 and 0.95 <= min(every) <= max(every) <= 1.05
    for memory in memories:
        parts = {part.name: part for part in memory.parts}
        # Besides the parts there are temporaries; the head's are freed at the peak of activations, or the reverse.
        least = sum(parts[name].training for name in ("parameters", "gradients", "optimizer", "reference"))
        assert memory.peak > least + max(part.training for part in memory.parts)
        assert parts["temporaries"].training > 0 and parts["optimizer"].sampling == 0
        # Float32 weights and both moments of all, and the weights as they are: 14 bytes a parameter.
        assert memory.snapshot == pytest.approx(parts["parameters"].training / 2 * 14, rel=0.01)
        assert table(memory, plan[memory.kind.stage]).startswith(
            f"ranks {memory.rank}-{memory.rank + 1} (stage {memory.kind.stage})"
        )


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_virtual_stages(tmp_path: Path, recompute: str) -> None:
    """In a small model, tensors waiting between them take as much memory as its layers."""
    path = folder(tmp_path, {"intermediate_size": 512})
    settings = ["parallel.vpp=2", f"parallel.recompute={recompute}", "train.stage=sft"]
    config, shape, hf = load_run([*LOCAL, f"model.path={path}", *settings])
    plan = plan_memory(config, shape)
    for memory in rehearse(config, shape, hf):
        of_activations = [
            line.ratio for line in lines(plan[memory.kind.stage], memory.parts) if line.part == "activations"
        ]
        assert of_activations[0] == pytest.approx(1, abs=0.01), memory.kind.stage


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("serve", ["merged", "adapters"])
def test_adapters(options: list[str], monkeypatch: pytest.MonkeyPatch, serve: str) -> None:
    """In a whole run: frozen weights, no reference, memory of adapters, and what is sent to the servers."""
    monkeypatch.setattr(servers, "rehearse", lambda order: [servers.ServerMemory(0)])
    apart = ["rollout.server.colocated=false", "parallel.offload=false"]
    config, shape, hf = load_run([*options, *apart, "model.lora.rank=16", f"model.lora.serve={serve}"])
    memories, plan = list(rehearse(config, shape, hf)), plan_memory(config, shape)
    every = ratios((memory, plan[memory.kind.stage]) for memory in memories)
    assert len(every) > 8 and 0.95 <= min(every) <= max(every) <= 1.05
    for memory in memories:
        parts = {part.name: part.training for part in memory.parts}
        assert "reference" not in parts and parts["gradients"] < parts["parameters"] / 4


@pytest.mark.slow
@pytest.mark.processes
def test_pairs(options: list[str]) -> None:
    """Of stage dpo, with a copy of the model as reference."""
    config, shape, hf = load_run([*options, "train.stage=dpo", "algo.dpo.precompute=false"])
    memories, plan = list(rehearse(config, shape, hf)), plan_memory(config, shape)
    every = ratios((memory, plan[memory.kind.stage]) for memory in memories)
    assert len(every) > 8 and 0.95 <= min(every) <= max(every) <= 1.05
    assert all("reference" in {part.name for part in memory.parts} for memory in memories)


@pytest.mark.slow
@pytest.mark.processes
def test_a_critic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tiles so small that values of hidden states take more memory than log-probs."""
    monkeypatch.setattr(logprobs, "TILE", dict.fromkeys(logprobs.TILE, 1 << 15))
    changed = ["algo=ppo", "parallel.tp=1", "parallel.sequence_parallel=false", "rollout.server.colocated=false"]
    path = folder(tmp_path, {"num_hidden_layers": 2})
    config, shape, hf = load_run([*LOCAL, f"model.path={path}", *changed, "parallel.offload=false"])
    monkeypatch.setattr(servers, "rehearse", lambda order: [servers.ServerMemory(0)])  # no critic there
    plan = plan_memory(config, shape)
    *_, last = rehearse(config, shape, hf)
    training_ratios = {line.part: line.ratio for line in lines(plan[-1], last.parts) if line.phase == "training"}
    names = ["head", "activations", *(f"critic: {part}" for part in ("parameters", "gradients", "optimizer"))]
    assert [training_ratios[name] for name in names] == pytest.approx([1] * len(names), abs=0.01), training_ratios


@pytest.mark.slow
@pytest.mark.processes
def test_classes_that_differ_in_what_they_save_share_a_step(tmp_path: Path) -> None:
    path = folder(tmp_path, EXPERTS | {"num_experts": 8})
    layout = ["parallel.tp=1", "parallel.pp=1", "parallel.sequence_parallel=false", "parallel.ep=2"]
    config, shape, hf = load_run([*LOCAL, f"model.path={path}", "train.stage=sft", *layout])
    with mock.patch.object(rehearsal, "step", wraps=rehearsal.step) as steps:
        memories = list(rehearse(config, shape, hf))
        assert [list(memory.ranks) for memory in memories] == [[0], [1], [2, 3]]  # all weights, experts alone, neither
        assert steps.call_count == 1
    assert memories[0].snapshot > memories[1].snapshot > memories[2].snapshot
    for memory in rehearse(config, shape, hf, all_ranks=True):
        # But for single numbers, and for where the optimizer's ranges of data parallel ranks end.
        assert sizes(memory) == pytest.approx(sizes(memories[0]), rel=1e-3, abs=64)


def sizes(memory: RankMemory) -> list[float]:
    return [memory.peak, *(size for part in memory.parts for size in (part.training, part.sampling, part.host))]


@pytest.mark.slow
@pytest.mark.processes
def test_a_server_that_differs_from_the_plan(options: list[str]) -> None:
    """SGLang's own parameters are compared, and every slice is written into them, also of adapters."""
    config, shape, hf = load_run([*options, "model.lora.rank=16", "model.lora.serve=adapters"])
    order = Publishing.of(config, shape).order(hf)
    whole = order.places[0]
    name = "model.layers.0.mlp.down_proj.weight"
    less = replace(whole, parameters={key: value for key, value in whole.parameters.items() if key != name})
    size, rows = whole.buckets[0]
    beyond = replace(whole, buckets=[(size // 2, rows)])
    memories = servers.rehearse(replace(order, places=[whole, less, beyond]))
    spec = policy_servers(config)
    weights = server_weights(spec, shape) + rotary_table(shape)
    assert memories[0].fault == "" and memories[0].weights == pytest.approx(weights, rel=0.001)
    assert memories[0].adapters == server_adapters(spec, shape) > 0
    assert name in memories[1].fault and "no such parameter" in memories[1].fault
    assert memories[2].fault  # a bucket that is too small for its slices


@pytest.mark.processes
def test_a_parameter_that_the_table_lacks(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    name, entries = "decoder.layers.2.mlp.linear_fc2.weight", hf_to_megatron.table
    monkeypatch.setattr(
        hf_to_megatron, "table", lambda shape: [entry for entry in entries(shape) if entry.megatron != name]
    )
    config, shape, hf = load_run([*options, "train.stage=sft"])
    with pytest.raises(ConfigError, match=f"^rank 2 of the trainer, pipeline stage 1: {name}: the table of weights"):
        list(rehearse(config, shape, hf))


@pytest.mark.parametrize(
    ("changes", "settings", "fault"),
    [
        ({}, ["rollout.server.tp=5"], "rollout.server"),  # a GPU more than the node has
        ({}, ["parallel.cp=2", "parallel.tp=1", "parallel.sequence_parallel=false"], "parallel.cp=2"),
        ({}, ["model.fp8=hybrid"], "model.fp8=hybrid: only"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, [], "parallel.tp"),
        ({"intermediate_size": 1000}, ["rollout.server.fp8=true"], "rollout.server.fp8"),
    ],
)
def test_settings_that_cannot_work(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    settings: list[str],
    fault: str,
) -> None:
    assert run("rehearse", [*LOCAL, f"model.path={folder(tmp_path, changes)}", *settings]) == 2
    assert fault in capsys.readouterr().err


@pytest.mark.processes
def test_a_gpu_that_is_too_small(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("rehearse", [*options, "train.stage=sft", "--gpu-gib", "0.05"]) == 2
    output = capsys.readouterr()
    assert "rank 0 needs" in output.err and "activations" in output.err and "ranks 0-1 (stage 0)" in output.out


def test_a_gpu_must_be_hidden(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert run("rehearse", ["experiment=train_70b"]) == 2
    assert "set CUDA_VISIBLE_DEVICES= (empty)" in capsys.readouterr().err
