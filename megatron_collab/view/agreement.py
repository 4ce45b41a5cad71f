"""How far a judge agrees with people, from pairs that they compared or conversations that they labeled: pure functions.

Intervals are of 95 %, over tasks (statistics.py). Judges score single conversations and see no positions, so a bias by
position is the raters'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from megatron_collab import statistics
from megatron_collab.observability.ratings import FIRST, SECOND, TIE
from megatron_collab.statistics import Estimate

BINS = 10  # of a calibration curve
_TINY = 1e-12  # variance of equal values
Array = np.ndarray[Any, Any]
Statistic = Callable[[Array], Array]  # of weights [draws, rows], as statistics.clustered has them


class Preference(NamedTuple):
    """A rater's verdict on two conversations about a task, with their scores by the judge and their lengths.

    `verdict`, `shown_left`: FIRST or SECOND of them, a verdict also TIE.
    """

    task: str
    verdict: str
    shown_left: str
    scores: tuple[float, float]
    lengths: tuple[int, int]

    @property
    def judged(self) -> str:
        """The judge's verdict: the higher score."""
        return _higher(*self.scores)


class Labeled(NamedTuple):
    """A label by people of a conversation (yes: 1, no: 0), its score by the judge, and its length."""

    task: str
    label: float
    score: float
    length: int


@dataclass(frozen=True)
class Figure:
    """An estimate from `count` verdicts or labels of so many `tasks`."""

    name: str
    estimate: Estimate
    count: int
    tasks: int


class Bin(NamedTuple):
    """Conversations with scores of a range: mean score, people's mean label, how many labels. A task counts once."""

    score: float
    label: Estimate
    labels: int
    tasks: int


def of_preferences(pairs: Sequence[Preference]) -> list[Figure]:
    """Agreement with raters, and bias by length and by position.

    The bias by length is the mean of J - H over the tasks: 1 if the judge (J), or the rater (H), prefers the longer
    conversation, 0 if the shorter, 1/2 if neither. Pairs of equal length are left out.
    """
    decided = [pair for pair in pairs if TIE not in (pair.verdict, pair.judged)]
    unequal = [pair for pair in pairs if pair.lengths[0] != pair.lengths[1]]
    chosen = [pair for pair in pairs if pair.verdict != TIE]
    verdicts = [(pair.verdict, pair.judged) for pair in pairs]
    people = _by_task((pair.task, _prefers_longer(pair, pair.verdict)) for pair in unequal)
    judge = _by_task((pair.task, _prefers_longer(pair, pair.judged)) for pair in unequal)
    return [
        _share("agreement", [(pair.task, pair.verdict == pair.judged) for pair in pairs]),
        _share("agreement without ties", [(pair.task, pair.verdict == pair.judged) for pair in decided]),
        _clustered("kappa", [pair.task for pair in pairs], kappa(*zip(*verdicts, strict=True)) if pairs else None),
        Figure("bias by length", statistics.difference(people, judge), len(unequal), len(people)),
        _share("raters' choice of the left", [(pair.task, pair.verdict == pair.shown_left) for pair in chosen]),
    ]


def of_labels(rows: Sequence[Labeled]) -> list[Figure]:
    """Agreement with labels, and bias by length: Spearman's correlation of score and length less that of labels.

    Labels that are all yes or no have the area under the ROC curve, and if scores are from 0 to 1 the agreement of
    scores from 0.5 on with yes; numbers have correlations. If both are from 0 to 1, their mean difference.
    """
    if not rows:
        return []
    tasks = [row.task for row in rows]
    label, score, length = (np.array([row[at] for row in rows], float) for at in (1, 2, 3))
    figures = []
    if is_yes_or_no(rows):
        figures.append(_clustered("area under the ROC curve", tasks, area(score, label), (0.0, 1.0)))
        if _is_chance(score):
            judged = score >= 0.5
            equal = [(task, bool(same)) for task, same in zip(tasks, judged == (label == 1), strict=True)]
            figures.append(_share("agreement", equal))
            figures.append(_clustered("kappa", tasks, kappa(label.tolist(), judged.astype(float).tolist())))
    else:
        figures.append(_clustered("Spearman's correlation", tasks, rank_correlation(score, label)))
        figures.append(_clustered("Pearson's correlation", tasks, correlation(score, label)))
    if _is_chance(score) and _is_chance(label):
        people, judge = _by_task((row.task, row.label) for row in rows), _by_task((row.task, row.score) for row in rows)
        excess = statistics.difference(people, judge)
        figures.append(Figure("judge less people", excess, len(rows), len(people)))
    of_score, of_label = rank_correlation(score, length), rank_correlation(label, length)
    bias = _clustered("bias by length", tasks, lambda weights: of_score(weights) - of_label(weights), (-2.0, 2.0))
    return [*figures, bias]


def calibration(rows: Sequence[Labeled]) -> list[Bin]:
    """BINS bins of equal width over the scores, without empty ones; none unless scores and labels are from 0 to 1."""
    if not rows or not all(_is_chance(np.array([row[at] for row in rows])) for at in (1, 2)):
        return []
    bins: dict[int, list[Labeled]] = {}
    for row in rows:
        bins.setdefault(min(int(row.score * BINS), BINS - 1), []).append(row)
    return [_bin(bins[number]) for number in sorted(bins)]


def calibration_error(bins: Sequence[Bin]) -> float:
    """Mean of |score - label| over the tasks of all bins (Naeini et al. 2015), nan if there are none.

    Chance alone makes it positive, the more the fewer labels there are, so it has no interval.
    """
    gaps = [abs(of_bin.score - of_bin.label.value) * of_bin.tasks for of_bin in bins]
    return sum(gaps) / sum(of_bin.tasks for of_bin in bins) if bins else math.nan


def is_yes_or_no(rows: Sequence[Labeled]) -> bool:
    """Whether all labels are 0 or 1."""
    return statistics.is_share([[row.label] for row in rows])


def disagreements(rows: Sequence[Labeled]) -> Array:
    """How far score and label are apart: their difference if both are from 0 to 1, else that of their ranks as shares.

    Ranks of equal values are their mean.
    """
    score, label = (np.array([row[at] for row in rows], float) for at in (2, 1))
    if _is_chance(score) and _is_chance(label):
        return np.abs(score - label)
    once = np.ones((1, len(rows)))
    return np.abs(_ranks(score)(once)[0] - _ranks(label)(once)[0]) / max(len(rows), 1)


def correlation(x: Array, y: Array) -> Statistic:
    """Pearson's; nan if either does not vary."""
    x, y = ((side - side.mean()) / (side.std() or 1.0) for side in (x, y))
    return lambda weights: _correlation(weights, x, y)


def rank_correlation(x: Array, y: Array) -> Statistic:
    """Spearman's: the correlation of ranks, which are those among the drawn rows; nan if either does not vary."""
    of_x, of_y = _ranks(x), _ranks(y)
    return lambda weights: _correlation(weights, of_x(weights), of_y(weights))


def area(score: Array, label: Array) -> Statistic:
    """Chance that a row with label 1 has a higher score than one with label 0, of equal scores a half: the AUC.

    From the ranks, as the statistic of Mann and Whitney (1947); nan if either label is absent.
    """
    ranks = _ranks(score)

    def statistic(weights: Array) -> Array:
        positive, negative = weights @ label, weights @ (1 - label)
        wins = (weights * ranks(weights)) @ label - positive**2 / 2  # without those against other rows with label 1
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(positive * negative > 0, wins / (positive * negative), math.nan)

    return statistic


def kappa(first: Sequence[Hashable], second: Sequence[Hashable]) -> Statistic:
    """Cohen's kappa (1960), as statistics.kappa; nan if chance explains all."""
    names = [*dict.fromkeys([*first, *second])]
    a, b = (np.array([[name == value for name in names] for value in side], float) for side in (first, second))
    same = (a * b).sum(1)

    def statistic(weights: Array) -> Array:
        total = weights.sum(1)
        agreed, chance = weights @ same / total, ((weights @ a) * (weights @ b)).sum(1) / total**2
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(1 - chance > _TINY, (agreed - chance) / (1 - chance), math.nan)

    return statistic


def _correlation(weights: Array, x: Array, y: Array) -> Array:
    """Of x and y [rows] or [draws, rows] under weights [draws, rows]."""
    shares = weights / weights.sum(1, keepdims=True)
    x, y = (side - (shares * side).sum(1, keepdims=True) for side in (x, y))
    spread = (shares * x * x).sum(1) * (shares * y * y).sum(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(spread > _TINY, (shares * x * y).sum(1) / np.sqrt(spread), math.nan)


def _ranks(values: Array) -> Statistic:
    """The weight of lower values and half that of equal ones, by row, under weights: [draws, rows]."""
    _, begins, inverse = np.unique(values, return_index=True, return_inverse=True)
    order = np.argsort(values, kind="stable")
    begins = np.searchsorted(values[order], values[begins])

    def ranks(weights: Array) -> Array:
        equal = np.add.reduceat(weights[:, order], begins, axis=1)
        return (np.cumsum(equal, axis=1) - equal / 2)[:, inverse]

    return ranks


def _higher(first: float, second: float) -> str:
    return FIRST if first > second else SECOND if second > first else TIE


def _prefers_longer(pair: Preference, verdict: str) -> float:
    return 0.5 if verdict == TIE else float(verdict == _higher(*pair.lengths))


def _is_chance(values: Array) -> bool:
    return bool(((values >= 0) & (values <= 1)).all())


def _by_task(values: Iterable[tuple[str, float]]) -> dict[str, list[float]]:
    tasks: dict[str, list[float]] = {}
    for task, value in values:
        tasks.setdefault(task, []).append(float(value))
    return tasks


def _share(name: str, values: Sequence[tuple[str, float]]) -> Figure:
    tasks = _by_task(values)
    return Figure(name, statistics.mean(tasks.values()), len(values), len(tasks))


def _clustered(
    name: str, tasks: Sequence[str], statistic: Statistic | None, bounds: tuple[float, float] = (-1.0, 1.0)
) -> Figure:
    estimate = statistics.clustered(tasks, statistic, bounds) if statistic else Estimate(math.nan)
    return Figure(name, estimate, len(tasks), len(set(tasks)))


def _bin(rows: Sequence[Labeled]) -> Bin:
    scores, labels = _by_task((row.task, row.score) for row in rows), _by_task((row.task, row.label) for row in rows)
    return Bin(fmean(map(fmean, scores.values())), statistics.mean(labels.values()), len(rows), len(scores))
