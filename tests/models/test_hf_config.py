"""Contents of config.json: sizes, RoPE, experts; unsupported fields are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_collab.models.hf_config import Experts, ModelShape, Rope, read

LLAMA = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 11,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
}
MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "norm_topk_prob": True,
}


def test_rope_of_old_and_new_configs() -> None:
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    old = ModelShape.from_hf(LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **llama3}})
    new = ModelShape.from_hf(LLAMA | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **llama3}})
    assert old == new
    assert new.rope == Rope(5e5, {"rope_type": "llama3", **llama3})
    assert ModelShape.from_hf(LLAMA).rope == Rope(1e4)


@pytest.mark.parametrize(
    ("rope", "added"),
    [
        ({"rope_type": "linear", "factor": 2}, {}),
        (
            {"rope_type": "llama3", "factor": 4, "low_freq_factor": 2, "high_freq_factor": 3},
            {"original_max_position_embeddings": 64},
        ),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, {}),
        (
            {"rope_type": "yarn", "factor": 1.0, "beta_fast": 16, "beta_slow": 2, "truncate": False},
            {"original_max_position_embeddings": 64},
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5, "mscale": 2.0, "mscale_all_dim": 1.0},
            {"original_max_position_embeddings": 64},
        ),
    ],
)
def test_scalings_of_rope(rope: dict[str, object], added: dict[str, object]) -> None:
    """Transformers' defaults are its own; only the original context is filled in."""
    hf = LLAMA | {"rope_parameters": {"rope_theta": 1e4, "beta_slow": None, "unused": 1, **rope}}
    assert ModelShape.from_hf(hf).rope == Rope(1e4, rope | added)


def test_experts_of_every_layer_and_of_some() -> None:
    assert ModelShape.from_hf(LLAMA).experts is None
    assert ModelShape.from_hf(MOE).experts == Experts(8, 2, 6, True, (0, 1, 2, 3))
    sparse = MOE | {"decoder_sparse_step": 2, "norm_topk_prob": False}
    assert ModelShape.from_hf(sparse).experts == Experts(8, 2, 6, False, (1, 3))
    assert ModelShape.from_hf(sparse | {"mlp_only_layers": [3]}).experts.layers == (1,)
    assert ModelShape.from_hf(sparse | {"mlp_only_layers": [1, 3]}).experts is None
    renamed = {("num_local_experts" if name == "num_experts" else name): value for name, value in MOE.items()}
    assert ModelShape.from_hf(renamed) == ModelShape.from_hf(MOE)  # as transformers 5 writes it


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gpt2"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"sliding_window": 16}, "sliding_window"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope_scaling.rope_type='longrope'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0}}, "high_freq_factor"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor is missing"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.factor is missing"),
        (MOE | {"num_experts": None}, "num_experts is missing"),
        (MOE | {"num_experts_per_tok": 1}, "num_experts_per_tok=1 with norm_topk_prob=true"),
        (MOE | {"num_experts_per_tok": 9}, "num_experts_per_tok=9: the model has only 8 experts"),
        (MOE | {"num_experts": "8"}, "num_experts='8'"),
        (MOE | {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        (MOE | {"mlp_only_layers": 3}, "mlp_only_layers=3 is not a list"),
        ({"hidden_size": "64"}, "hidden_size='64'"),
        ({"vocab_size": True}, "vocab_size=True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps='1e-6'"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ({"rope_scaling": [4.0]}, r"rope_scaling=\[4.0\]"),
        ({"rope_parameters": {"rope_theta": "big"}}, "rope_parameters.rope_theta='big'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, "rope_scaling.factor='4'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_an_unsupported_field_is_named(change: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ModelShape.from_hf(LLAMA | change)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ValueError, match="vocab_size is missing"):
        ModelShape.from_hf({field: value for field, value in LLAMA.items() if field != "vocab_size"})


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "cannot be read as JSON"), ("[]", "holds a list"), ("\xff", "cannot be read as JSON"), (None, "cannot be")],
)
def test_a_file_that_describes_no_model(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "config.json"
    if text is not None:
        file.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=f"^config.json: {message}.*$"):
        read(file)


def test_a_file_that_describes_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    assert read(tmp_path / "config.json") == ModelShape.from_hf(MOE)
