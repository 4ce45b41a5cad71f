"""Wavelengths of every RoPE scaling equal those of transformers."""

from __future__ import annotations

import pytest
import torch

from megatron_collab import patches
from megatron_collab.models.hf_config import ModelShape, Rope
from megatron_collab.trainer.megatron import rope

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}


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
    patches.apply("torchvision")
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
    ours = ModelShape.from_hf(config.to_dict()).rope
    assert torch.allclose(rope.inverse_frequencies(ours, head_dim), expected, rtol=1e-6, atol=0)
    assert rope.attention_factor(ours) == pytest.approx(factor, rel=1e-12)


def test_without_scaling_the_wavelengths_are_a_geometric_series() -> None:
    found = rope.inverse_frequencies(Rope(1e4), 8)
    assert torch.allclose(found, torch.tensor([1.0, 0.1, 0.01, 0.001]))
    assert rope.attention_factor(Rope(1e4)) == 1.0
