"""What a server's ranks hold is what SGLang's own models have, every element where its loader puts it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.models import hf_to_sglang
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.models.hf_to_sglang import ServerLayout

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def model(family: str, **settings: object) -> dict[str, Any]:
    return {
        "model_type": family,
        "architectures": [ARCHITECTURES[family]],
        "hidden_size": 24,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "vocab_size": 150,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
        **(EXPERTS if family == "qwen3_moe" else {}),
        **settings,
    }


WIDE = {"hidden_size": 200, "intermediate_size": 512, "head_dim": 128}
CASES = [
    (model("llama"), {"tp": 1}),
    (model("llama", tie_word_embeddings=True), {"tp": 4}),  # more ranks than key/value heads
    (model("llama", num_attention_heads=6, num_key_value_heads=3), {"tp": 3}),  # which divides no multiple of 64
    (model("mistral"), {"tp": 2}),
    (model("qwen2"), {"tp": 2}),
    (model("qwen3"), {"tp": 4}),
    (model("qwen3_moe"), {"tp": 2}),
    (model("qwen3_moe"), {"tp": 4, "ep": 2}),
    (model("qwen3_moe", tie_word_embeddings=True), {"tp": 2, "ep": 2}),
    (model("llama", **WIDE), {"tp": 2, "fp8": True}),
    (model("mistral", **WIDE), {"tp": 1, "fp8": True}),
    (model("qwen2", **WIDE), {"tp": 2, "fp8": True}),
    (model("qwen3", **WIDE), {"tp": 2, "fp8": True}),
    (model("qwen3_moe", **WIDE, moe_intermediate_size=256), {"tp": 2, "fp8": True}),
    (model("qwen3_moe", **WIDE, moe_intermediate_size=256), {"tp": 2, "ep": 2, "fp8": True}),
]


@pytest.mark.processes
def test_ranks_hold_what_sglangs_models_hold(tmp_path: Path) -> None:
    """Names, shapes, dtypes, and after SGLang has loaded a checkpoint every element, on each rank."""
    cases = json.dumps([{"hf": hf, "server": server} for hf, server in CASES])
    command = [sys.executable, "-m", "tests.models.hf_to_sglang_worker", cases, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("as SGLang has it") == len(CASES)


@pytest.mark.parametrize(
    ("hf", "server", "said"),
    [
        (
            model("qwen3", num_attention_heads=6),
            {"tp": 3},
            "rollout.server.tp=3: neither divides the model's 2 key/value heads",
        ),
        (
            model("qwen3", num_attention_heads=6),
            {"tp": 4},
            "rollout.server.tp=4: does not divide the model's attention",
        ),
        (model("qwen3", intermediate_size=66), {"tp": 4}, "rollout.server.tp=4: does not divide the model's feed-forw"),
        (model("qwen3_moe", num_experts=6), {"tp": 4, "ep": 4}, "rollout.server.ep=4: does not divide the model's exp"),
        (model("qwen3_moe", moe_intermediate_size=9), {"tp": 2}, "does not divide the model's width of an expert (9)"),
        (model("qwen3_moe", mlp_only_layers=[1]), {"tp": 1}, "layer 1 has no experts"),
    ],
)
def test_what_a_server_cannot_hold_is_said(hf: dict[str, Any], server: dict[str, int], said: str) -> None:
    fault = hf_to_sglang.fault(ModelShape.from_hf(hf), ServerLayout(**server))
    assert fault is not None and said in fault and "\n" not in fault


def test_a_server_that_can_has_no_fault() -> None:
    for hf, server in CASES:
        assert hf_to_sglang.fault(ModelShape.from_hf(hf), ServerLayout(**server)) is None
