"""The plan of adapters: every row of every B is used once, sizes are PEFT's, experts have none."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_collab.models import lora
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.models.hf_to_megatron import pieces, shard_shape
from megatron_collab.settings import LoraConfig
from megatron_collab.settings.schema import LORA_TARGETS

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "vocab_size": 11,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
}
EXPERTS = QWEN3 | {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "mlp_only_layers": [0],
}


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("targets", [LORA_TARGETS, ("v_proj", "gate_proj", "o_proj")])
def test_rows_of_a_parameter_are_those_of_its_matrices(targets: tuple[str, ...], tp: int) -> None:
    shape, config = ModelShape.from_hf(QWEN3), LoraConfig(rank=3, targets=[*targets])
    seen = set()
    for entry, factors in lora.lora_entries(shape, config):
        blocks, rank = lora.blocks(entry, shape, config, tp), tp - 1
        done = [0] * len(factors)
        for piece, (number, count) in zip(pieces(entry, shape, tp, rank), blocks, strict=True):
            module = piece.hf.removesuffix(".weight")
            if number is None:
                assert module.rpartition(".")[2] not in targets
                continue
            assert factors[number].b.key == f"{module}.lora_B.weight"
            first = factors[number].b.local(tp)[0] * rank if factors[number].b.axis == 0 else 0
            assert piece.hf_index[0] == slice(first + done[number], first + done[number] + count)
            done[number] += count
        assert sum(count for _, count in blocks) == shard_shape(entry, tp)[0]
        assert done == [factor.b.local(tp)[0] for factor in factors]
        assert all(factor.a.local(tp)[1] == shard_shape(entry, tp)[1] for factor in factors)
        seen |= {factor.projection for factor in factors}
    assert seen == set(targets)


def test_keys_and_shapes_are_those_of_peft() -> None:
    config = LoraConfig(rank=3, targets=["k_proj", "down_proj"])
    shapes = {factor.key: factor.shape for factor in lora.factors(ModelShape.from_hf(QWEN3), config)}
    sides = {"self_attn.k_proj": ((3, 32), (24, 3)), "mlp.down_proj": ((3, 48), (32, 3))}
    assert shapes == {
        f"model.layers.{layer}.{module}.lora_{kind}.weight": size
        for layer in range(2)
        for module, both in sides.items()
        for kind, size in zip("AB", both, strict=True)
    }


def test_experts_have_none() -> None:
    shape, every = ModelShape.from_hf(EXPERTS), LoraConfig(rank=3)
    names = {factor.key for factor in lora.factors(shape, every)}
    assert any(".layers.0.mlp" in name for name in names)
    assert not any(".layers.1.mlp" in name for name in names)
    assert lora.without_adapters(shape, every) is None
    assert lora.without_adapters(shape, LoraConfig(rank=3, targets=["up_proj"])) == 1


def test_without_a_rank_there_are_none() -> None:
    assert lora.factors(ModelShape.from_hf(QWEN3), LoraConfig()) == []
