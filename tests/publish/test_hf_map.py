"""The table covers every element of every tensor once, whatever the sizes and the tensor-parallel size."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product

import pytest

from megatron_collab.publish import hf_map
from megatron_collab.publish.hf_map import Cut, Index, ModelShape

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
    family = rng.choice(sorted(hf_map.FAMILIES))
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
    for entry in hf_map.table(shape):
        shard = hf_map.shard_shape(entry, tp)
        for rank in range(tp):
            filled: Counter[tuple[int, ...]] = Counter()
            for piece in hf_map.pieces(entry, shape, tp, rank):
                source, target = cells(piece.hf_index), cells(piece.shard_index)
                assert len(source) == len(target)
                filled.update(target)
                if hf_map.writes(entry, rank):
                    exported.update((piece.hf, cell) for cell in source)
            expected = set(product(*(range(n) for n in shard)))
            if entry.cut is Cut.VOCABULARY:
                expected = {cell for cell in expected if rank * shard[0] + cell[0] < shape.vocab}
            assert filled == Counter(expected), (entry.megatron, rank)
    expected_cells = {
        (name, cell) for name, hf in hf_map.hf_shapes(shape).items() for cell in product(*(range(n) for n in hf))
    }
    assert exported == Counter(expected_cells)


def test_query_groups_stay_together() -> None:
    shape = ModelShape.from_hf(LLAMA)  # 4 heads of 2 rows, 2 key/value heads
    qkv = next(entry for entry in hf_map.table(shape) if entry.megatron.endswith("linear_qkv.weight"))
    rows = [(piece.hf.split(".")[-2], piece.hf_index[0].start) for piece in hf_map.pieces(qkv, shape, 1, 0)]
    assert rows == [("q_proj", 0), ("k_proj", 0), ("v_proj", 0), ("q_proj", 4), ("k_proj", 2), ("v_proj", 2)]
    assert [piece.hf_index[0].start for piece in hf_map.pieces(qkv, shape, 2, 1)] == [4, 2, 2]


def test_tied_output_layer_is_loaded_but_not_exported() -> None:
    shape = ModelShape.from_hf(LLAMA | {"tie_word_embeddings": True})
    output = hf_map.table(shape)[-1]
    assert output.hf == ("model.embed_tokens.weight",)
    assert not hf_map.writes(output, 0)
    assert "lm_head.weight" not in hf_map.hf_shapes(shape)


def test_rope_of_old_and_new_configs() -> None:
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    old = ModelShape.from_hf(LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **llama3}})
    new = ModelShape.from_hf(LLAMA | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **llama3}})
    assert old == new
    assert (new.rope_theta, new.rope_factor) == (5e5, 8.0)
    assert ModelShape.from_hf(LLAMA).rope_factor is None


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
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0}}, "low_freq_factor"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_an_unsupported_field_is_named(change: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ModelShape.from_hf(LLAMA | change)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ValueError, match="vocab_size is missing"):
        ModelShape.from_hf({field: value for field, value in LLAMA.items() if field != "vocab_size"})


def test_a_size_that_tp_does_not_divide_is_refused() -> None:
    shape = ModelShape.from_hf(LLAMA)
    qkv = next(entry for entry in hf_map.table(shape) if entry.megatron.endswith("linear_qkv.weight"))
    with pytest.raises(ValueError, match=r"parallel\.tp"):
        hf_map.pieces(qkv, shape, 4, 0)
