"""Norm, attention and wavelengths without TransformerEngine, against their formulas in float64 and transformers."""

from __future__ import annotations

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_collab.config import Config
from megatron_collab.launch.trainer_specs import network_spec
from megatron_collab.models.hf_config import ModelShape, Rope
from megatron_collab.trainer.megatron import layers
from megatron_collab.trainer.megatron.config import transformer_config
from tests.trainer.shapes import SHAPE

LENGTHS = [3, 7, 1]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.fixture(scope="module")
def attention(one_rank: Config) -> layers.CausalAttention:
    return layers.CausalAttention(transformer_config(network_spec(one_rank), SHAPE))


def packing(positions: torch.Tensor | None = None) -> layers.Rotated:
    bounds = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    plain = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    if positions is None:
        positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    return layers.rotated(plain, positions, layers.rotation(SHAPE.rope, 8)[0], torch.float32)


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(sum(LENGTHS), heads, 8, generator=generator, requires_grad=True) for heads in (4, 2, 2)]


def turned(x: torch.Tensor) -> torch.Tensor:
    """x [t, n, 8] of one sequence: each pair (i, i + 4) as a complex number, times exp(i position angle)."""
    angles = torch.outer(torch.arange(len(x)), 1e4 ** -(torch.arange(4) / 4)).double()
    pairs = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((pairs.real, pairs.imag), dim=-1)


def expected(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    outputs = []
    for q, k, v in zip(*(x.double().split(LENGTHS) for x in (query, key, value)), strict=True):
        k, v = turned(k).repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
        scores = torch.einsum("snd,tnd->nst", turned(q), k) * scale
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), float("-inf"))
        outputs.append(torch.einsum("nst,tnd->snd", scores.softmax(-1), v).flatten(1))
    return torch.cat(outputs)


def test_attention_rotates_and_sees_only_the_past_of_the_same_sequence(attention: layers.CausalAttention) -> None:
    arguments, reference_arguments = inputs(), inputs()
    ours, reference = attention(*arguments, packed_seq_params=packing()), expected(*reference_arguments, scale=8**-0.5)
    assert torch.allclose(ours.double(), reference, atol=1e-6)
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
    (ours * weights).sum().backward()
    (reference * weights).sum().backward()
    assert all(torch.allclose(x.grad, y.grad, atol=1e-5) for x, y in zip(arguments, reference_arguments, strict=True))


def test_attention_uses_the_positions_it_is_given(attention: layers.CausalAttention) -> None:
    """Only distances matter: a shifted sequence attends alike, a stretched one does not."""
    positions = torch.cat([torch.arange(length) + 5 for length in LENGTHS])[None]
    plain = attention(*inputs(), packed_seq_params=packing())
    assert torch.allclose(attention(*inputs(), packed_seq_params=packing(positions)), plain, atol=1e-5)
    assert not torch.allclose(attention(*inputs(), packed_seq_params=packing(2 * positions)), plain, atol=1e-3)


def test_the_factor_of_yarn_multiplies_queries_and_keys(one_rank: Config) -> None:
    stretched = Rope(1e4, YARN | {"factor": 1.0, "attention_factor": 1.5})
    config = transformer_config(network_spec(one_rank), ModelShape(**{**vars(SHAPE), "rope": stretched}))
    attention = layers.CausalAttention(config, softmax_scale=config.softmax_scale)
    output = attention(*inputs(), packed_seq_params=packing())
    assert torch.allclose(output.double(), expected(*inputs(), scale=1.5**2 * 8**-0.5), atol=1e-6)


def test_norm_follows_its_formula(one_rank: Config) -> None:
    norm = layers.RMSNorm(transformer_config(network_spec(one_rank), SHAPE), 32, eps=1e-6)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(5, 2, 32)
    wide = x.double()
    reference = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
    assert torch.allclose(norm(x).double(), reference, atol=1e-6)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 2.5},
        LLAMA3 | {"original_max_position_embeddings": 8192},
        LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 3.0, "original_max_position_embeddings": 1000},
        LLAMA3,
        YARN,
        YARN | {"truncate": False},
        YARN | {"beta_fast": 16, "beta_slow": 2, "mscale": 1.0, "mscale_all_dim": 0.7},
        YARN | {"attention_factor": 1.3, "original_max_position_embeddings": 64},
    ],
    ids=str,
)
@pytest.mark.parametrize(("theta", "head_dim"), [(1e4, 16), (5e5, 128)])
def test_scalings_equal_transformers(scaling: dict[str, object], theta: float, head_dim: int) -> None:
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = AutoConfig.for_model(
        "llama",
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=32768,
        rope_parameters={"rope_theta": theta, **scaling},
    )
    expected, factor = ROPE_INIT_FUNCTIONS[str(scaling["rope_type"])](config, torch.device("cpu"))
    frequencies, ours = layers.rotation(ModelShape.from_hf(config.to_dict()).rope, head_dim)
    assert torch.equal(frequencies, expected) and ours == factor


def test_without_scaling_the_wavelengths_are_a_geometric_series() -> None:
    frequencies, _ = layers.rotation(Rope(1e4), 8)
    assert torch.allclose(frequencies, torch.tensor([1.0, 0.1, 0.01, 0.001]))


def test_one_table_rotates_micro_batches_of_every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the longest so far; Megatron's own caches 32 of them, shared by all networks."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    frequencies, _ = layers.rotation(Rope(1e4), 16)
    table, megatrons = layers.RotaryTable(frequencies), RotaryEmbedding(16, 1.0, use_cpu_initialization=True)
    rotations = [table(length, packed_seq=True, cp_group=None) for length in (5, 9, 7, 9)]
    assert [len(rotation) for rotation in rotations] == [5, 9, 9, 9] and rotations[1] is rotations[2] is rotations[3]
    assert torch.equal(rotations[-1], megatrons(9))
