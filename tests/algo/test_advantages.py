"""Every estimator against a float64 reference written from its paper's formula, one token at a time, and by hand."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from megatron_collab.algo.advantages import decoupled, kl_estimate, token_weights, with_advantages
from megatron_collab.settings import AlgoConfig
from megatron_collab.trainer.losses import kl
from megatron_collab.types import Credit, Sample, ScoredBatch


def make_sample(length: int, *credits: Credit) -> Sample:
    """A sequence of `length` tokens; those in the span of a credit are trained."""
    mask = np.zeros(length, np.float32)
    for credit in credits:
        for start, stop in credit.spans:
            mask[start:stop] = 1.0
    return Sample(np.arange(length), mask, np.zeros_like(mask), credits)


def worth(value: float, *spans: tuple[int, int], peers: str = "a", scale: str | None = None) -> Credit:
    return Credit(spans, value, peers, scale or peers)


def one_credit(*values: float, group: str = "a") -> list[Sample]:
    """A group: a sequence of 3 tokens for each value, the last two trained."""
    return [make_sample(3, worth(value, (1, 3), peers=group)) for value in values]


def trained(samples: Sequence[Sample], rows: Sequence[np.ndarray]) -> list[list[float]]:
    """The values on the trained tokens, after a check that all other tokens have 0."""
    for sample, row in zip(samples, rows, strict=True):
        assert row.dtype == np.float32 and row.shape == sample.loss_mask.shape
        assert (row[sample.loss_mask == 0] == 0).all()
    return [row[sample.loss_mask > 0].tolist() for sample, row in zip(samples, rows, strict=True)]


def assign(
    samples: Sequence[Sample],
    algo: AlgoConfig,
    kl: Sequence[np.ndarray] | None = None,
    values: Sequence[np.ndarray] | None = None,
) -> ScoredBatch:
    """A batch of these samples with advantages; `kl`: log pi_old - log pi_ref of each token."""
    reference = None if kl is None else [np.zeros_like(row) for row in kl]
    batch = ScoredBatch(tuple(samples), old_log_probs=kl, reference_log_probs=reference, values=values)
    return with_advantages(batch, algo)


def advantages(samples: Sequence[Sample], algo: AlgoConfig, **more: Sequence[np.ndarray]) -> list[list[float]]:
    return trained(samples, assign(samples, algo, **more).advantages)


def random_batch(rng: np.random.Generator) -> list[Sample]:
    """Four groups of one to five samples with one to three credits each, compared within a group or a part of it."""
    samples = []
    for group in range(4):
        for _ in range(rng.integers(1, 6)):
            credits, at = [], 0
            for _ in range(rng.integers(1, 4)):
                start = at + int(rng.integers(1, 4))
                at = start + int(rng.integers(1, 5))
                peers = f"{group}/{rng.integers(2)}"
                credits.append(Credit(((start, at),), float(rng.normal()), peers, str(group)))
            samples.append(make_sample(at + int(rng.integers(0, 3)), *credits))
    return samples


def garbage(rng: np.random.Generator, samples: Sequence[Sample], scale: float = 1.0) -> list[np.ndarray]:
    """Random numbers on the trained tokens, NaN elsewhere."""
    return [np.where(s.loss_mask > 0, rng.normal(size=len(s.loss_mask)) * scale, np.nan) for s in samples]


def test_grpo_by_hand() -> None:
    # mean 2, population variance (1 + 0 + 1 + 4 + 4) / 5 = 2
    expected = [[value / (math.sqrt(2) + 1e-6)] * 2 for value in (-1, 0, 1, -2, 2)]
    for name in ("grpo", "gdpo"):  # the same of one group
        rows = advantages(one_credit(1, 2, 3, 0, 4), AlgoConfig(advantage=name))
        np.testing.assert_allclose(rows, expected, rtol=1e-7)


def test_dr_grpo_and_rloo_by_hand() -> None:
    # Mean 2 of all; the others of 1 are 2, 3, 2 with the mean 7/3, those of 3 are 1, 2, 2 with the mean 5/3.
    samples = one_credit(1, 2, 3, 2)
    assert advantages(samples, AlgoConfig(advantage="dr_grpo")) == [[-1, -1], [0, 0], [1, 1], [0, 0]]
    rows = advantages(samples, AlgoConfig(advantage="rloo"))
    np.testing.assert_allclose(rows, [[-4 / 3] * 2, [0, 0], [4 / 3] * 2, [0, 0]], rtol=1e-7)


@pytest.mark.parametrize("seed", range(5))
def test_grouped_estimators_equal_their_formulas(seed: int) -> None:
    samples = random_batch(np.random.default_rng(seed))
    credits = [credit for sample in samples for credit in sample.credits]

    def group(target: Credit, attribute: str) -> list[float]:
        return [credit.value for credit in credits if getattr(credit, attribute) == getattr(target, attribute)]

    def peer_values(target: Credit) -> list[float]:
        return [credit.value for credit in credits if credit.peers == target.peers and credit is not target]

    def centred(target: Credit) -> float:
        return target.value - statistics.fmean(group(target, "peers"))

    formulas: dict[str, Callable[[Credit], float]] = {
        "grpo": lambda target: centred(target) / (statistics.pstdev(group(target, "scale")) + 1e-6),
        "dr_grpo": centred,
        "rloo": lambda target: target.value - statistics.fmean(peer_values(target)) if peer_values(target) else 0.0,
    }
    for name, formula in formulas.items():
        batch = assign(samples, AlgoConfig(advantage=name))
        assert batch.returns is None
        for sample, row in zip(samples, batch.advantages, strict=True):
            expected = np.zeros(len(row))
            for credit in sample.credits:
                for start, stop in credit.spans:
                    expected[start:stop] = formula(credit)
            np.testing.assert_allclose(row, expected, rtol=1e-6, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "gdpo", "rloo", "reinforce++"])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, 1e6])
@pytest.mark.parametrize("count", [3, 7])
def test_equal_rewards_teach_nothing_at_all(name: str, reward: float, count: int) -> None:
    """Even if their mean is not equal to them: (0.1 + 0.1 + 0.1) / 3 > 0.1."""
    assert advantages(one_credit(*[reward] * count), AlgoConfig(advantage=name)) == [[0.0, 0.0]] * count


def test_two_rewards_are_a_standard_deviation_from_their_mean() -> None:
    """However far apart they are."""
    for name in ("grpo", "gdpo", "reinforce++"):
        for apart in (0.5, 1.0, 2.0):
            first, second = advantages(one_credit(apart, 0), AlgoConfig(advantage=name))
            assert [*first, *second] == pytest.approx([1, 1, -1, -1], abs=1e-5)


def test_a_credit_without_tokens_is_a_peer_and_trains_nothing() -> None:
    samples = [
        make_sample(4, worth(1, (1, 2), peers="a"), worth(5, (2, 4), peers="b"), worth(3, peers="b")),
        make_sample(3, worth(0, (1, 3))),
    ]
    assert advantages(samples, AlgoConfig(advantage="dr_grpo")) == [[0.5, 1, 1], [-0.5, -0.5]]


def test_groups_are_not_mixed() -> None:
    samples = one_credit(1, 0, group="a") + one_credit(10, 20, group="b")
    assert advantages(samples, AlgoConfig(advantage="dr_grpo")) == [[0.5] * 2, [-0.5] * 2, [-5] * 2, [5] * 2]


def test_reinforce_plus_plus_by_hand() -> None:
    # Rewards 1 and 0, KL 0.5 and 0.25 | 0 and 0.5, beta 2: returns 1 - 1.5, 1 - 0.5 | -1, -1 with the mean -0.5 and
    # the variance (0 + 1 + 0.25 + 0.25) / 4.
    algo = AlgoConfig(advantage="reinforce++", kl_in="reward", kl="k1", kl_coef=2.0)
    kl = [np.array([9, 0.5, 0.25]), np.array([9, 0, 0.5])]
    scale = math.sqrt(1.5 / 4) + 1e-6
    rows = advantages(one_credit(1, 0), algo, kl=kl)
    np.testing.assert_allclose(rows, [[0, 1 / scale], [-0.5 / scale, -0.5 / scale]], rtol=1e-7, atol=1e-9)


def test_a_kl_that_is_in_the_loss_or_of_no_reference_is_not_in_the_reward() -> None:
    samples, kl = one_credit(1, 0), [np.array([0, 0.5, 0.25])] * 2
    for name in ("grpo", "reinforce++"):
        plain = advantages(samples, AlgoConfig(advantage=name))
        in_loss = AlgoConfig(advantage=name, kl_in="loss", kl_coef=2.0)
        assert advantages(samples, in_loss, kl=kl) == plain
        assert advantages(samples, AlgoConfig(advantage=name, kl_in="reward", kl_coef=2.0)) == plain


def test_batches_without_advantages_stay_unchanged() -> None:
    batch = ScoredBatch(tuple(one_credit(1, 0)))
    assert with_advantages(batch, AlgoConfig(objective="sft")) is batch


def reference_kl(log_ratio: float, estimate: str) -> float:
    """KL estimate for pi / ref = exp(log_ratio)."""
    q = 1 / math.exp(log_ratio)
    return {"k1": -math.log(q), "k2": 0.5 * math.log(q) ** 2, "k3": (q - 1) - math.log(q)}[estimate]


@pytest.mark.parametrize("estimate", ["k1", "k2", "k3"])
def test_reinforce_plus_plus_equals_its_formula(estimate: str) -> None:
    rng = np.random.default_rng(7)
    samples = random_batch(rng)
    kl = garbage(rng, samples)
    algo = AlgoConfig(advantage="reinforce++", kl_in="reward", kl=estimate, kl_coef=0.3)
    raw = []
    for sample, row in zip(samples, kl, strict=True):
        for credit in sample.credits:
            for t in range(*credit.spans[0]):
                later = [u for u in range(t, len(row)) if sample.loss_mask[u] > 0]
                raw.append(credit.value - 0.3 * sum(reference_kl(row[u], estimate) for u in later))
    expected = (np.array(raw) - statistics.fmean(raw)) / (statistics.pstdev(raw) + 1e-6)
    np.testing.assert_allclose(np.concatenate(advantages(samples, algo, kl=kl)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("estimate", ["k1", "k2", "k3"])
def test_kl_in_the_reward_of_a_group_counts_the_credits_tokens_and_what_follows(estimate: str) -> None:
    rng = np.random.default_rng(3)
    samples = [
        make_sample(9, worth(2, (1, 3), (4, 5)), worth(1, (6, 9))),  # interrupted by what a user says
        make_sample(4, worth(0, (2, 4)), worth(0.5)),
    ]
    kl = garbage(rng, samples)
    first, second = ([reference_kl(x, estimate) if x == x else 0.0 for x in row] for row in kl)
    values = [2 - 0.1 * sum(first[1:]), 1 - 0.1 * sum(first[6:]), 0 - 0.1 * sum(second[2:]), 0.5]
    mean = sum(values) / 4
    algo = AlgoConfig(advantage="dr_grpo", kl_in="reward", kl=estimate, kl_coef=0.1)
    rows = advantages(samples, algo, kl=kl)
    expected = [[values[0] - mean] * 3 + [values[1] - mean] * 3, [values[2] - mean] * 2]
    for row, target in zip(rows, expected, strict=True):
        np.testing.assert_allclose(row, target, rtol=1e-6)


def test_gae_by_hand() -> None:
    # gamma 0.5, lambda 0.5; one credit over two turns, its reward 1 at the end, values 1, 2, 4. Backwards:
    # A_3 = 1 - 4 = -3; A_2 = (0 + 2 - 2) - 3/4 = -3/4; A_1 = (0 + 1 - 1) - 3/16. Returns -3/16 + 1, -3/4 + 2, -3 + 4.
    samples = [make_sample(6, worth(1, (1, 3), (5, 6)))]
    algo = AlgoConfig(advantage="gae", gamma=0.5, gae_lambda=0.5)
    batch = assign(samples, algo, values=[np.array([np.nan, 1, 2, np.nan, np.nan, 4])])
    assert batch.returns is not None
    assert trained(samples, batch.returns) == [[13 / 16, 5 / 4, 1.0]]
    raw = np.array([-3 / 16, -3 / 4, -3])
    expected = (raw - raw.mean()) / (raw.std() + 1e-6)
    np.testing.assert_allclose(trained(samples, batch.advantages), [expected], rtol=1e-6)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 1.0), (0.99, 0.0), (0.97, 0.8)])
def test_gae_equals_its_formula(gamma: float, lam: float) -> None:
    rng = np.random.default_rng(11)
    samples = random_batch(rng)
    values, kl = garbage(rng, samples), garbage(rng, samples)
    raw, returns = [], []
    for sample, value, ratio in zip(samples, values, kl, strict=True):
        at = [t for t in range(len(value)) if sample.loss_mask[t] > 0]
        ends = {credit.spans[-1][1] - 1: credit.value for credit in sample.credits}
        reward = [ends.get(t, 0.0) - 0.2 * reference_kl(ratio[t], "k2") for t in at]
        v = [*(value[t] for t in at), 0.0]
        delta = [reward[i] + gamma * v[i + 1] - v[i] for i in range(len(at))]
        for i in range(len(at)):  # A_t = sum over l of (gamma lambda)^l delta_{t+l}
            raw.append(sum((gamma * lam) ** k * d for k, d in enumerate(delta[i:])))
            returns.append(raw[-1] + v[i])
    algo = AlgoConfig(advantage="gae", gamma=gamma, gae_lambda=lam, kl_in="reward", kl="k2", kl_coef=0.2)
    batch = assign(samples, algo, kl=kl, values=values)
    assert batch.returns is not None
    np.testing.assert_allclose(np.concatenate(trained(samples, batch.returns)), returns, rtol=1e-5, atol=1e-6)
    expected = (np.array(raw) - statistics.fmean(raw)) / (statistics.pstdev(raw) + 1e-6)
    np.testing.assert_allclose(np.concatenate(trained(samples, batch.advantages)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reward", [np.nan, np.inf])
def test_a_missing_reward_is_refused(reward: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        assign(one_credit(1.0, reward), AlgoConfig())


MASKS = [np.array(mask, np.float32) for mask in ([0, 1, 1, 0, 1], [0, 0, 1], [0, 0])]


def test_the_mean_over_tokens() -> None:
    weights = token_weights(MASKS, "token")
    assert [row.dtype for row in weights] == [np.float32] * 3
    for row, mask in zip(weights, MASKS, strict=True):
        np.testing.assert_allclose(row, mask / 4, rtol=1e-7)


def test_the_mean_over_sequences() -> None:
    # Two sequences have trained tokens, three and one of them.
    first, second, third = token_weights(MASKS, "sequence")
    np.testing.assert_allclose(first, np.array([0, 1, 1, 0, 1]) / 6, rtol=1e-6)
    np.testing.assert_allclose(second, [0, 0, 0.5])
    assert third.tolist() == [0, 0]


def test_the_sum_over_a_constant() -> None:
    first, second, third = token_weights(MASKS, "constant", longest=100)
    np.testing.assert_allclose(np.concatenate([first, second, third]), np.concatenate(MASKS) / 200, rtol=1e-6)


@pytest.mark.parametrize("average", ["token", "sequence", "constant"])
def test_later_turns_have_a_mean_of_their_own(average: str) -> None:
    """However many they are: two trained turns, then three sequences of later ones, one of them without a token."""
    masks = [*MASKS[:2], np.ones(9, np.float32), np.ones(1, np.float32), np.zeros(3, np.float32)]
    later = [False, False, True, True, True]
    rows = token_weights(masks, average, longest=10, later=later, later_weight=0.25)
    alone = [token_weights(part, average, longest=10) for part in (masks[:2], masks[2:])]
    expected = [row * 0.8 for row in alone[0]] + [row * 0.2 for row in alone[1]]
    np.testing.assert_allclose(np.concatenate(rows), np.concatenate(expected), rtol=1e-6)
    halves = token_weights(masks, average, longest=10, later=later)
    np.testing.assert_allclose(np.concatenate(halves), np.concatenate([*alone[0], *alone[1]]) / 2, rtol=1e-6)
    only = token_weights(masks[2:], average, longest=10, later=later[2:], later_weight=0.25)
    np.testing.assert_allclose(np.concatenate(only), np.concatenate(alone[1]), rtol=1e-6)


def test_k3_in_the_reward_is_that_of_the_loss() -> None:
    ratios = np.linspace(-8.0, 8.0, 33)
    estimates = kl_estimate(ratios, "k3")
    np.testing.assert_allclose(estimates, kl(torch.tensor(ratios), torch.zeros(33), "k3"), rtol=1e-12)
    near = ratios >= -3
    np.testing.assert_allclose(estimates[near], np.exp(-ratios[near]) - 1 + ratios[near], rtol=1e-12, atol=1e-12)
    assert np.isfinite(kl_estimate(np.array([-1e4]), "k3")).all()


@pytest.mark.parametrize("average", ["token", "sequence"])
def test_nothing_to_train_is_refused(average: str) -> None:
    with pytest.raises(ValueError, match="no trained token"):
        token_weights([np.zeros(3, np.float32)], average)


@pytest.mark.parametrize("seed", range(3))
def test_gdpo_equals_its_formula(seed: int) -> None:
    """Two groups of four rollouts with three metrics of very different spread, computed one number at a time."""
    rng = np.random.default_rng(seed)
    weights = {"right": 1.0, "judge": 0.5, "tokens": -1e-3}
    scores = [[{name: rng.normal() * 10**at for at, name in enumerate(weights)} for _ in range(4)] for _ in range(2)]
    sums = []
    for group in scores:
        for rollout in group:
            terms = []
            for name, weight in weights.items():
                column = [other[name] for other in group]
                mean = sum(column) / 4
                spread = math.sqrt(sum((value - mean) ** 2 for value in column) / 4)
                terms.append(weight * (rollout[name] - mean) / spread)
            sums.append(sum(terms))
    mean, spread = sum(sums) / 8, math.sqrt(sum((value - sum(sums) / 8) ** 2 for value in sums) / 8)
    parts = [[{name: weights[name] * rollout[name] for name in weights} for rollout in group] for group in scores]
    values = np.concatenate([decoupled(group, weights) for group in parts])
    assert values == pytest.approx(sums, rel=1e-3)
    batch = [*one_credit(*values[:4], group="a"), *one_credit(*values[4:], group="b")]
    values_per_sample = [row[0] for row in advantages(batch, AlgoConfig(advantage="gdpo"))]
    assert values_per_sample == pytest.approx([(value - mean) / spread for value in sums], rel=1e-3)


def test_gdpo_of_equal_parts_is_exactly_nothing() -> None:
    assert decoupled([{"a": 0.1, "b": 0.3}] * 3, {"a": 1.0, "b": 2.0}).tolist() == [0.0] * 3
    assert advantages(one_credit(0.0, 0.0), AlgoConfig(advantage="gdpo")) == [[0.0, 0.0]] * 2
