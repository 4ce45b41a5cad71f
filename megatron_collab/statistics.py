"""Means and differences with 95 % intervals. Every interval that the package prints or records is computed here.

A task is played by several conversations, which are not independent of one another: they are averaged first, and tasks
are the units that intervals are over. Shares (all values 0 or 1) have Wilson's interval (1927), for several
conversations a task with the effective number of independent ones, which also is an interval where nothing or all
succeeded. Other means have a bootstrap over tasks. scipy is imported when it is needed, which takes a second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

LEVEL = 0.95
_SIDE = (1 + LEVEL) / 2
_Z = NormalDist().inv_cdf(_SIDE)
_DRAWS = 2000  # bootstrap samples
_FEW = 5  # units, below which percentiles of bootstrap samples end too soon
_BATCH = 1 << 22  # values of bootstrap samples that are in memory at once

Tasks = Mapping[str, Sequence[float]]  # by task, a value of each of its conversations


@dataclass(frozen=True)
class Estimate:
    """`value` and its 95 % interval; `low` and `high` are nan if the data determine none."""

    value: float
    low: float = math.nan
    high: float = math.nan

    def scaled(self, factor: float, offset: float = 0.0) -> Estimate:
        """factor * value + offset, with its interval."""
        value, *ends = (factor * number + offset for number in (self.value, self.low, self.high))
        low, high = ends if factor >= 0 else ends[::-1]
        return Estimate(value, low, high)

    def metrics(self, kind: str, name: str = "") -> dict[str, float]:
        """As metrics of an evaluation: KIND/NAME, KIND_low/NAME and KIND_high/NAME; without NAME if it is empty."""
        path = f"/{name}" if name else ""
        return {f"{kind}{path}": self.value, f"{kind}_low{path}": self.low, f"{kind}_high{path}": self.high}

    def text(self, number: Callable[[float], str] = "{:.3f}".format) -> str:
        """As `0.500 [0.299, 0.701]`; without the interval if there is none, a dash if there is no value."""
        if math.isnan(self.value):
            return "\u2013"
        interval = "" if math.isnan(self.low) else f" [{number(self.low)}, {number(self.high)}]"
        return number(self.value) + interval


def mean(tasks: Iterable[Sequence[float]]) -> Estimate:
    """Mean over tasks of the mean of each task's values; tasks without a value are left out.

    There is no interval for fewer than two tasks, nor if all tasks have the same value and it is no share.
    """
    values = [np.asarray(task, float) for task in tasks if len(task)]
    if not values:
        return Estimate(math.nan)
    means = np.array([task.mean() for task in values])
    value = float(means.mean())
    if len(means) < 2:
        return Estimate(value)
    if is_share(values):
        return Estimate(value, *wilson(value, _independent(means, sum(map(len, values)))))
    return Estimate(value, *_of_means(means))


def with_passes(name: str, tasks: Sequence[Sequence[float]]) -> dict[str, Estimate]:
    """By label, the mean `name` and, for a share with n samples a task, `name_pass@k` and `name_pass^k`.

    k = 2, 4, 8, … and n. Tasks with fewer than k values are left out of pass@k and pass^k.
    """
    estimates = {name: mean(tasks)}
    most = max(map(len, tasks), default=0)
    if most > 1 and is_share(tasks):
        for k in sorted({*(1 << power for power in range(1, most.bit_length())), most}):
            counts = [(len(task), round(sum(task))) for task in tasks if len(task) >= k]
            estimates[f"{name}_pass@{k}"] = _of_chances(mean([[pass_at_k(*count, k)] for count in counts]))
            estimates[f"{name}_pass^{k}"] = _of_chances(mean([[pass_hat_k(*count, k)] for count in counts]))
    return estimates


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """Probability that one of k samples succeeds: 1 - C(n-c, k) / C(n, k), unbiased (Chen et al. 2021, 2107.03374)."""
    return 1 - math.comb(samples - successes, k) / math.comb(samples, k)


def pass_hat_k(samples: int, successes: int, k: int) -> float:
    """Probability that all of k samples succeed: C(c, k) / C(n, k), unbiased (tau-bench, 2406.12045)."""
    return math.comb(successes, k) / math.comb(samples, k)


def difference(first: Tasks, second: Tasks) -> Estimate:
    """Mean of `second` less that of `first`, paired: over the tasks that have values in both.

    Of shares, Newcombe's interval for paired shares (1998, method 10): those of both, with the correlation of the
    tasks' means, corrected for continuity. Of others, the bootstrap of the tasks' differences.
    """
    shared = [task for task in first if len(first[task]) and len(second.get(task, ()))]
    pairs = [[np.asarray(side[task], float) for task in shared] for side in (first, second)]
    if not shared:
        return Estimate(math.nan)
    a, b = (np.array([task.mean() for task in side]) for side in pairs)
    value = float(b.mean() - a.mean())
    if len(shared) < 2:
        return Estimate(value)
    if not is_share([*pairs[0], *pairs[1]]):
        return Estimate(value, *_of_means(b - a))
    before, after = map(mean, pairs)
    covariance = float(((a - a.mean()) * (b - b.mean())).mean())
    if covariance > 0:
        covariance = max(covariance - 0.5 / len(shared), 0.0)
    spread = float(a.std() * b.std())
    r = max(-1.0, covariance / spread) if spread else 0.0

    def width(x: float, y: float) -> float:
        return math.sqrt(max(x * x - 2 * r * x * y + y * y, 0.0))

    low = value - width(after.value - after.low, before.high - before.value)
    return Estimate(value, low, value + width(after.high - after.value, before.value - before.low))


def mean_of_seeds(seeds: Sequence[Tasks]) -> Estimate:
    """Mean over training seeds of the mean over the tasks of each; the interval is over seeds and tasks.

    Hierarchical bootstrap: seeds are drawn, and of each the tasks, the same ones for seeds that share tasks, since a
    hard task is hard for every seed (Owen 2007, 0712.1111). A few seeds give a wide interval, a single task gives none.
    """
    names = list(dict.fromkeys(task for tasks in seeds for task, values in tasks.items() if len(values)))
    scored = [tasks for tasks in seeds if any(len(values) for values in tasks.values())]
    if len(scored) < 2:
        return mean([values for tasks in scored for values in tasks.values()])
    means = np.full((len(scored), len(names)), math.nan)
    for row, tasks in zip(means, scored, strict=True):
        row[:] = [np.mean(tasks[name]) if len(tasks.get(name, ())) else math.nan for name in names]
    value = float(np.nanmean(means, axis=1).mean())
    if len(names) < 2:
        return Estimate(value)
    if np.nanmin(means) == np.nanmax(means):
        return Estimate(value, *wilson(value, len(names))) if value in (0, 1) else Estimate(value)

    def statistic(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        drawn = means[rows[..., :, None], columns[..., None, :]]
        played = ~np.isnan(drawn)
        totals, counts = np.where(played, drawn, 0.0).sum(-1), played.sum(-1)
        weights = counts > 0  # a seed none of whose tasks was drawn
        return (totals / np.maximum(counts, 1)).sum(-1) / np.maximum(weights.sum(-1), 1)

    estimate = Estimate(value, *bootstrap(means.shape, statistic, scale=math.prod(means.shape)))
    return _of_chances(estimate) if is_share(values for tasks in scored for values in tasks.values()) else estimate


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Sum of the numerators over that of the denominators, one pair per independent unit, by bootstrap."""
    a, b = np.asarray(numerators, float), np.asarray(denominators, float)
    value = float(a.sum() / b.sum())
    if len(a) < 2 or np.all(a * b[0] == b * a[0]):
        return Estimate(value)
    return Estimate(value, *bootstrap([len(a)], lambda units: a[units].sum(-1) / b[units].sum(-1)))


def is_share(tasks: Iterable[Sequence[float]]) -> bool:
    """Whether all values are 0 or 1."""
    return all(value in (0, 1) for task in tasks for value in task)


def wilson(share: float, trials: float) -> tuple[float, float]:
    """Wilson's interval of a share of that many independent trials, which need not be a whole number."""
    shrink = 1 + _Z**2 / trials
    center = (share + _Z**2 / (2 * trials)) / shrink
    half = _Z / shrink * math.sqrt(share * (1 - share) / trials + (_Z / (2 * trials)) ** 2)
    return (0.0 if share == 0 else max(0.0, center - half)), (1.0 if share == 1 else min(1.0, center + half))


def bootstrap(sizes: Sequence[int], statistic: Callable[..., np.ndarray], scale: int = 0) -> tuple[float, float]:
    """Expanded percentile interval of `statistic` of units that are drawn with replacement.

    `sizes`: number of units of each independent sample. `statistic` gets, for each sample, indices of drawn units
    [draws, size] and returns [draws]. `scale`: values that it needs for a draw, if more than the indices. A percentile
    interval is too narrow for few units, so its level is that of t with the sample's variance (Hesterberg 2015,
    1411.5279, section 4.2.2). No sample exceeds the largest unit, so that of fewer than 5 units is that of t itself
    with the bootstrap's standard error. Draws have a fixed seed: the same data give the same interval.
    """
    from scipy import stats

    n, units = min(sizes), [np.arange(size) for size in sizes]
    deviations = math.sqrt(n / (n - 1)) * stats.t.ppf(_SIDE, n - 1)
    result = stats.bootstrap(
        units,
        lambda *drawn, axis: statistic(*drawn),
        n_resamples=_DRAWS,
        batch=max(1, _BATCH // max(*sizes, scale)),
        confidence_level=2 * stats.norm.cdf(deviations) - 1,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    if n < _FEW:
        center, width = float(statistic(*(side[None] for side in units))[0]), deviations * result.standard_error
        return float(center - width), float(center + width)
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def _of_chances(estimate: Estimate) -> Estimate:
    """With an interval that ends at 0 and 1."""
    low, high = np.clip((estimate.low, estimate.high), 0.0, 1.0)
    return Estimate(estimate.value, float(low), float(high))


def _of_means(means: np.ndarray) -> tuple[float, float]:
    """The bootstrap interval of the mean of independent values; nan if all are the same, which says nothing of it."""
    if np.ptp(means) <= 1e-12 * np.abs(means).max():
        return math.nan, math.nan
    return bootstrap([len(means)], lambda units: means[units].mean(-1))


def _independent(means: np.ndarray, conversations: int) -> float:
    """The number of independent trials with the variance that the mean of the tasks' shares has.

    As in surveys (Korn and Graubard 1998): p (1 - p) / variance, at most the number of conversations. With one
    conversation a task it is the number of tasks; also where all failed or all succeeded, since conversations of a task
    may then have agreed.
    """
    p, variance = float(means.mean()), float(means.var()) / len(means)
    if p in (0, 1):
        return float(len(means))
    return min(p * (1 - p) / variance, conversations) if variance else float(conversations)
