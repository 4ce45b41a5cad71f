"""The planned parameters of a server's ranks are those of SGLang's models, each element where its loader puts it."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_collab import patches
from megatron_collab.models import hf_to_megatron, hf_to_sglang, lora
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.models.hf_to_sglang import Parameter, ServerLayout
from megatron_collab.patches.sglang import leave_offsets_unpinned
from megatron_collab.rehearsal.servers import as_rank
from megatron_collab.settings import LoraConfig
from megatron_collab.weight_sync.fp8_blocks import fp8_scales
from tests.ranks import run_ranks

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


ADAPTERS = [["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], ["v_proj", "up_proj"]]


@pytest.mark.processes
def test_ranks_hold_what_sglangs_models_hold(tmp_path: Path) -> None:
    """Names, shapes, dtypes and, after SGLang has loaded a checkpoint, every element, on each rank."""
    run_ranks(compare_all, 1, tmp_path)


def compare_all(folder: Path) -> None:
    """In a separate process: SGLang decides at import that there is no GPU.

    Its models are built and loaded there as any rank of a server. No process groups are made: the layers ask them only
    for a size and a rank.
    """
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    patches.apply("sglang")
    leave_offsets_unpinned()
    torch.set_default_dtype(torch.float32)
    for hf, server in CASES:
        compare(hf, ServerLayout(**server), folder)


def numbered(shape: ModelShape) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, every element a different number."""
    tensors, start = {}, 1
    for name, sides in hf_to_megatron.hf_shapes(shape).items():
        count = torch.Size(sides).numel()
        tensors[name] = torch.arange(start, start + count, dtype=torch.float32).view(sides)
        start += count
    return tensors


def compare(hf: dict[str, Any], layout: ServerLayout, folder: Path) -> None:
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.models import llama, qwen2, qwen3, qwen3_moe
    from transformers import AutoConfig

    models = {
        "llama": llama.LlamaForCausalLM,
        "mistral": llama.LlamaForCausalLM,
        "qwen2": qwen2.Qwen2ForCausalLM,
        "qwen3": qwen3.Qwen3ForCausalLM,
        "qwen3_moe": qwen3_moe.Qwen3MoeForCausalLM,
    }
    (folder / "config.json").write_text(json.dumps(hf))
    shape = ModelShape.from_hf(hf)
    quantization = Fp8Config(True, "dynamic", weight_block_size=[128, 128]) if layout.fp8 else None
    for rank in range(layout.tp):
        parameters = {parameter.name: parameter for parameter in hf_to_sglang.table(shape, layout, rank)}
        with as_rank(folder, layout, "float32", rank), torch.no_grad():
            model = models[hf["model_type"]](AutoConfig.from_pretrained(folder), quantization)
            tensors = dict(model.named_parameters())
            scales = {name: tensors.pop(name) for name in list(tensors) if name.endswith("_scale_inv")}
            assert {name: tuple(value.shape) for name, value in tensors.items()} == {
                name: parameter.shape for name, parameter in parameters.items()
            }
            if layout.fp8:
                check_fp8(parameters, tensors, scales)
                check_kv_scales(parameters, tensors, model)
            else:
                check_elements(parameters, tensors, numbered(shape), model)
                for targets in ADAPTERS:
                    check_adapters(shape, replace(layout, lora=LoraConfig(rank=3, targets=targets)), rank, model)


def check_adapters(shape: ModelShape, layout: ServerLayout, rank: int, model: torch.nn.Module) -> None:
    """SGLang cuts A and B, stacked as for fused layers, into the shards that the table plans for the rank."""
    from sglang.srt.lora.layers import get_lora_layer

    assert layout.lora is not None
    sizes = {factor.key: factor.shape for factor in lora.factors(shape, layout.lora)}
    every = lora.factors(shape, LoraConfig(rank=3))
    numbers = torch.arange(1, 1 + sum(prod(factor.shape) for factor in every), dtype=torch.float32)
    pieces = numbers.split([prod(factor.shape) for factor in every])
    whole = {
        factor.key: number.view(factor.shape) * (factor.key in sizes)
        for factor, number in zip(every, pieces, strict=True)
    }
    matrices = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    seen = set()
    for parameter in hf_to_sglang.adapters(shape, layout, rank):
        name, _, kind = parameter.name.rpartition(".")
        module, _, fused = name.rpartition(".")
        layer = get_lora_layer(model.get_submodule(name), SimpleNamespace())
        keys = [f"{module}.{x}.lora_{kind[-1].upper()}.weight" for x in matrices.get(fused, (fused,))]
        stacked = torch.cat([whole[key] for key in keys])
        expected = layer.slice_lora_a_weights(stacked) if kind == "lora_a" else layer.slice_lora_b_weights(stacked)
        assembled = torch.zeros(parameter.shape)
        for part in parameter.parts:
            assembled[part.shard_index] = whole[part.hf][part.hf_index]
            seen.add(part.hf)
        assert torch.equal(assembled, expected), parameter.name
    assert seen == sizes.keys()


def check_fp8(
    parameters: dict[str, Parameter], tensors: dict[str, torch.Tensor], scales: dict[str, torch.Tensor]
) -> None:
    quantized = {name: parameter for name, parameter in parameters.items() if parameter.quantized}
    assert {name for name, value in tensors.items() if value.dtype is torch.float8_e4m3fn} == quantized.keys()
    assert {name: (tuple(value.shape), value.dtype) for name, value in scales.items()} == {
        f"{name}_scale_inv": (fp8_scales(parameter.shape), torch.float32) for name, parameter in quantized.items()
    }


def check_kv_scales(parameters: dict[str, Parameter], tensors: dict[str, torch.Tensor], model: torch.nn.Module) -> None:
    """Scales that SGLang derives from the constants at the end of a publish are 1."""
    from sglang.srt.layers.radix_attention import RadixAttention

    constants = {name: parameter.constant for name, parameter in parameters.items() if parameter.constant is not None}
    for name, value in constants.items():
        assert tensors[name].dtype is torch.float32 and not parameters[name].parts
        tensors[name].fill_(value)
    attention = {name: module for name, module in model.named_modules() if isinstance(module, RadixAttention)}
    scaled = {name: module for name, module in attention.items() if module.quant_method is not None}
    assert {f"{name}.{x}_scale" for name in scaled for x in "kv"} == constants.keys()
    for module in scaled.values():
        module.quant_method.process_weights_after_loading(module)
        assert (module.k_scale_float, module.v_scale_float) == (1.0, 1.0)


def check_elements(
    parameters: dict[str, Parameter],
    tensors: dict[str, torch.Tensor],
    hf: dict[str, torch.Tensor],
    model: torch.nn.Module,
) -> None:
    for value in tensors.values():
        value.fill_(-1)
    model.load_weights(hf.items())
    for name, parameter in parameters.items():
        if (tensors[name] == -1).all():  # a tied head of Qwen3-MoE, which SGLang does not load
            assert name == "lm_head.weight" and parameter.parts[0].hf == "model.embed_tokens.weight"
            continue
        for part in parameter.parts:
            block = tensors[name][part.shard_index]
            assert (block == hf[part.hf][part.hf_index].view(block.shape)).all(), (name, part)


@pytest.mark.parametrize(
    ("hf", "server", "message"),
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
def test_an_impossible_server_layout_is_reported(hf: dict[str, Any], server: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=f"^.*{re.escape(message)}.*$"):
        hf_to_sglang.table(ModelShape.from_hf(hf), ServerLayout(**server), 0)


def test_valid_layouts_are_accepted() -> None:
    for hf, server in CASES:
        assert hf_to_sglang.table(ModelShape.from_hf(hf), ServerLayout(**server), server["tp"] - 1)
