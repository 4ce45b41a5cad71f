"""Rotary position embeddings (arXiv 2104.09864): wavelengths as transformers computes them, and the rotation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_collab.models.hf_config import Linear, Llama3, Rope, Yarn


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Angle per position of each pair of a head's dimensions, float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    plain = 1.0 / rope.theta**exponents
    match rope.scaling:
        case Linear(factor):
            return plain / factor
        case Llama3():
            return _llama3(plain, rope.scaling)
        case Yarn():
            return _yarn(plain, rope.theta, head_dim, rope.scaling)
    return plain


def attention_factor(rope: Rope) -> float:
    """What the rotated queries and keys are multiplied by."""
    return rope.scaling.attention_factor if isinstance(rope.scaling, Yarn) else 1.0


def _llama3(plain: Tensor, scaling: Llama3) -> Tensor:
    """Waves longer than original / low are divided, those shorter than original / high kept (Llama 3.1's release)."""
    turns = scaling.original_positions * plain / (2 * math.pi)  # of each pair over the original context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return (1 - kept) * plain / scaling.factor + kept * plain


def _yarn(plain: Tensor, theta: float, head_dim: int, scaling: Yarn) -> Tensor:
    """Pairs that turn often over the original context are kept, the others divided (arXiv 2309.00071, section 3.2)."""

    def pair(turns: float) -> float:
        """Where the pair with that many turns over the original context would stand."""
        return head_dim * math.log(scaling.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # a step, not a ramp
    divided = ((torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - first) / (last - first)).clamp(0, 1)
    return plain / scaling.factor * divided + plain * (1 - divided)
