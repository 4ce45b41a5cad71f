"""The figures of the judge check against scipy, scikit-learn and resampling by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics
from sklearn.calibration import calibration_curve

from megatron_collab import statistics
from megatron_collab.observability.ratings import FIRST, SECOND, TIE
from megatron_collab.statistics import clustered
from megatron_collab.view import agreement
from megatron_collab.view.agreement import Figure, Labeled, Preference

TASKS, ROWS = 30, 120


def labeled(is_yes_or_no: bool, seed: int = 0) -> list[Labeled]:
    """Scores in steps, so that many are equal, of a judge that half follows the labels and half the length."""
    chance = random.Random(seed)
    rows = []
    for at in range(ROWS):
        label = chance.random()
        length = chance.randint(1, 60)
        score = round(0.5 * label + 0.3 * length / 60 + 0.2 * chance.random(), 1)
        rows.append(Labeled(f"t{at % TASKS}", float(label > 0.5) if is_yes_or_no else label, score, length))
    return rows


def preferences(seed: int = 0) -> list[Preference]:
    chance = random.Random(seed)
    rows = []
    for at in range(ROWS):
        scores, lengths = [
            (chance.choice((0.2, 0.5, 0.8)), chance.choice((0.2, 0.5, 0.8))),
            (at % 7, chance.randint(0, 7)),
        ]
        verdict = chance.choice((FIRST, SECOND, TIE, FIRST if scores[0] > scores[1] else SECOND))
        rows.append(Preference(f"t{at % TASKS}", verdict, chance.choice((FIRST, SECOND)), scores, lengths))
    return rows


def columns(rows: Sequence[Labeled]) -> tuple[np.ndarray, ...]:
    return tuple(np.array([row[at] for row in rows], float) for at in (1, 2, 3))


def by_name(figures: Sequence[Figure]) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures}


STATISTICS: dict[str, tuple[Callable[..., Any], Callable[..., Any], bool]] = {
    "pearson": (agreement.correlation, lambda x, y: stats.pearsonr(x, y).statistic, False),
    "spearman": (agreement.rank_correlation, lambda x, y: stats.spearmanr(x, y).statistic, False),
    "area": (agreement.area, lambda x, y: metrics.roc_auc_score(y, x), True),
    "kappa": (lambda x, y: agreement.kappa(x >= 0.5, y >= 0.5), lambda x, y: _kappa(x >= 0.5, y >= 0.5), False),
}


def _kappa(x: np.ndarray, y: np.ndarray) -> float:
    return float(metrics.cohen_kappa_score(x, y))


@pytest.mark.parametrize("name", STATISTICS)
def test_a_statistic_of_drawn_tasks_is_that_of_their_rows(name: str) -> None:
    """The value, and the interval of tasks that are drawn one by one and repeated as often."""
    make, reference, is_yes_or_no = STATISTICS[name]
    rows = labeled(is_yes_or_no)
    label, score, _ = columns(rows)
    tasks = [row.task for row in rows]
    estimate = clustered(tasks, make(score, label), (-1.0, 1.0))
    assert estimate.value == pytest.approx(reference(score, label), abs=1e-12)
    names = sorted(set(tasks))
    places = [np.flatnonzero(np.array(tasks) == task) for task in names]
    chance = np.random.default_rng(0)
    weights, values = [], []
    for _ in range(25):
        drawn = chance.integers(0, len(names), len(names))
        at = np.concatenate([places[task] for task in drawn])
        weights.append(np.bincount(at, minlength=len(rows)))
        values.append(reference(score[at], label[at]))
    np.testing.assert_allclose(make(score, label)(np.array(weights, float)), values, atol=1e-12)


def test_the_interval_is_that_of_the_bootstrap_of_a_mean() -> None:
    """Of a mean over tasks of one row, that of statistics.mean; of several equal rows a task, no narrower one."""
    values = np.random.default_rng(0).gamma(2.0, size=40)
    names = [f"t{at}" for at in range(40)]
    once = clustered(names, lambda weights: weights @ values / weights.sum(1), (-math.inf, math.inf))
    expected = statistics.mean([[value] for value in values])
    assert once.value == pytest.approx(expected.value)
    assert (once.low, once.high) == pytest.approx((expected.low, expected.high), rel=0.03)
    thrice = np.repeat(values, 3)
    repeated = clustered(
        [name for name in names for _ in range(3)],
        lambda weights: weights @ thrice / weights.sum(1),
        (-math.inf, math.inf),
    )
    assert (repeated.value, repeated.low, repeated.high) == pytest.approx((once.value, once.low, once.high))


def test_intervals_contain_the_truth_as_often_as_they_claim() -> None:
    """Of a Pearson correlation of 0.6, with tasks whose two conversations are alike."""
    chance = np.random.default_rng(3)
    hits = 0
    for _ in range(60):
        x = np.repeat(chance.normal(size=25), 2)
        y = 0.6 * x + 0.8 * np.repeat(chance.normal(size=25), 2)
        estimate = clustered([f"t{at // 2}" for at in range(50)], agreement.correlation(x, y), (-1.0, 1.0))
        hits += estimate.low <= 0.6 <= estimate.high
    assert hits >= 52  # of 60; binomial chance of fewer at 95 %: 0.3 %


@pytest.mark.parametrize(
    ("tasks", "score", "label"),
    [
        (["a", "a", "a"], [0.1, 0.2, 0.3], [0.0, 1.0, 1.0]),  # a single task
        (["a", "b", "c"], [0.2, 0.2, 0.2], [0.0, 1.0, 1.0]),  # scores that do not vary
        (["a", "b", "c"], [0.1, 0.2, 0.3], [0.0, 0.0, 1.0]),  # draws without a label 1 are undefined
        ([], [], []),
    ],
)
def test_what_the_data_do_not_determine_has_no_interval(
    tasks: list[str], score: list[float], label: list[float]
) -> None:
    x, y = np.array(score), np.array(label)
    for make in (agreement.correlation, agreement.area):
        estimate = clustered(tasks, make(x, y) if tasks else lambda weights: weights, (-1.0, 1.0))
        assert math.isnan(estimate.low) and math.isnan(estimate.high)


def test_figures_of_numbers() -> None:
    rows = labeled(False)
    label, score, length = columns(rows)
    figures = by_name(agreement.of_labels(rows))
    assert {name: figure.estimate.value for name, figure in figures.items()} == {
        "Spearman's correlation": pytest.approx(stats.spearmanr(score, label).statistic),
        "Pearson's correlation": pytest.approx(stats.pearsonr(score, label).statistic),
        "judge less people": pytest.approx(score.mean() - label.mean()),  # tasks have equally many
        "bias by length": pytest.approx(
            stats.spearmanr(score, length).statistic - stats.spearmanr(label, length).statistic
        ),
    }
    assert figures["bias by length"].estimate.low > 0, "the judge of these rows likes length"
    assert all((figure.count, figure.tasks) == (ROWS, TASKS) for figure in figures.values())


def test_figures_of_yes_and_no() -> None:
    rows = labeled(True)
    label, score, _ = columns(rows)
    figures = by_name(agreement.of_labels(rows))
    assert figures["area under the ROC curve"].estimate.value == pytest.approx(metrics.roc_auc_score(label, score))
    assert figures["agreement"].estimate.value == pytest.approx(metrics.accuracy_score(label, score >= 0.5))
    assert figures["kappa"].estimate.value == pytest.approx(metrics.cohen_kappa_score(label, score >= 0.5))
    far = by_name(agreement.of_labels([row._replace(score=10 * row.score) for row in rows]))
    assert far.keys() == {"area under the ROC curve", "bias by length"}, "no threshold beyond scores from 0 to 1"
    assert agreement.of_labels([]) == []


def test_figures_of_pairs() -> None:
    rows = preferences()
    figures = by_name(agreement.of_preferences(rows))
    people = [row.verdict for row in rows]
    judge = [TIE if a == b else FIRST if a > b else SECOND for a, b in (row.scores for row in rows)]
    assert [row.judged for row in rows] == judge
    assert figures["agreement"].estimate.value == pytest.approx(metrics.accuracy_score(people, judge))
    assert figures["kappa"].estimate.value == pytest.approx(metrics.cohen_kappa_score(people, judge))
    assert figures["kappa"].estimate.value == pytest.approx(statistics.kappa([*zip(people, judge, strict=True)]))
    decided = [(a, b) for a, b in zip(people, judge, strict=True) if TIE not in (a, b)]
    assert figures["agreement without ties"].count == len(decided)
    by_task: dict[str, list[float]] = {}
    for row in rows:
        if row.verdict != TIE:
            by_task.setdefault(row.task, []).append(row.verdict == row.shown_left)
    chosen = figures["raters' choice of the left"]
    assert chosen.estimate.value == pytest.approx(np.mean([np.mean(values) for values in by_task.values()]))
    assert 0 < chosen.estimate.low < chosen.estimate.value < chosen.estimate.high < 1
    assert figures["agreement"].count == ROWS and figures["agreement"].tasks == TASKS
    assert all(math.isnan(figure.estimate.value) and not figure.count for figure in agreement.of_preferences([]))


def test_the_bias_by_length_of_pairs_is_beyond_that_of_the_raters() -> None:
    """By hand: of the pair of `t0` the judge prefers the longer and the rater the shorter, and so on."""
    rows = [
        Preference("t0", SECOND, FIRST, (0.9, 0.1), (20, 10)),  # J 1, H 0
        Preference("t1", FIRST, FIRST, (0.9, 0.1), (20, 10)),  # J 1, H 1
        Preference("t2", TIE, FIRST, (0.1, 0.9), (20, 10)),  # J 0, H 1/2
        Preference("t3", FIRST, FIRST, (0.5, 0.5), (10, 20)),  # J 1/2, H 0
        Preference("t4", FIRST, FIRST, (0.5, 0.5), (10, 10)),  # equally long
    ]
    bias = by_name(agreement.of_preferences(rows))["bias by length"]
    assert bias.estimate.value == pytest.approx((1 + 0 - 0.5 + 0.5) / 4) and bias.count == 4
    same = [row._replace(verdict=row.judged) for row in preferences()]
    assert by_name(agreement.of_preferences(same))["bias by length"].estimate.value == 0


def test_calibration() -> None:
    rows = [row._replace(task=f"t{at}") for at, row in enumerate(labeled(True))]
    label, score, _ = columns(rows)
    bins = agreement.calibration(rows)
    # scikit-learn puts a score at the border of two bins into the lower, so borders are moved by less than a step.
    shares, means = calibration_curve(label, np.clip(score + 1e-6, 0, 1), n_bins=agreement.BINS)
    assert [of_bin.label.value for of_bin in bins] == pytest.approx(shares.tolist())
    assert [of_bin.score for of_bin in bins] == pytest.approx(means.tolist(), abs=1e-5)
    assert sum(of_bin.labels for of_bin in bins) == ROWS
    widest = max(bins, key=lambda of_bin: of_bin.labels)
    expected = stats.binomtest(round(widest.label.value * widest.labels), widest.labels).proportion_ci(0.95, "wilson")
    assert (widest.label.low, widest.label.high) == pytest.approx((expected.low, expected.high))
    error = sum(of_bin.labels * abs(of_bin.label.value - of_bin.score) for of_bin in bins) / ROWS
    assert agreement.calibration_error(bins) == pytest.approx(error)
    assert agreement.calibration([row._replace(score=10 * row.score) for row in rows]) == []
    assert math.isnan(agreement.calibration_error([]))
    repeated = [Labeled("a", 1.0, 0.95, 1)] * 9 + [Labeled("b", 0.0, 0.95, 1)]
    (only,) = agreement.calibration(repeated)
    assert only.label.value == 0.5 and (only.labels, only.tasks) == (10, 2), "a task counts once"
    wrong = agreement.calibration([*repeated, Labeled("c", 1.0, 0.05, 1)])
    assert agreement.calibration_error(wrong) == pytest.approx((2 * 0.45 + 0.95) / 3)


def test_disagreements_are_differences_or_those_of_ranks() -> None:
    rows = [Labeled("a", 1.0, 0.25, 1), Labeled("b", 0.0, 0.0, 1)]
    assert agreement.disagreements(rows).tolist() == [0.75, 0.0]
    scales = [Labeled(name, label, score, 1) for name, label, score in (("a", 1, 90.0), ("b", 5, 10.0), ("c", 3, 50.0))]
    ranks = np.abs(stats.rankdata([90, 10, 50]) - stats.rankdata([1, 5, 3])) / 3
    assert agreement.disagreements(scales).tolist() == pytest.approx(ranks.tolist())
