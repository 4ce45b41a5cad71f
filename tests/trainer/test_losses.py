"""Every loss and its gradient against a float64 reference written from its formula, one token at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_collab.algo.policy_loss import PolicyTerms
from megatron_collab.settings import AlgoConfig
from megatron_collab.trainer.losses import (
    Report,
    importance_weights,
    kl,
    metric_names,
    policy_loss,
    policy_objective,
    report,
    supervised_objective,
    value_loss,
)

N, SEQUENCES = 60, 7
RNG = np.random.default_rng(0)
OLD, ADVANTAGES = -RNG.exponential(size=N), RNG.normal(size=N)
NEW = OLD + RNG.normal(size=N) * 0.4
SEQUENCE = np.sort(RNG.integers(0, SEQUENCES - 1, N))  # one sequence has no token here
PPO = AlgoConfig(loss="ppo", clip_low=0.2, clip_high=0.28, clip_dual=1.6)
GSPO = AlgoConfig(loss="gspo", clip_low=0.1, clip_high=0.15)
CISPO = AlgoConfig(loss="cispo", clip_low=0.3, clip_high=0.5)


def terms_of(algo: AlgoConfig, advantages: np.ndarray, weights: np.ndarray) -> tuple[PolicyTerms, np.ndarray]:
    """The terms, and the gradient in the log-probs of the sum of weights * loss."""
    log_probs = torch.tensor(NEW, requires_grad=True)
    old, advantage, sequence = map(torch.tensor, (OLD, advantages, SEQUENCE))
    terms = policy_loss(algo)(log_probs, old, advantage, sequence, SEQUENCES)
    assert not terms.ratio.requires_grad and not terms.clipped.requires_grad
    (terms.loss * torch.tensor(weights)).sum().backward()
    assert log_probs.grad is not None
    return terms._replace(loss=terms.loss.detach()), log_probs.grad.numpy()


def differences(loss: Callable[[np.ndarray], float], at: np.ndarray, step: float = 1e-6) -> np.ndarray:
    """The gradient of `loss` by central differences."""
    moved = np.eye(len(at)) * step
    return np.array([(loss(at + move) - loss(at - move)) / (2 * step) for move in moved])


def clip(ratio: float, algo: AlgoConfig) -> float:
    return min(max(ratio, 1 - algo.clip_low), 1 + algo.clip_high)


def ppo_token(new: float, old: float, advantage: float) -> float:
    """With the dual clip of its paper."""
    ratio = math.exp(new - old)
    objective = min(ratio * advantage, clip(ratio, PPO) * advantage)
    return -max(objective, PPO.clip_dual * advantage) if advantage < 0 else -objective


def test_ppo_equals_its_formula() -> None:
    weights = RNG.uniform(size=N)
    terms, gradient = terms_of(PPO, ADVANTAGES, weights)
    ratios = [math.exp(new - old) for new, old in zip(NEW, OLD, strict=True)]
    np.testing.assert_allclose(terms.loss, list(map(ppo_token, NEW, OLD, ADVANTAGES)), rtol=1e-12)
    np.testing.assert_allclose(terms.ratio, ratios, rtol=1e-12)
    single = [clip(r, PPO) * a < r * a for r, a in zip(ratios, ADVANTAGES, strict=True)]
    dual = [a < 0 and r > PPO.clip_dual for r, a in zip(ratios, ADVANTAGES, strict=True)]
    clipped = [first or second for first, second in zip(single, dual, strict=True)]
    assert 0 < sum(single) < N and any(dual) and terms.clipped.tolist() == clipped
    reference = differences(lambda new: float(weights @ list(map(ppo_token, new, OLD, ADVANTAGES))), NEW)
    np.testing.assert_allclose(gradient, reference, rtol=1e-6, atol=1e-8)
    assert (gradient[np.array(clipped)] == 0).all()


def test_a_ratio_at_the_bound_of_the_dual_clip_is_not_clipped() -> None:
    algo = AlgoConfig(loss="ppo", clip_low=0.2, clip_high=0.28, clip_dual=2.0)
    log_probs = torch.tensor([math.log(2.0), math.log(2.0) + 1e-9], dtype=torch.float64)
    old, sequence = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    terms = policy_loss(algo)(log_probs, old, old - 1.0, sequence, 1)
    assert terms.ratio[0] == 2.0 and terms.loss.tolist() == [2.0, 2.0]
    assert terms.clipped.tolist() == [0.0, 1.0]


def sequence_form(new: np.ndarray, advantage: np.ndarray, weight: np.ndarray) -> float:
    """Equation 5 of GSPO, an advantage and a weight for each sequence."""
    loss = 0.0
    for i in set(SEQUENCE.tolist()):
        members = np.equal(SEQUENCE, i)
        ratio = math.exp(sum(new[members] - OLD[members]) / sum(members))
        loss -= weight[i] * min(ratio * advantage[i], clip(ratio, GSPO) * advantage[i])
    return loss


def test_gspo_equals_its_sequence_form() -> None:
    advantage, weight = RNG.normal(size=SEQUENCES), RNG.uniform(size=SEQUENCES)
    lengths = np.bincount(SEQUENCE, minlength=SEQUENCES).clip(1)
    weights = (weight / lengths)[SEQUENCE]
    terms, gradient = terms_of(GSPO, advantage[SEQUENCE], weights)
    assert 0 < terms.clipped.sum() < N
    assert float(terms.loss @ torch.tensor(weights)) == pytest.approx(sequence_form(NEW, advantage, weight))
    reference = differences(lambda new: sequence_form(new, advantage, weight), NEW)
    np.testing.assert_allclose(gradient, reference, rtol=1e-6, atol=1e-8)


def test_gspo_keeps_the_advantage_of_each_token() -> None:
    weights = RNG.uniform(size=N)
    terms, gradient = terms_of(GSPO, ADVANTAGES, weights)
    for t in range(N):
        members = np.equal(SEQUENCE, SEQUENCE[t])
        ratio = math.exp(np.mean(NEW[members] - OLD[members]))
        clipped_ratio = clip(ratio, GSPO)
        assert math.isclose(terms.ratio[t], ratio, rel_tol=1e-12)
        assert math.isclose(terms.loss[t], -min(ratio * ADVANTAGES[t], clipped_ratio * ADVANTAGES[t]), rel_tol=1e-12)
        clipped = clipped_ratio * ADVANTAGES[t] < ratio * ADVANTAGES[t]
        assert terms.clipped[t] == clipped
        # GSPO-token: the gradient in a token's log-prob is s_i A_t.
        assert math.isclose(gradient[t], 0.0 if clipped else -weights[t] * ratio * ADVANTAGES[t], rel_tol=1e-12)


def test_cispo_equals_its_formula() -> None:
    weights = RNG.uniform(size=N)
    terms, gradient = terms_of(CISPO, ADVANTAGES, weights)
    for t in range(N):
        ratio = math.exp(NEW[t] - OLD[t])
        clipped_ratio = clip(ratio, CISPO)
        assert math.isclose(terms.ratio[t], ratio, rel_tol=1e-12)
        assert math.isclose(terms.loss[t], -clipped_ratio * ADVANTAGES[t] * NEW[t], rel_tol=1e-12)
        assert terms.clipped[t] == (clipped_ratio != ratio)
        assert math.isclose(gradient[t], -weights[t] * clipped_ratio * ADVANTAGES[t], rel_tol=1e-12)  # never 0
    assert 0 < terms.clipped.sum() < N


@pytest.mark.parametrize("algo", [PPO, GSPO, CISPO], ids=lambda algo: algo.loss)
def test_on_policy_every_loss_is_the_policy_gradient(algo: AlgoConfig) -> None:
    log_probs = torch.tensor(NEW, requires_grad=True)
    terms = policy_loss(algo)(
        log_probs, log_probs.detach(), torch.tensor(ADVANTAGES), torch.tensor(SEQUENCE), SEQUENCES
    )
    terms.loss.sum().backward()
    assert (terms.ratio == 1).all() and (terms.clipped == 0).all()
    np.testing.assert_allclose(log_probs.grad, -ADVANTAGES, rtol=1e-12)


@pytest.mark.parametrize("algo", [PPO, GSPO, CISPO], ids=lambda algo: algo.loss)
def test_a_rank_without_trained_tokens(algo: AlgoConfig) -> None:
    empty = torch.zeros(0, requires_grad=True)
    terms = policy_loss(algo)(empty, empty.detach(), empty.detach(), torch.zeros(0, dtype=torch.int64), 1)
    terms.loss.sum().backward()
    assert terms.loss.shape == terms.ratio.shape == terms.clipped.shape == (0,)


@pytest.mark.parametrize("algo", [PPO, GSPO, CISPO, AlgoConfig(clip_dual=0)], ids=str)
def test_losses_and_gradients_are_finite_for_any_gap(algo: AlgoConfig) -> None:
    log_probs = torch.tensor([0.0, -1e4, 0.0, -1e4], requires_grad=True)
    old, advantages = torch.tensor([-1e4, 0.0, -1e4, 0.0]), torch.tensor([-1.0, -1.0, 1.0, 1.0])
    terms = policy_loss(algo)(log_probs, old, advantages, torch.arange(4), 4)
    terms.loss.sum().backward()
    assert terms.loss.isfinite().all()
    assert terms.ratio.tolist() == pytest.approx([math.exp(20), math.exp(-20)] * 2), "20 either way"
    assert log_probs.grad is not None and log_probs.grad.isfinite().all()


@pytest.mark.parametrize("algo", [PPO, GSPO, CISPO, AlgoConfig(clip_dual=0)], ids=str)
def test_an_advantage_of_zero_has_no_loss(algo: AlgoConfig) -> None:
    none = torch.zeros(N, dtype=torch.float64)
    terms = policy_loss(algo)(torch.tensor(NEW), torch.tensor(OLD), none, torch.tensor(SEQUENCE), SEQUENCES)
    assert (terms.loss == 0).all()


def test_the_ratio_of_a_sequence_of_one_token_is_that_of_the_token() -> None:
    terms = policy_loss(GSPO)(*map(torch.tensor, (NEW, OLD, ADVANTAGES)), torch.arange(N), N)
    np.testing.assert_allclose(terms.ratio, np.exp(NEW - OLD), rtol=1e-12)


@pytest.mark.parametrize("level", ["sequence", "geometric"])
@pytest.mark.parametrize("correction", ["truncated", "masked"])
def test_importance_weights_of_sequences(level: str, correction: str) -> None:
    algo = AlgoConfig(correction=correction, correction_level=level, correction_low=0.8, correction_high=1.1)
    old, engine, sequence = map(torch.tensor, (OLD, NEW, SEQUENCE))
    weights = importance_weights(old, engine, sequence, SEQUENCES, algo)
    unbounded = set()
    for i in set(SEQUENCE.tolist()):
        members = np.equal(SEQUENCE, i)
        product = math.prod(math.exp(a - b) for a, b in zip(OLD[members], NEW[members], strict=True))
        weight = product if level == "sequence" else product ** (1 / members.sum())
        expected = min(weight, 1.1) if correction == "truncated" else weight if 0.8 <= weight <= 1.1 else 0.0
        np.testing.assert_allclose(weights[torch.tensor(members)], expected, rtol=1e-10)
        unbounded.add(expected == weight)
    assert unbounded == {True, False}, "some sequences are at a bound and some are not"


def test_importance_weights() -> None:
    engine = torch.tensor(NEW, requires_grad=True)
    old = torch.tensor(OLD, requires_grad=True)
    ratios = np.exp(OLD - NEW)
    assert (ratios < 0.8).any() and (ratios > 1.3).any()
    masked = [ratio if 0.8 <= ratio <= 1.3 else 0.0 for ratio in ratios]
    expected = {"truncated": np.minimum(ratios, 1.3), "masked": masked}
    for correction, reference in expected.items():
        algo = AlgoConfig(correction=correction, correction_low=0.8, correction_high=1.3)
        weights = importance_weights(old, engine, torch.tensor(SEQUENCE), SEQUENCES, algo)
        assert not weights.requires_grad
        np.testing.assert_allclose(weights, reference, rtol=1e-12)


def test_a_weight_at_a_bound_is_kept() -> None:
    at_one = AlgoConfig(correction="masked", correction_low=1.0, correction_high=1.0)
    same = torch.tensor(OLD)
    assert (importance_weights(same, same, torch.tensor(SEQUENCE), SEQUENCES, at_one) == 1).all()


def test_importance_weights_do_not_overflow() -> None:
    old, engine = torch.tensor([0.0, -1000.0]), torch.tensor([-1000.0, 0.0])
    for level in ("token", "sequence", "geometric"):
        truncated, masked = (
            importance_weights(old, engine, torch.arange(2), 2, AlgoConfig(correction=name, correction_level=level))
            for name in ("truncated", "masked")
        )
        assert truncated.tolist() == pytest.approx([2.0, 0.0], abs=1e-8) and masked.tolist() == [0.0, 0.0]


def test_kl_estimates() -> None:
    estimates = {name: kl(torch.tensor(NEW), torch.tensor(OLD), name) for name in ("k1", "k2", "k3", "low_var_kl")}
    assert torch.equal(estimates["low_var_kl"], estimates["k3"])
    for i in range(N):
        q = math.exp(OLD[i]) / math.exp(NEW[i])
        assert math.isclose(estimates["k1"][i], -math.log(q), rel_tol=1e-9)
        assert math.isclose(estimates["k2"][i], math.log(q) ** 2 / 2, rel_tol=1e-9)
        assert math.isclose(estimates["k3"][i], q - 1 - math.log(q), rel_tol=1e-9, abs_tol=1e-12)
    assert (kl(torch.tensor(NEW), torch.tensor(NEW), "k3") == 0).all()


def test_k3_continues_as_its_tangent() -> None:
    """Above a log ratio of 3, with its value and slope there, so that it still pulls towards the reference."""
    log_probs = torch.tensor([-3.0, -4.0, -20.0, -1e4], dtype=torch.float64, requires_grad=True)
    penalty = kl(log_probs, torch.zeros(4, dtype=torch.float64), "k3")
    penalty.sum().backward()
    slope = math.exp(3) - 1
    expected = [math.exp(3) - 4 + slope * (gap - 3) for gap in (3, 4, 20, 1e4)]
    assert penalty.tolist() == pytest.approx(expected) and log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([-slope] * 4)


POLICY, REFERENCE = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])


@pytest.mark.parametrize("estimate", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimate: str) -> None:
    exact = (POLICY * np.log(POLICY / REFERENCE)).sum()
    mean_kl = (POLICY * kl(torch.tensor(POLICY).log(), torch.tensor(REFERENCE).log(), estimate).numpy()).sum()
    assert math.isclose(mean_kl, exact, rel_tol=1e-12)


def test_mean_gradients_of_the_kl_estimates() -> None:
    """Over samples of the policy: k1 has none, k2 that of KL(policy || reference), k3 that of the reverse KL."""
    reference = torch.tensor(REFERENCE).log()

    def gradient(loss: Callable[[Tensor], Tensor]) -> Tensor:
        logits = torch.tensor(POLICY).log().requires_grad_()
        loss(logits.log_softmax(0)).backward()
        assert logits.grad is not None
        return logits.grad

    def mean(estimate: str) -> Tensor:
        return gradient(lambda log_probs: (torch.tensor(POLICY) * kl(log_probs, reference, estimate)).sum())

    exact = gradient(lambda log_probs: (log_probs.exp() * (log_probs - reference)).sum())
    reverse = gradient(lambda log_probs: (reference.exp() * (reference - log_probs)).sum())
    assert exact.abs().min() > 0.01
    torch.testing.assert_close(mean("k1"), torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(mean("k2"), exact)
    torch.testing.assert_close(mean("k3"), reverse)


def test_value_loss() -> None:
    limit = 0.2
    old, returns = RNG.normal(size=N), RNG.normal(size=N)
    start = old + RNG.normal(size=N) * 0.3

    def token(value: float, before: float, target: float) -> float:
        near = before + min(max(value - before, -limit), limit)
        return max((value - target) ** 2, (near - target) ** 2) / 2

    values = torch.tensor(start, requires_grad=True)
    loss, clipped = value_loss(values, torch.tensor(old), torch.tensor(returns), limit)
    loss.sum().backward()
    np.testing.assert_allclose(loss.detach(), list(map(token, start, old, returns)), rtol=1e-12)
    reference = differences(lambda at: sum(map(token, at, old, returns)), start)
    np.testing.assert_allclose(values.grad, reference, rtol=1e-6, atol=1e-8)
    assert values.grad is not None and 0 < clipped.sum() < N
    assert (values.grad[clipped > 0] == 0).all() and (values.grad[clipped == 0] != 0).all()


REFERENCE_LOG_PROBS, ENGINE = OLD + 0.3 * np.cos(np.arange(N)), OLD + 0.5 * np.sin(np.arange(N))
ENTROPY, WEIGHTS = 1.0 + np.sin(np.arange(N)) ** 2, 0.01 * (1 + np.arange(N) % 5)


def objective_of(algo: AlgoConfig, without: str = "") -> tuple[float, np.ndarray, Report]:
    """The loss of a micro-batch, its gradient in the log-probs, and its report; `without` a column."""
    arrays = {
        "weights": WEIGHTS,
        "advantages": ADVANTAGES,
        "old_log_probs": OLD,
        "log_probs": ENGINE,
        "reference_log_probs": REFERENCE_LOG_PROBS,
    }
    columns = {name: torch.tensor(array) for name, array in arrays.items() if name != without}
    micro_batch: Any = SimpleNamespace(columns=columns, sequence=torch.tensor(SEQUENCE), samples=SEQUENCES)
    log_probs = torch.tensor(NEW, requires_grad=True)
    total, reported = policy_objective(lambda *_: (log_probs, torch.tensor(ENTROPY)), algo)(micro_batch, torch.empty(0))
    total.backward()
    assert log_probs.grad is not None
    return total.item(), log_probs.grad.numpy(), reported


def full_token(t: int, new: float, algo: AlgoConfig) -> float:
    """Every term of a token's loss: the policy's, corrected, the KL's k2 and the entropy's."""
    correction = math.exp(OLD[t] - ENGINE[t])
    if algo.correction == "truncated":
        correction = min(correction, algo.correction_high)
    elif not algo.correction_low <= correction <= algo.correction_high:
        correction = 0.0
    penalty = algo.kl_coef * (new - REFERENCE_LOG_PROBS[t]) ** 2 / 2
    return ppo_token(new, OLD[t], ADVANTAGES[t]) * correction + penalty - algo.entropy_coef * ENTROPY[t]


@pytest.mark.parametrize("correction", ["truncated", "masked"])
def test_the_objective_is_the_weighted_sum_of_all_terms(correction: str) -> None:
    algo = AlgoConfig(
        **{name: getattr(PPO, name) for name in ("clip_low", "clip_high", "clip_dual")},
        correction=correction,
        correction_low=0.8,
        correction_high=1.3,
        kl="k2",
        kl_coef=0.3,
        entropy_coef=0.05,
    )
    total, gradient, (loss, sums, maxima) = objective_of(algo)

    def expected(new: np.ndarray) -> float:
        return float(WEIGHTS @ [full_token(t, new[t], algo) for t in range(N)])

    assert total == loss == pytest.approx(expected(NEW), rel=1e-12)
    np.testing.assert_allclose(gradient, differences(expected, NEW), rtol=1e-6, atol=1e-8)
    ratios, gaps = np.exp(NEW - OLD), np.exp(OLD - ENGINE)
    bounded = np.minimum(gaps, 1.3) if correction == "truncated" else np.where((gaps < 0.8) | (gaps > 1.3), 0.0, gaps)
    clipped = [
        clip(r, PPO) * a < r * a or (a < 0 and r > PPO.clip_dual) for r, a in zip(ratios, ADVANTAGES, strict=True)
    ]
    assert {name: value.item() for name, value in sums.items()} == pytest.approx(
        {
            "entropy": ENTROPY.sum(),
            "ratio_mean": ratios.sum(),
            "clip_fraction": sum(clipped),
            "correction/weight": bounded.sum(),
            "correction/masked": (bounded == 0).sum(),
            "kl": ((NEW - REFERENCE_LOG_PROBS) ** 2 / 2).sum(),
            "mismatch/k3": (gaps - 1 - np.log(gaps)).sum(),
        }
    )
    assert {name: value.item() for name, value in maxima.items()} == pytest.approx(
        {"ratio_max_deviation": np.abs(ratios - 1).max(), "mismatch/max_abs": np.abs(ENGINE - OLD).max()}
    )
    assert (bounded == 0).any() == (correction == "masked")


def test_the_objective_without_a_correction_and_with_kl_in_the_reward_is_the_policy_loss() -> None:
    plain = float(WEIGHTS @ list(map(ppo_token, NEW, OLD, ADVANTAGES)))
    algo = AlgoConfig(**{name: getattr(PPO, name) for name in ("clip_low", "clip_high", "clip_dual")}, kl_in="reward")
    total, _, (_, sums, _) = objective_of(algo)
    assert total == pytest.approx(plain) and sums["kl"] > 0, "it is reported all the same"


def test_without_old_log_probs_they_are_those_of_the_forward_pass() -> None:
    _, gradient, (_, sums, maxima) = objective_of(AlgoConfig(kl_coef=0.0), without="old_log_probs")
    np.testing.assert_allclose(gradient, -WEIGHTS * ADVANTAGES, rtol=1e-12)
    assert sums["ratio_mean"] == N and maxima["ratio_max_deviation"] == 0
    assert maxima["mismatch/max_abs"] == pytest.approx(np.abs(NEW - ENGINE).max())


@pytest.mark.parametrize("correction", ["none", "truncated"])
@pytest.mark.parametrize("reference", [True, False])
def test_ranks_without_a_report_know_its_names(correction: str, reference: bool) -> None:
    algo = AlgoConfig(correction=correction)
    _, _, (_, sums, maxima) = objective_of(algo, without="" if reference else "reference_log_probs")
    names, largest = metric_names(algo, reference)
    assert (sorted(names), sorted(largest)) == (sorted(sums), sorted(maxima))


def test_the_supervised_objective_is_the_weighted_negative_log_likelihood() -> None:
    micro_batch: Any = SimpleNamespace(columns={"weights": torch.tensor(WEIGHTS)})
    log_probs = torch.tensor(NEW)
    total, reported = supervised_objective(lambda *_: (log_probs, log_probs))(micro_batch, torch.empty(0))
    assert total.item() == pytest.approx(-(WEIGHTS * NEW).sum()) and reported == (total, {}, {})


def test_the_report_of_no_token_is_zero_and_unaffected_by_changes_to_the_loss() -> None:
    total = torch.tensor(3.0)
    loss, sums, maxima = report(total, {"a": torch.zeros(0)}, {"b": torch.zeros(0)})
    total /= 2
    assert (loss, sums, maxima) == (3.0, {"a": 0.0}, {"b": 0.0})
