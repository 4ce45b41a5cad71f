"""Settings set exactly these fields of Megatron's configuration, with and without TransformerEngine.

TransformerEngine is not installed here: tests check what Megatron is asked for.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer import transformer_config as megatron
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import get_submodules

from megatron_collab.config import Config
from megatron_collab.launch.trainer_specs import network_spec
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.runtime import device
from megatron_collab.trainer.megatron import config, layers
from megatron_collab.trainer.megatron.config import backend_spec, transformer_config
from tests.helpers import configured
from tests.trainer.shapes import EXPERTS, SHAPE, shape_of

MOE = shape_of(model_type="qwen3_moe", **EXPERTS)


def configure(settings: dict[str, Any]) -> Config:
    return configured(Config(), settings)


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Features that the probe reports as available; empty at first."""
    names: set[str] = set()
    monkeypatch.setattr(device, "probe", lambda name: SimpleNamespace(available=name in names))
    # Megatron looks for the functions themselves.
    for module, parts in {
        rope_utils: ["fused_apply_rotary_pos_emb_thd"],
        moe_utils: [
            "fused_permute",
            "fused_permute_with_probs",
            "fused_sort_chunks_by_index",
            "fused_sort_chunks_by_index_with_probs",
            "fused_unpermute",
        ],
    }.items():
        for part in parts:
            monkeypatch.setattr(module, part, object(), raising=False)
    monkeypatch.setattr(megatron, "is_te_min_version", lambda version: True)
    return names


PLAIN = {
    "tensor_model_parallel_size": 1,
    "sequence_parallel": False,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "pipeline_model_parallel_layout": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "variable_seq_lengths": False,
    "moe_token_dispatcher_type": "alltoall",
    "overlap_p2p_comm": False,
    "batch_p2p_comm": True,
    "batch_p2p_sync": False,
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "recompute_modules": ["core_attn"],
    "fp8": None,
    "fp8_param": False,
    "first_last_layers_bf16": False,
    "bf16": True,
    "params_dtype": torch.bfloat16,
    "pipeline_dtype": torch.bfloat16,
    "softmax_scale": None,
    "num_moe_experts": None,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "cross_entropy_loss_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
}


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        ({}, {}),
        (
            {"model.dtype": "float32"},
            {"bf16": False, "params_dtype": torch.float32, "pipeline_dtype": torch.float32},
        ),
        (
            {"parallel.tp": 2, "parallel.sequence_parallel": True},
            {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        ),
        ({"parallel.pp": 2}, {"pipeline_model_parallel_size": 2, "variable_seq_lengths": True}),
        (
            {"parallel.pp": 2, "parallel.vpp": 2},
            {
                "pipeline_model_parallel_size": 2,
                "virtual_pipeline_model_parallel_size": 2,
                "variable_seq_lengths": True,
                "overlap_p2p_comm": True,
                "batch_p2p_comm": False,
            },
        ),
        ({"parallel.cp": 2}, {"context_parallel_size": 2}),
        (
            {"parallel.recompute": "selective"},
            {"recompute_granularity": "selective", "recompute_modules": ["mlp", "moe"]},
        ),
        (
            {"parallel.recompute": "full"},
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        ),
        *(
            (
                {"model.fp8": "hybrid", "model.fp8_recipe": recipe, "model.fp8_params": True},
                {"fp8": "hybrid", "fp8_recipe": recipe, "fp8_param": True},
            )
            for recipe in ("delayed", "tensorwise", "blockwise")
        ),
        (
            {"model.fp8": "e4m3", "model.fp8_recipe": "tensorwise", "model.fp8_skip_last": 2},
            {
                "fp8": "e4m3",
                "fp8_recipe": "tensorwise",
                "first_last_layers_bf16": True,
                "num_layers_at_start_in_bf16": 0,
                "num_layers_at_end_in_bf16": 2,
            },
        ),
    ],
    ids=str,
)
def test_settings_set_these_fields(available: set[str], settings: dict[str, Any], changed: dict[str, Any]) -> None:
    result = transformer_config(network_spec(configure(settings)), shape_of(num_hidden_layers=4))
    expected = PLAIN | changed
    assert {name: getattr(result, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"moe_router_pre_softmax": False, "moe_layer_freq": 1, "expert_model_parallel_size": 1}),
        ({"norm_topk_prob": False}, {"moe_router_pre_softmax": True}),
        ({"decoder_sparse_step": 2}, {"moe_layer_freq": [0, 1]}),
    ],
    ids=str,
)
def test_experts_are_routed_as_the_model_says(
    available: set[str], fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    result = transformer_config(network_spec(configure({})), shape_of(model_type="qwen3_moe", **EXPERTS | fields))
    expected = {
        "num_moe_experts": 8,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 16,
        "moe_router_score_function": "softmax",
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": None,
        "expert_tensor_parallel_size": 1,
        **expected,
    }
    assert {name: getattr(result, name) for name in expected} == expected


FUSIONS = {
    "apply_rope_fusion": {"transformer_engine"},
    "bias_activation_fusion": {"cuda"},
    "gradient_accumulation_fusion": {"transformer_engine", "apex"},
    "moe_grouped_gemm": {"transformer_engine"},
    "moe_permute_fusion": {"transformer_engine"},
}


@pytest.mark.parametrize(
    "features",
    [set(), {"cuda"}, {"cuda", "apex"}, {"cuda", "transformer_engine"}],
    ids=lambda features: "-".join(sorted(features)),
)
def test_fused_kernels_follow_from_available_features(available: set[str], features: set[str]) -> None:
    available |= features
    result = transformer_config(network_spec(configure({})), MOE)
    assert {name: getattr(result, name) for name in FUSIONS} == {
        name: bool(enabling & features) for name, enabling in FUSIONS.items()
    }


def test_float32_is_computed_by_the_local_layers(one_rank: Config, available: set[str]) -> None:
    """TransformerEngine's fused attention needs 16 bits; its fallback stores the scores of all pairs of tokens."""
    available |= {"cuda", "transformer_engine"}
    result = transformer_config(network_spec(configure({"model.dtype": "float32"})), MOE)
    assert [name for name in FUSIONS if getattr(result, name)] == ["bias_activation_fusion"]
    assert backend_spec(result).layer_norm is layers.RMSNorm


@pytest.mark.parametrize(
    ("layers", "pp", "vpp"), [(3, 2, 1), (10, 4, 1), (13, 8, 1), (5, 5, 1), (8, 2, 1), (5, 2, 2), (8, 2, 2), (13, 3, 4)]
)
def test_stages_share_the_layers_evenly(available: set[str], layers: int, pp: int, vpp: int) -> None:
    network = network_spec(configure({"parallel.pp": pp, "parallel.vpp": vpp}))
    result = transformer_config(network, shape_of(num_hidden_layers=layers))
    layout = result.pipeline_model_parallel_layout
    if layers % (pp * vpp) == 0:
        assert layout is None
        return
    counts = [layout.layout[rank][stage].count(LayerType.decoder) for stage in range(vpp) for rank in range(pp)]
    assert sum(counts) == layers
    assert max(counts) - min(counts) == 1
    assert counts == sorted(counts, reverse=True)


def test_the_engines_layers_are_used_if_it_is_available(available: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(
        config,
        "get_gpt_decoder_block_spec",
        lambda *arguments, **options: calls.append((arguments, options)) or "block",
    )
    # The module itself imports TransformerEngine.
    filled = SimpleNamespace(fill_in=lambda block: f"{block} with our attention")
    monkeypatch.setattr("megatron_collab.trainer.megatron.engine_attention", filled, raising=False)
    available.add("transformer_engine")
    result = transformer_config(network_spec(configure({})), MOE)
    assert backend_spec(result, vp_stage=1) == "block with our attention"
    assert calls == [((result, True), {"normalization": "RMSNorm", "vp_stage": 1})]


@pytest.mark.parametrize("shape", [SHAPE, shape_of(model_type="llama"), MOE], ids=lambda shape: shape.family)
def test_our_norms_and_attention_are_used_without_it(one_rank: Config, available: set[str], shape: ModelShape) -> None:
    block = backend_spec(transformer_config(network_spec(configure({})), shape))
    assert block.layer_norm is layers.RMSNorm
    assert len(block.layer_specs) == 2
    for layer in block.layer_specs:
        modules = layer.submodules
        attention = modules.self_attention.submodules
        assert modules.input_layernorm is modules.pre_mlp_layernorm is layers.RMSNorm
        assert attention.core_attention is layers.CausalAttention
        assert attention.q_layernorm is (layers.RMSNorm if shape.qk_norm else IdentityOp)
        assert modules.mlp.func == (MoELayer if shape.experts else MLP.as_mlp_submodule)
        assert shape.experts is None or get_submodules(modules.mlp).experts.func is SequentialMLP
        renamed = set(modules.sharded_state_dict_keys_map)
        assert ("pre_mlp_layernorm." in renamed) == (shape.experts is None)
