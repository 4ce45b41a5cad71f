"""Intervals: exact where a formula is published, and of the coverage they claim on simulated data."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from scipy.stats import binomtest

from megatron_collab.statistics import (
    Estimate,
    bootstrap,
    difference,
    difference_of_seeds,
    kappa,
    mean,
    mean_of_seeds,
    pass_at_k,
    pass_hat_k,
    ratio,
    share_at_any_time,
    sign_evidence,
    unpaired_difference,
    wilson,
    with_passes,
)

SIMULATIONS = 300


def coverage(intervals: list[Estimate], truth: float) -> float:
    return float(np.mean([interval.low <= truth <= interval.high for interval in intervals]))


def half(estimate: Estimate) -> float:
    return (estimate.high - estimate.low) / 2


@pytest.mark.parametrize(("successes", "trials"), [(0, 20), (1, 20), (7, 20), (20, 20), (120, 1319)])
def test_a_share_has_wilsons_interval(successes: int, trials: int) -> None:
    expected = binomtest(successes, trials).proportion_ci(0.95, "wilson")
    values = [[1.0]] * successes + [[0.0]] * (trials - successes)
    for low, high in (wilson(successes / trials, trials), (mean(values).low, mean(values).high)):
        assert (low, high) == (pytest.approx(expected.low, abs=1e-12), pytest.approx(expected.high, abs=1e-12))


@pytest.mark.parametrize("samples", [1, 3])
def test_no_success_in_twenty_tasks_is_no_certainty(samples: int) -> None:
    """Samples of a task may have agreed, so they do not narrow it."""
    nothing = mean([[0.0] * samples] * 20)
    assert nothing.text("{:.2f}".format) == "0.00 [0.00, 0.16]"
    everything = mean([[1.0] * samples] * 20)
    assert everything.text("{:.2f}".format) == "1.00 [0.84, 1.00]"


def test_samples_that_agree_are_no_more_evidence_than_one_and_independent_ones_are() -> None:
    once = mean([[float(n % 2)] for n in range(40)])
    agreeing = mean([[float(n % 2)] * 3 for n in range(40)])
    assert (agreeing.low, agreeing.high) == pytest.approx((once.low, once.high))
    draws = np.random.default_rng(0)
    independent = mean(draws.integers(2, size=(40, 3)).astype(float))
    assert half(independent) == pytest.approx(half(once) / math.sqrt(3), rel=0.3)
    assert half(mean([[0.0, 1.0]] * 4)) > 0.25, "tasks of equal shares are still few"


@pytest.mark.parametrize("tasks", [[], [[]], [[0.5]], [[1.0, 0.0]], [[12.0]] * 5], ids=str)
def test_there_is_no_interval_where_the_data_determine_none(tasks: list[list[float]]) -> None:
    estimate = mean(tasks)
    assert math.isnan(estimate.low) and math.isnan(estimate.high) and "[" not in estimate.text()


@pytest.mark.seconds
def test_the_clustered_bootstrap_covers() -> None:
    """Skewed tasks of unequal numbers of conversations that depend on each other."""
    draws = np.random.default_rng(1)
    intervals = []
    for _ in range(SIMULATIONS):
        tasks = draws.gamma(2.0, 1.0, 20)
        intervals.append(mean([task + draws.normal(0, 0.5, draws.integers(1, 4)) for task in tasks]))
    assert 0.91 <= coverage(intervals, 2.0) <= 0.99


@pytest.mark.seconds
@pytest.mark.parametrize("number", [2, 3, 4])
def test_the_interval_of_very_few_tasks_covers(number: int) -> None:
    """It may exceed the largest value: two tasks lie on the same side of the mean half of the time."""
    draws = np.random.default_rng(7)
    intervals = [mean(draws.normal(size=(number, 1))) for _ in range(SIMULATIONS)]
    assert coverage(intervals, 0.0) >= 0.91


def test_wilsons_interval_of_clustered_shares_covers() -> None:
    draws = np.random.default_rng(2)
    chances = draws.beta(0.4, 1.6, (SIMULATIONS, 60))
    intervals = [mean((draws.random((3, 60)) < row).T.astype(float)) for row in chances]
    assert 0.92 <= coverage(intervals, 0.2) <= 0.99


@pytest.mark.parametrize("tasks", [3, 5])
def test_few_tasks_with_many_conversations_cover(tasks: int) -> None:
    """Tasks that differ much. Without the correction for few tasks 0.79 and 0.89."""
    draws = np.random.default_rng(8)
    chances = draws.beta(0.5, 0.5, (SIMULATIONS, tasks, 1))
    intervals = [mean((draws.random((tasks, 8)) < row).astype(float)) for row in chances]
    assert coverage(intervals, 0.5) >= 0.92


@pytest.mark.parametrize(
    ("sign", "truth"), [("@", 1 - 0.4 * 1.4 * 2.4 * 3.4 / 120), ("^", 1.6 * 2.6 * 3.6 * 4.6 / 120)]
)
def test_pass_at_k_of_few_tasks_covers(sign: str, truth: float) -> None:
    """Moments of the beta distribution. The bootstrap of tasks holds pass@4 in 0.66."""
    draws = np.random.default_rng(9)
    chances = draws.beta(1.6, 0.4, (SIMULATIONS, 10, 1))
    trials = ((draws.random((10, 8)) < row).astype(float).tolist() for row in chances)
    intervals = [with_passes("x", tasks)[f"x_pass{sign}4"] for tasks in trials]
    assert coverage(intervals, truth) >= 0.93


def test_conversations_as_if_independent_would_not_cover() -> None:
    """That the test above can fail."""
    draws = np.random.default_rng(2)
    chances = draws.beta(0.4, 1.6, (SIMULATIONS, 60))
    shares = [(draws.random((3, 60)) < row).mean() for row in chances]
    assert coverage([Estimate(share, *wilson(share, 180)) for share in shares], 0.2) < 0.9


@pytest.mark.parametrize("shares", [True, False])
def test_a_paired_difference_is_narrower_than_an_unpaired_one(shares: bool) -> None:
    draws = np.random.default_rng(3)
    task, noise = draws.normal(0, 1, 80), draws.normal(0, 0.3, (2, 80))
    arms = task + noise + [[0.0], [0.2]]
    arms = (arms > 0).astype(float) if shares else arms
    first, second = ({f"t{n}": [float(value)] for n, value in enumerate(arm)} for arm in arms)
    paired = difference(first, second)
    unpaired = math.hypot(*(half(mean(arm.values())) for arm in (first, second)))
    assert paired.value == pytest.approx(arms[1].mean() - arms[0].mean())
    assert half(paired) < 0.65 * unpaired


@pytest.mark.seconds
def test_paired_differences_cover_and_equal_arms_are_no_certainty() -> None:
    draws = np.random.default_rng(4)
    intervals = []
    for _ in range(SIMULATIONS):
        task = draws.random(40)
        arms = [(draws.random(40) < share).astype(float) for share in (task, 0.2 + 0.8 * task)]
        intervals.append(difference(*({str(n): [value] for n, value in enumerate(arm)} for arm in arms)))
    assert 0.92 <= coverage(intervals, 0.1) <= 1.0
    for value in (0.0, 1.0):
        same = {str(n): [value] for n in range(20)}
        assert half(difference(same, same)) > 0.1
    mixed = {str(n): [float(n % 2)] for n in range(20)}
    assert 0.05 < half(difference(mixed, mixed)) < 0.2


def test_newcombes_example_of_paired_shares() -> None:
    """Newcombe 1998, table III: 36, 12, 2 and 0 pairs of 50 differ by 0.20, from 0.0569 to 0.3404 (method 10)."""
    pairs = [(1, 1)] * 36 + [(1, 0)] * 12 + [(0, 1)] * 2
    second, first = ({str(n): [float(pair[side])] for n, pair in enumerate(pairs)} for side in (0, 1))
    estimate = difference(first, second)
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((0.20, 0.0569, 0.3404), abs=2e-4)


def test_newcombes_example_of_independent_shares() -> None:
    """56 of 70 and 48 of 80 (Newcombe 1998, table II a, method 10): 0.2000 [0.0524, 0.3339]."""
    shares = ([[1.0]] * 48 + [[0.0]] * 32, [[1.0]] * 56 + [[0.0]] * 14)
    estimate = unpaired_difference(*shares)
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)


@pytest.mark.seconds
def test_unpaired_differences_cover() -> None:
    draws = np.random.default_rng(5)
    sides = [([[x] for x in draws.normal(0.0, 1.0, 30)], [[x] for x in draws.exponential(1.0, 60)]) for _ in range(100)]
    assert 0.88 <= coverage([unpaired_difference(*side) for side in sides], 1.0) <= 1.0
    assert math.isnan(unpaired_difference([[0.5], [0.5]], [[0.25], [0.25]]).low)


def test_only_tasks_of_both_arms_are_compared() -> None:
    first = {"a": [0.0], "b": [1.0], "c": []}
    assert difference(first, {"b": [1.0], "a": [1.0], "c": [1.0], "d": [0.0]}).value == 0.5
    assert difference(first, {"d": [1.0]}).text("{:+.3f}".format) == "\u2013"


@pytest.mark.parametrize("samples", range(1, 6))
def test_pass_at_k_is_the_closed_formula(samples: int) -> None:
    """Chen et al. 2021, equation 1, and all subsets of k samples counted."""
    for successes in range(samples + 1):
        results = [1] * successes + [0] * (samples - successes)
        for k in range(1, samples + 1):
            subsets = [*combinations(results, k)]
            closed = 1 - math.comb(samples - successes, k) / math.comb(samples, k)
            assert pass_at_k(samples, successes, k) == pytest.approx(closed)
            assert closed == pytest.approx(np.mean([any(subset) for subset in subsets]))
            assert pass_hat_k(samples, successes, k) == pytest.approx(np.mean([all(subset) for subset in subsets]))


def test_shares_of_several_samples_have_pass_at_k_and_others_do_not() -> None:
    estimates = with_passes("right", [[1.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0]])
    assert list(estimates) == ["right", "right_pass@2", "right_pass^2", "right_pass@3", "right_pass^3"]
    assert estimates["right_pass@2"].value == pytest.approx((2 / 3 + 1 + 0) / 3)
    assert all(0 <= estimate.low < estimate.high <= 1 for estimate in estimates.values())
    assert estimates["right_pass^3"].value == 0.5, "the third task has only two samples"
    assert list(with_passes("right", [[1.0], [0.0]])) == ["right"]
    assert list(with_passes("tokens", [[3.0, 4.0], [5.0, 6.0]])) == ["tokens"]


@pytest.mark.seconds
@pytest.mark.parametrize("shared", [True, False])
def test_an_interval_over_seeds_covers_where_one_seed_does_not(shared: bool) -> None:
    """A seed differs from another by more than tasks explain; each plays the same tasks or tasks of its own."""
    draws = np.random.default_rng(5)
    over_seeds, over_tasks = [], []
    for _ in range(60):
        hardness = draws.normal(0, 0.5, 30)
        seeds = []
        for number, effect in enumerate(draws.normal(0, 0.3, 5)):
            tasks = hardness if shared else draws.normal(0, 0.5, 30)
            values = effect + tasks + draws.normal(0, 0.3, 30)
            seeds.append({f"{0 if shared else number}-{n}": [float(value)] for n, value in enumerate(values)})
        over_seeds.append(mean_of_seeds(seeds))
        over_tasks.append(mean([value for seed in seeds for value in seed.values()]))
    assert coverage(over_seeds, 0.0) >= 0.9 and coverage(over_tasks, 0.0) < 0.8


@pytest.mark.seconds
@pytest.mark.parametrize("shared", [True, False])
def test_an_interval_over_two_seeds_covers_if_seeds_differ_much(shared: bool) -> None:
    """By four standard errors of the tasks' mean: two seeds that are close by chance are no evidence that all are.

    With the degrees of freedom of the seeds' variance itself 0.85 and 0.90.
    """
    draws = np.random.default_rng(10)
    intervals = []
    for _ in range(SIMULATIONS):
        hardness = draws.normal(0, 0.5, (1 if shared else 2, 100))
        values = hardness + draws.normal(0, 0.2, (2, 1)) + draws.normal(0, 0.25, (2, 100))
        seeds = [{f"{0 if shared else seed}-{n}": [x] for n, x in enumerate(row)} for seed, row in enumerate(values)]
        intervals.append(mean_of_seeds(seeds))
    assert coverage(intervals, 0.0) >= 0.92


def test_a_difference_over_seeds_is_paired_and_covers_a_seeds_effect() -> None:
    """Hard tasks are hard for both arms; a training shifts its arm by more than tasks explain."""
    draws = np.random.default_rng(6)
    estimates = []
    for _ in range(60):
        hardness = draws.normal(0, 5, 30)
        arms = [
            [
                {str(n): [float(v)] for n, v in enumerate(hardness + shift + draws.normal(0, 0.1, 30))}
                for shift in shifts
            ]
            for shifts in draws.normal(0, 0.3, (2, 4))
        ]
        estimates.append(difference_of_seeds(*arms))
    assert coverage(estimates, 0.0) >= 0.9
    assert np.mean([estimate.high - estimate.low for estimate in estimates]) < 3, "tasks differ by 5"


def test_a_difference_over_seeds_may_be_negative_and_equal_arms_are_no_certainty() -> None:
    solved = [{str(n): [float(n < 10 + seed)] for n in range(20)} for seed in range(3)]
    fewer = [{str(n): [float(n < 10)] for n in range(20)} for _ in range(3)]
    assert difference_of_seeds(solved, fewer).low < -0.1 < difference_of_seeds(solved, fewer).value < 0
    assert difference_of_seeds(fewer, fewer) == difference(fewer[0], fewer[0])
    same = difference_of_seeds(solved, solved)
    assert same.value == 0 and (math.isnan(same.low) or same.low < 0 < same.high)
    uneven = ([{"a": [1.0]}, {"a": [0.0] * 9}], [{"a": [1.0]}, {"a": [1.0] * 9}])
    assert difference_of_seeds(*uneven).value == 0.5, "seeds count alike, whatever their conversations"
    scores = [{str(n): [n / 7] for n in range(20)}] * 3
    equal = difference_of_seeds(scores, scores)
    assert equal.value == 0 and math.isnan(equal.low)
    assert difference_of_seeds(solved[:1], fewer[:1]) == difference(solved[0], fewer[0])
    assert math.isnan(difference_of_seeds([{"a": [1.0]}], [{"b": [1.0]}]).value)


def test_an_interval_over_two_seeds_exceeds_both() -> None:
    seeds = [{str(n): [value + n % 2] for n in range(20)} for value in (1.0, 3.0)]
    estimate = mean_of_seeds(seeds)
    assert estimate.value == 2.5 and estimate.low < 0 and estimate.high > 5
    shares = [{str(n): [float(n < right)] for n in range(20)} for right in (8, 12)]
    assert 0 <= mean_of_seeds(shares).low < mean_of_seeds(shares).high <= 1


def test_a_single_task_has_no_interval_over_seeds() -> None:
    estimate = mean_of_seeds([{"a": [0.0]}, {"a": [1.0]}])
    assert estimate.value == 0.5 and math.isnan(estimate.low)


def test_seeds_that_solve_one_task_each_have_no_interval() -> None:
    """Neither the means of seeds nor those of tasks differ, so that there is no variance to divide by."""
    seeds = [{"a": [0.1], "b": [0.3]}, {"a": [0.3], "b": [0.1]}]
    estimate = mean_of_seeds(seeds)
    assert estimate.value == pytest.approx(0.2) and math.isnan(estimate.low)
    assert math.isnan(mean_of_seeds([{"a": [0.0], "b": [1.0]}, {"a": [1.0], "b": [0.0]}]).low)
    assert math.isnan(difference_of_seeds(seeds, [{"a": [2.1], "b": [2.1]}, {"a": [2.1], "b": [2.1]}]).low)


def test_seeds_that_all_failed_are_no_certainty() -> None:
    failed = {str(n): [0.0] for n in range(20)}
    assert mean_of_seeds([failed, failed]).high == pytest.approx(mean(failed.values()).high)
    assert mean_of_seeds([failed]) == mean(failed.values())
    assert mean_of_seeds([{"a": [1.0, 0.0]}, {"a": [1.0, 1.0], "b": [0.0]}]).value == 0.5


def test_a_ratio_is_of_sums() -> None:
    estimate = ratio([1.0, 8.0, 3.0] * 2, [2.0, 2.0, 4.0] * 2)
    assert estimate.value == 1.5 and 0.5 <= estimate.low < 1.5 < estimate.high <= 4
    assert math.isnan(ratio([1.0, 2.0], [2.0, 4.0]).low)


def test_the_same_data_give_the_same_interval() -> None:
    data = np.random.default_rng(6).normal(size=30)
    first, second = (bootstrap([30], lambda units: data[units].mean(-1)) for _ in range(2))
    assert first == second


def test_a_scale_that_turns_the_order_turns_the_interval() -> None:
    assert Estimate(0.5, 0.25, 1.0).scaled(-2, 1) == Estimate(0.0, -1.0, 0.5)


def test_evidence_of_signs_keeps_its_error_under_peeking() -> None:
    """Of equal sides, looked at after every rating; a test that is made at each look errs three times as often."""
    signs = np.random.default_rng(0).integers(0, 2, (4000, 200))
    wins = signs.cumsum(1)
    table = np.array([[sign_evidence(win, number - win) >= 20 for win in range(201)] for number in range(201)])
    decided = table[np.arange(1, 201), wins].any(1).mean()
    assert 0.01 < decided <= 0.05
    shares = np.abs(wins / np.arange(1, 201) - 0.5) > 0.98 / np.sqrt(np.arange(1, 201))
    assert shares[:, 10:].any(1).mean() > 3 * 0.05


def test_evidence_of_signs_grows_with_what_is_observed() -> None:
    assert sign_evidence(0, 0) == pytest.approx(1)
    assert sign_evidence(1, 0) == pytest.approx(1)  # a single sign tells nothing
    assert sign_evidence(2, 0) == pytest.approx(1.5)  # B(5/2, 1/2) / B(1/2, 1/2) * 4
    assert sign_evidence(0, 2) == sign_evidence(2, 0)
    assert sign_evidence(10**6, 0) < math.inf


@pytest.mark.parametrize(("wins", "losses"), [(9, 1), (0, 8), (30, 30), (1, 0)])
def test_the_interval_of_a_share_has_what_the_evidence_does_not_refute(wins: int, losses: int) -> None:
    share = share_at_any_time(wins, losses)
    assert 0 <= share.low <= share.value == wins / (wins + losses) <= share.high <= 1
    assert (share.low > 0.5 or share.high < 0.5) == (sign_evidence(wins, losses) > 20)
    assert share_at_any_time(losses, wins).low == pytest.approx(1 - share.high)


def test_the_interval_of_a_share_covers_it_at_all_times() -> None:
    chance = 0.8
    wins = (np.random.default_rng(1).random((300, 60)) < chance).cumsum(1)
    shares = {(win, at): share_at_any_time(win, at - win) for at in range(1, 61) for win in range(at + 1)}
    out = [
        any(not shares[win, at].low <= chance <= shares[win, at].high for at, win in enumerate(row.tolist(), 1))
        for row in wins
    ]
    assert 0 < np.mean(out) <= 0.05
    assert math.isnan(share_at_any_time(0, 0).value)


def test_agreement_beyond_chance() -> None:
    verdicts = [("a", "a")] * 20 + [("a", "b")] * 5 + [("b", "a")] * 10 + [("b", "b")] * 15
    assert kappa(verdicts) == pytest.approx(0.4)  # 0.7 agreed, 0.5 by chance
    assert kappa([("a", "a"), ("b", "b")]) == 1
    assert kappa([("a", "b"), ("b", "a")]) == -1
    assert math.isnan(kappa([])) and math.isnan(kappa([("a", "a")]))
