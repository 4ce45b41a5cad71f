"""The table covers every element of every tensor once, for all sizes and tensor-parallel sizes."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product

import pytest

from megatron_collab.models import hf_to_megatron
from megatron_collab.models.hf_config import FAMILIES
from megatron_collab.models.hf_to_megatron import Index, ModelShape, TensorCut

LLAMA = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 11,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
}


def random_shape(rng: random.Random, tp: int) -> ModelShape:
    family = rng.choice(sorted(FAMILIES))
    kv_heads = tp * rng.randint(1, 3)
    config = {
        **LLAMA,
        "model_type": family,
        "hidden_size": rng.randint(1, 5),
        "intermediate_size": tp * rng.randint(1, 4),
        "num_hidden_layers": rng.randint(1, 2),
        "num_attention_heads": kv_heads * rng.randint(1, 3),
        "num_key_value_heads": kv_heads,
        "head_dim": 2 * rng.randint(1, 3),
        "vocab_size": rng.randint(1, 20),
        "tie_word_embeddings": rng.random() < 0.5,
        "num_experts": rng.randint(1, 4),
        "num_experts_per_tok": 1,
        "moe_intermediate_size": rng.randint(1, 3),
        "mlp_only_layers": [0] if rng.random() < 0.5 else [],
    }
    return ModelShape.from_hf(config)


def cells(index: Index) -> list[tuple[int, ...]]:
    return list(product(*(range(part.start, part.stop) for part in index)))


@pytest.mark.parametrize("seed", range(30))
def test_every_element_is_exported_once_and_every_shard_is_filled(seed: int) -> None:
    rng = random.Random(seed)
    tp = rng.choice([1, 2, 3, 4])
    shape = random_shape(rng, tp)
    exported: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for entry in hf_to_megatron.table(shape):
        shard = hf_to_megatron.shard_shape(entry, tp)
        for rank in range(tp):
            filled: Counter[tuple[int, ...]] = Counter()
            for piece in hf_to_megatron.pieces(entry, shape, tp, rank):
                source, target = cells(piece.hf_index), cells(piece.shard_index)
                assert len(source) == len(target)
                filled.update(target)
                if hf_to_megatron.exports(entry, rank, replica=0, expert_replica=rank):
                    exported.update((piece.hf, cell) for cell in source)
            expected = set(product(*(range(n) for n in shard)))
            if entry.cut is TensorCut.VOCABULARY:
                expected = {cell for cell in expected if rank * shard[0] + cell[0] < shape.vocab}
            assert filled == Counter(expected), (entry.megatron, rank)
    expected_cells = {
        (name, cell)
        for name, hf in hf_to_megatron.hf_shapes(shape).items()
        for cell in product(*(range(n) for n in hf))
    }
    assert exported == Counter(expected_cells)


def test_query_groups_stay_together() -> None:
    shape = ModelShape.from_hf(LLAMA)  # 4 heads of 2 rows, 2 key/value heads
    qkv = next(entry for entry in hf_to_megatron.table(shape) if entry.megatron.endswith("linear_qkv.weight"))
    rows = [(piece.hf.split(".")[-2], piece.hf_index[0].start) for piece in hf_to_megatron.pieces(qkv, shape, 1, 0)]
    assert rows == [("q_proj", 0), ("k_proj", 0), ("v_proj", 0), ("q_proj", 4), ("k_proj", 2), ("v_proj", 2)]
    assert [piece.hf_index[0].start for piece in hf_to_megatron.pieces(qkv, shape, 2, 1)] == [4, 2, 2]


def test_tied_output_layer_is_loaded_but_not_exported() -> None:
    shape = ModelShape.from_hf(LLAMA | {"tie_word_embeddings": True})
    output = hf_to_megatron.table(shape)[-1]
    assert output.hf == ("model.embed_tokens.weight",)
    assert not hf_to_megatron.exports(output, 0, 0, 0)
    assert "lm_head.weight" not in hf_to_megatron.hf_shapes(shape)


def test_experts_are_whole_and_have_a_router() -> None:
    experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 5, "mlp_only_layers": [0]}
    table = hf_to_megatron.table(ModelShape.from_hf(LLAMA | {"model_type": "qwen3_moe", **experts}))
    entries = {entry.megatron: entry for entry in table}
    assert (
        "decoder.layers.0.mlp.linear_fc1.weight" in entries and "decoder.layers.1.mlp.linear_fc1.weight" not in entries
    )
    assert entries["decoder.layers.1.mlp.router.weight"].hf == ("model.layers.1.mlp.gate.weight",)
    up = entries["decoder.layers.1.mlp.experts.2.linear_fc1.weight"]
    assert up.hf == tuple(f"model.layers.1.mlp.experts.2.{x}_proj.weight" for x in ("gate", "up"))
    assert hf_to_megatron.shard_shape(up, 2) == (10, 8)
    assert sum(entry.expert for entry in table) == 2 * 3


def test_a_size_that_tp_does_not_divide_is_refused() -> None:
    shape = ModelShape.from_hf(LLAMA)
    qkv = next(entry for entry in hf_to_megatron.table(shape) if entry.megatron.endswith("linear_qkv.weight"))
    with pytest.raises(ValueError, match=r"parallel\.tp"):
        hf_to_megatron.pieces(qkv, shape, 4, 0)
