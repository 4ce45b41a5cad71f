"""Every loss against a float64 reference written from its formula, one token at a time."""

from __future__ import annotations

import math

import numpy as np
import torch

from megatron_collab.actor.loss import kl_k3, policy_loss, sft_loss

RNG = np.random.default_rng(0)
NEW, OLD, ADVANTAGES = -RNG.exponential(size=(3, 50)), -RNG.exponential(size=(3, 50)), RNG.normal(size=(3, 50))


def test_policy_loss():
    clip_low, clip_high = 0.2, 0.28
    terms = policy_loss(*map(torch.tensor, (NEW, OLD, ADVANTAGES)), clip_low, clip_high)
    clipped_somewhere = 0
    for i in np.ndindex(NEW.shape):
        ratio = math.exp(NEW[i] - OLD[i])
        held = min(max(ratio, 1 - clip_low), 1 + clip_high)
        expected = -min(ratio * ADVANTAGES[i], held * ADVANTAGES[i])
        assert math.isclose(terms.loss[i], expected, rel_tol=1e-12)
        assert math.isclose(terms.ratio[i], ratio, rel_tol=1e-12)
        clipped = held * ADVANTAGES[i] < ratio * ADVANTAGES[i]
        assert terms.clipped[i] == clipped
        clipped_somewhere += clipped
    assert 0 < clipped_somewhere < NEW.size


def test_policy_gradient_stops_exactly_where_clipped():
    log_probs = torch.tensor(NEW, requires_grad=True)
    terms = policy_loss(log_probs, torch.tensor(OLD), torch.tensor(ADVANTAGES), 0.2, 0.2)
    terms.loss.sum().backward()
    expected = -terms.ratio.detach() * torch.tensor(ADVANTAGES) * (1 - terms.clipped)
    torch.testing.assert_close(log_probs.grad, expected, rtol=1e-12, atol=0)


def test_kl_k3():
    found = kl_k3(torch.tensor(NEW), torch.tensor(OLD))
    for i in np.ndindex(NEW.shape):
        q = math.exp(OLD[i]) / math.exp(NEW[i])
        assert math.isclose(found[i], q - 1 - math.log(q), rel_tol=1e-9, abs_tol=1e-12)
    assert (kl_k3(torch.tensor(NEW), torch.tensor(NEW)) == 0).all()


def test_kl_k3_is_unbiased():
    policy, reference = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    exact = (policy * np.log(policy / reference)).sum()
    estimate = (policy * kl_k3(torch.tensor(policy).log(), torch.tensor(reference).log()).numpy()).sum()
    assert math.isclose(estimate, exact, rel_tol=1e-12)


def test_sft_loss():
    np.testing.assert_array_equal(sft_loss(torch.tensor(NEW)).numpy(), -NEW)
