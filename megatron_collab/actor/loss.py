"""Losses per token, on log-probabilities of any shape. Masks, sums and denominators are the caller's."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class PolicyTerms(NamedTuple):
    """Per token: the loss, the importance ratio, and 1 where the clip holds the gradient back, else 0."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


def policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> PolicyTerms:
    """PPO's clipped surrogate: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(log_probs - old).

    Schulman et al. 2017, arXiv:1707.06347, equation 7; two clip widths as in DAPO, arXiv:2503.14476.
    """
    ratio = (log_probs - old_log_probs).exp()
    free = -ratio * advantages
    held = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    return PolicyTerms(free.maximum(held), ratio, (held > free).to(ratio.dtype))


def kl_k3(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """Estimate of KL(policy || reference) from the policy's samples: (q - 1) - log q, q = reference / policy.

    Never negative and unbiased: k3 of Schulman 2020, joschu.net/blog/kl-approx.html.
    """
    log_q = reference_log_probs - log_probs
    return log_q.exp() - 1.0 - log_q


def sft_loss(log_probs: Tensor) -> Tensor:
    """Negative log-likelihood."""
    return -log_probs
