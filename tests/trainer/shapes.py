"""Model shapes shared by tests of the trainer."""

from __future__ import annotations

from megatron_collab.models.hf_config import ModelShape

QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 50,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
SHAPE = ModelShape.from_hf(QWEN3)


def shape_of(**fields: object) -> ModelShape:
    """QWEN3 with other fields of config.json."""
    return ModelShape.from_hf(QWEN3 | fields)
