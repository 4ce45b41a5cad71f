"""Losses of pairs against float64 references from their formulas; a step of DPO from first principles."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_collab.algo.advantages import with_advantages
from megatron_collab.settings import AlgoConfig, DpoConfig
from megatron_collab.statistics import mean
from megatron_collab.trainer import preference
from megatron_collab.trainer.preference import pair_metric_names, pair_terms, preference_objective, validation_metrics
from megatron_collab.types import Credit, Sample, ScoredBatch

RNG = np.random.default_rng(3)
PAIRS = 5
TOKENS = RNG.integers(1, 9, 2 * PAIRS).astype(np.float64)
RATIOS = RNG.normal(size=2 * PAIRS) * 4


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def dpo(chosen: float, rejected: float) -> float:
    """Equation 7 of DPO for one pair, beta 0.3."""
    return -log_sigmoid(0.3 * chosen - 0.3 * rejected)


def conservative(chosen: float, rejected: float) -> float:
    """A tenth of the labels is assumed wrong."""
    return 0.9 * dpo(chosen, rejected) + 0.1 * dpo(rejected, chosen)


def ipo(chosen: float, rejected: float) -> float:
    """Equation 17 of IPO for one pair, tau 0.3."""
    return (chosen - rejected - 1 / 0.3 / 2) ** 2


CASES: dict[str, tuple[dict[str, Any], Callable[[float, float], float], bool]] = {
    "dpo": ({}, dpo, False),
    "label smoothing": ({"label_smoothing": 0.1}, conservative, False),
    "length-normalized": ({"loss": "sigmoid_norm"}, dpo, True),
    "length-normalized with smoothing": ({"loss": "sigmoid_norm", "label_smoothing": 0.1}, conservative, True),
    "ipo": ({"loss": "ipo"}, ipo, True),
}


@pytest.mark.parametrize("case", CASES)
def test_a_loss_and_its_gradient_are_those_of_its_formula(case: str) -> None:
    settings, formula, normalized = CASES[case]
    divisors = TOKENS if normalized else np.ones_like(TOKENS)

    def reference(ratios: np.ndarray) -> np.ndarray:
        scaled = ratios / divisors
        return np.array([formula(*pair) for pair in scaled.reshape(PAIRS, 2)])

    ratios = torch.tensor(RATIOS, requires_grad=True)
    terms = pair_terms(ratios, torch.tensor(TOKENS), DpoConfig(beta=0.3, **settings))
    np.testing.assert_allclose(terms.loss.detach(), reference(RATIOS), rtol=1e-12)
    terms.loss.sum().backward()
    moved = np.eye(2 * PAIRS) * 1e-6
    expected = [(reference(RATIOS + move).sum() - reference(RATIOS - move).sum()) / 2e-6 for move in moved]
    np.testing.assert_allclose(ratios.grad, expected, rtol=1e-6, atol=1e-9)
    rewards = 0.3 * (RATIOS / divisors).reshape(PAIRS, 2)
    np.testing.assert_allclose(torch.stack([terms.chosen, terms.rejected], 1).detach(), rewards, rtol=1e-12)


def test_refuel_and_its_gradient_are_those_of_its_formula() -> None:
    """Relative rewards on relative log-ratios; its gradient at the sampled policy is REINFORCE's on the difference."""
    rewards = RNG.normal(size=2 * PAIRS)

    def reference(ratios: np.ndarray) -> np.ndarray:
        eta = 1 / 0.3
        pairs = zip(ratios.reshape(PAIRS, 2), rewards.reshape(PAIRS, 2), strict=True)
        return np.array([((r[0] - r[1]) / eta - (reward[0] - reward[1])) ** 2 for r, reward in pairs])

    ratios = torch.tensor(RATIOS, requires_grad=True)
    settings = DpoConfig(loss="refuel", beta=0.3)
    terms = pair_terms(ratios, torch.tensor(TOKENS), settings, torch.tensor(rewards))
    np.testing.assert_allclose(terms.loss.detach(), reference(RATIOS), rtol=1e-12)
    terms.loss.sum().backward()
    moved = np.eye(2 * PAIRS) * 1e-6
    expected = [(reference(RATIOS + move).sum() - reference(RATIOS - move).sum()) / 2e-6 for move in moved]
    np.testing.assert_allclose(ratios.grad, expected, rtol=1e-6, atol=1e-8)
    start = torch.zeros(2 * PAIRS, dtype=torch.float64, requires_grad=True)
    pair_terms(start, torch.tensor(TOKENS), settings, torch.tensor(rewards)).loss.sum().backward()
    gap = rewards[::2] - rewards[1::2]
    np.testing.assert_allclose(start.grad, np.stack([-0.6 * gap, 0.6 * gap], 1).ravel(), rtol=1e-12)


def test_refuel_reads_the_rewards_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def half(reward: float) -> Sample:
        mask = np.array([0, 1, 1], np.float32)
        return Sample(np.arange(3), mask, np.zeros(3, np.float32), (Credit(((1, 3),), reward, "g", "g"),))

    algo = AlgoConfig(objective="dpo", kl_coef=0.0, dpo=DpoConfig(loss="refuel", beta=0.5))
    scored = with_advantages(ScoredBatch((half(2.0), half(-1.0))), algo)
    assert scored.advantages is not None
    monkeypatch.setattr(preference.parallel_state, "get_context_parallel_world_size", lambda: 1)
    log_probs = torch.tensor([-1.0, -1.5, -2.0, -1.0])
    batch = micro_batch(np.array([0, 0, 1, 1]), np.full(4, -1.0, np.float32), np.full(4, 0.25, np.float32))
    batch.samples = 2
    batch.columns["advantages"] = torch.tensor(np.concatenate([row[1:] for row in scored.advantages]))
    total, _ = preference_objective(lambda *_: (log_probs, log_probs), algo.dpo)(batch, torch.empty(0))
    assert total.item() == pytest.approx((0.5 * (-0.5 - -1.0) - 3.0) ** 2)
    assert with_advantages(ScoredBatch((half(2.0),)), AlgoConfig(objective="dpo")).advantages is None


def micro_batch(sequence: np.ndarray, reference: np.ndarray, weights: np.ndarray) -> Any:
    columns = {"reference_log_probs": torch.tensor(reference), "weights": torch.tensor(weights)}
    return SimpleNamespace(columns=columns, sequence=torch.tensor(sequence), samples=2 * PAIRS)


def test_an_objective_is_the_weighted_loss_of_its_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """If context parallel ranks share the tokens, so are their gradients together, and their reports."""
    sequence = np.repeat(np.arange(2 * PAIRS), TOKENS.astype(int))
    order = RNG.permutation(len(sequence))
    sequence = sequence[order]
    new, old = -RNG.exponential(size=(2, len(sequence))).astype(np.float32)
    weights = (1.0 / (2 * PAIRS * TOKENS[sequence])).astype(np.float32)
    settings = DpoConfig(beta=0.3, loss="sigmoid_norm")
    ranks: list[Any] = [np.arange(len(sequence)), np.arange(0, len(sequence), 2), np.arange(1, len(sequence), 2)]

    def evaluate(indices: np.ndarray) -> tuple[float, np.ndarray, list[float]]:
        log_probs = torch.tensor(new[indices], requires_grad=True)
        objective = preference_objective(lambda *_: (log_probs, log_probs), settings)
        total, report = objective(micro_batch(sequence[indices], old[indices], weights[indices]), torch.empty(0))
        total.backward()
        assert log_probs.grad is not None
        return total.item(), log_probs.grad.numpy(), [report[0].item(), *(x.item() for x in report[1].values())]

    monkeypatch.setattr(preference.parallel_state, "get_context_parallel_world_size", lambda: 1)
    total, gradient, report = evaluate(ranks[0])
    ratios = np.zeros(2 * PAIRS)
    np.add.at(ratios, sequence, new.astype(np.float64) - old)
    expected = pair_terms(torch.tensor(ratios), torch.tensor(TOKENS), settings)
    assert total == pytest.approx(expected.loss.mean().item(), rel=1e-6) and report[0] == pytest.approx(total)
    margins = (expected.chosen - expected.rejected).numpy()
    named = dict(zip(pair_metric_names(), report[1:], strict=True))
    assert named["dpo/accuracy"] == (margins > 0).sum() and named["dpo/margin"] == pytest.approx(
        margins.sum(), rel=1e-5
    )

    sums: list[torch.Tensor] = []
    monkeypatch.setattr(preference.parallel_state, "get_context_parallel_world_size", lambda: 2)
    monkeypatch.setattr(preference.parallel_state, "get_context_parallel_group", lambda: None)
    monkeypatch.setattr(preference.dist, "all_reduce", lambda tensor, group: sums.append(tensor.clone()))
    for indices in ranks[1:]:
        evaluate(indices)
    whole = sums[0] + sums[1]
    monkeypatch.setattr(preference.dist, "all_reduce", lambda tensor, group: tensor.copy_(whole))
    halves = [evaluate(indices) for indices in ranks[1:]]
    for (value, part, _), indices in zip(halves, ranks[1:], strict=True):
        assert value == pytest.approx(total, rel=1e-6)
        np.testing.assert_allclose(part, gradient[indices], rtol=1e-5)
    np.testing.assert_allclose(np.sum([part_report for *_, part_report in halves], axis=0), report, rtol=1e-5)


def test_a_micro_batch_of_only_padding_has_zero_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preference.parallel_state, "get_context_parallel_world_size", lambda: 1)
    none = np.zeros(0, np.float32)
    padding = micro_batch(np.zeros(0, np.int64), none, none)
    padding.samples = 0
    log_probs = torch.zeros(0, requires_grad=True)
    total, _ = preference_objective(lambda *_: (log_probs, log_probs), DpoConfig())(padding, torch.empty(0))
    total.backward()
    assert total.item() == 0.0


def test_a_set_of_pairs_has_the_mean_over_pairs_and_its_interval() -> None:
    rows = [RNG.normal(size=4).astype(np.float32) for _ in range(2 * PAIRS)]
    reference = [row * 0.5 for row in rows]
    masks = [np.ones(4, np.float32)] * (2 * PAIRS)
    metrics = validation_metrics(masks, rows, reference, DpoConfig(beta=0.3))
    ratios = np.array([float(row.sum(dtype=np.float64)) / 2 for row in rows]).reshape(PAIRS, 2)
    losses = [dpo(*pair) for pair in ratios]
    assert metrics["tasks"] == PAIRS and metrics["tokens"] == 8 * PAIRS
    assert metrics["score/loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert metrics["score_low/loss"] == pytest.approx(mean([[loss] for loss in losses]).low, rel=1e-5)
    assert metrics["score/accuracy"] == (ratios[:, 0] > ratios[:, 1]).mean()
