"""Means and differences with 95 % intervals. Every interval that the package prints or records is computed here.

A task is played by several conversations, which are not independent of one another: they are averaged first, and tasks
are the units that intervals are over. Shares (all values 0 or 1) have Wilson's interval (1927), which also exists if
all or none succeeded. If tasks have several conversations, its trials are the effective number of independent ones;
pass@k and pass^k have such an interval too. Other means have a bootstrap over tasks. scipy is imported only when it is
needed, since its import takes a second.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

import numpy as np

LEVEL = 0.95
_SIDE = (1 + LEVEL) / 2
_Z = NormalDist().inv_cdf(_SIDE)
_DRAWS = 2000  # bootstrap samples
_UPPER = 0.75  # confidence of the limit of the variance between seeds that gives degrees of freedom
_FEW = 5  # units; with fewer, percentiles of bootstrap samples are too close to the mean
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
    if is_share(values):
        return _of_shares(means, sum(map(len, values)))
    return Estimate(float(means.mean()), *(_of_means(means) if len(means) > 1 else ()))


def with_passes(name: str, tasks: Sequence[Sequence[float]]) -> dict[str, Estimate]:
    """By label, the mean `name` and, for a share with n samples a task, `name_pass@k` and `name_pass^k`.

    k = 2, 4, 8, … and n. Tasks with fewer than k values are left out of pass@k and pass^k. A trial of theirs is a group
    of k samples.
    """
    estimates = {name: mean(tasks)}
    most = max(map(len, tasks), default=0)
    if most > 1 and is_share(tasks):
        for k in sorted({*(1 << power for power in range(1, most.bit_length())), most}):
            counts = [(len(task), round(sum(task))) for task in tasks if len(task) >= k]
            groups = sum(samples // k for samples, _ in counts)
            for sign, chance in (("@", pass_at_k), ("^", pass_hat_k)):
                chances = np.array([chance(*count, k) for count in counts])
                estimates[f"{name}_pass{sign}{k}"] = _of_shares(chances, groups)
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


def unpaired_difference(first: Iterable[Sequence[float]], second: Iterable[Sequence[float]]) -> Estimate:
    """Mean of `second` less that of `first`, which have different tasks; each item has the values of a task.

    Of shares, Newcombe's interval for independent shares (1998, method 10), of Wilson's of both. Of others, the
    bootstrap of the tasks of both sides.
    """
    sides = [[np.asarray(task, float) for task in side if len(task)] for side in (first, second)]
    a, b = (mean(side) for side in sides)
    value = b.value - a.value
    if min(map(len, sides)) < 2:
        return Estimate(value)
    if is_share([*sides[0], *sides[1]]):
        low = value - math.hypot(b.value - b.low, a.high - a.value)
        return Estimate(value, low, value + math.hypot(b.high - b.value, a.value - a.low))
    before, after = (np.array([task.mean() for task in side]) for side in sides)
    if not np.ptp(before) and not np.ptp(after):
        return Estimate(value)
    return Estimate(value, *bootstrap([len(before), len(after)], lambda x, y: after[y].mean(-1) - before[x].mean(-1)))


def mean_of_seeds(seeds: Sequence[Tasks]) -> Estimate:
    """Mean over training seeds of the mean over the tasks of each; the interval is over seeds and tasks.

    Seeds may share their tasks, or each have its own. The variance is that of the seeds' means plus that of drawing the
    tasks. A shared task is drawn once for all seeds, since a hard task is hard for every seed (conservative: Owen 2007,
    0712.1111). If each seed has its own tasks, their draw counts twice, and an interval is up to 1.5 times too wide.
    Student's t has Satterthwaite's degrees of freedom (1946), which are few only if seeds differ. As two seeds may lie
    close by chance, they are those of the upper 75 % limit of the seeds' variance. Coverage: 93 to 99 % with 120 tasks
    (tools/bench/intervals.py). A single task gives no interval.
    """
    scored = [tasks for tasks in seeds if any(len(values) for values in tasks.values())]
    if len(scored) < 2:
        return mean([values for tasks in scored for values in tasks.values()])
    estimate = _over_seeds([{task: fmean(row) for task, row in tasks.items() if len(row)} for tasks in scored])
    if not is_share(values for tasks in scored for values in tasks.values()):
        return estimate
    if math.isnan(estimate.low) and estimate.value in (0, 1) and (number := len(set().union(*scored))) > 1:
        return Estimate(estimate.value, *wilson(estimate.value, number))
    return _of_chances(estimate)


def difference_of_seeds(first: Sequence[Tasks], second: Sequence[Tasks]) -> Estimate:
    """Like `difference`, of arms with several training seeds, in the same order: paired by task within a seed.

    The interval is over seeds and tasks, as that of `mean_of_seeds`. If these do not vary, shares have that of
    `difference`, of the conversations of all seeds.
    """
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if any(a[task] and b.get(task) for task in a)]
    if len(pairs) < 2:
        return difference(*pairs[0]) if pairs else Estimate(math.nan)
    estimate = _over_seeds(
        [{task: fmean(b[task]) - fmean(a[task]) for task in a if a[task] and b.get(task)} for a, b in pairs]
    )
    if math.isnan(estimate.low) and is_share(row for pair in pairs for tasks in pair for row in tasks.values()):
        shared = [[{task: side[task] for task in a if a[task] and b.get(task)} for side in (a, b)] for a, b in pairs]
        pooled = difference(*map(_of_all_seeds, zip(*shared, strict=True)))
        return pooled if math.isclose(pooled.value, estimate.value, abs_tol=1e-12) else estimate
    return estimate


def _of_all_seeds(seeds: Sequence[Tasks]) -> Tasks:
    names = dict.fromkeys(task for tasks in seeds for task in tasks)
    return {name: [value for tasks in seeds for value in tasks.get(name, ())] for name in names}


def _over_seeds(seeds: Sequence[Mapping[str, float]]) -> Estimate:
    """The mean of at least two seeds' means over tasks; no interval for a single task, nor if the variance is 0.

    It is 0 if all seeds have the same mean and all tasks too, as when each of two seeds solves a different one of two
    tasks.
    """
    from scipy import stats

    names = list(dict.fromkeys(task for tasks in seeds for task in tasks))
    values = np.array([[tasks.get(name, math.nan) for name in names] for tasks in seeds])
    means = np.nanmean(values, axis=1)
    value = float(means.mean())
    if len(names) < 2:
        return Estimate(value)
    counts = (~np.isnan(values)).sum(1, keepdims=True)
    influences = np.nansum((values - means[:, None]) / counts, axis=0) / len(means)  # of each task on the value
    of_seeds = float(means.var(ddof=1)) / len(means)
    of_tasks = float((influences**2).sum()) * len(names) / (len(names) - 1)
    variance = of_seeds + of_tasks
    if variance <= (1e-12 * float(np.nanmax(np.abs(values)))) ** 2:  # rounding
        return Estimate(value)
    upper = of_seeds * (len(means) - 1) / float(stats.chi2.ppf(1 - _UPPER, len(means) - 1))
    freedom = (upper + of_tasks) ** 2 / (upper**2 / (len(means) - 1) + of_tasks**2 / (len(names) - 1))
    width = float(stats.t.ppf(_SIDE, freedom)) * math.sqrt(variance)
    return Estimate(value, value - width, value + width)


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Sum of the numerators over that of the denominators, one pair per independent unit, by bootstrap."""
    a, b = np.asarray(numerators, float), np.asarray(denominators, float)
    value = float(a.sum() / b.sum())
    if len(a) < 2 or np.all(a * b[0] == b * a[0]):
        return Estimate(value)
    return Estimate(value, *bootstrap([len(a)], lambda units: a[units].sum(-1) / b[units].sum(-1)))


def sign_evidence(wins: int, losses: int) -> float:
    """Evidence against equal sides, an e-value: the sign test's likelihood ratio with the chance to win mixed over
    Beta(1/2, 1/2), which is B(wins + 1/2, losses + 1/2) / B(1/2, 1/2) * 2^(wins + losses).

    If both sides are equal, it ever reaches 1 / a with a probability of at most a, however often it is looked at and
    whenever one stops (Ville 1939; Robbins 1970, doi:10.1214/aoms/1177696786; Grunwald et al. 2024, 1906.07801).
    """
    return math.exp(min(_log_mixture(wins, losses) + (wins + losses) * math.log(2), 700.0))


def share_at_any_time(wins: int, losses: int) -> Estimate:
    """The share of wins, with an interval that has 95 % confidence at all times at once, so that one may peek.

    It has the chances p that the mixture of `sign_evidence` does not refute at 1 / 20 (Robbins 1970).
    """
    number = wins + losses
    if not number:
        return Estimate(math.nan)
    share, limit = wins / number, _log_mixture(wins, losses) + math.log(1 - LEVEL)

    def is_refuted(p: float) -> bool:
        likely = (wins * math.log(p) if wins else 0.0) + (losses * math.log1p(-p) if losses else 0.0)
        return likely < limit

    def end(inside: float, outside: float) -> float:
        for _ in range(50):
            middle = (inside + outside) / 2
            inside, outside = (inside, middle) if is_refuted(middle) else (middle, outside)
        return inside

    return Estimate(share, end(share, 0.0) if wins else 0.0, end(share, 1.0) if losses else 1.0)


def _log_mixture(wins: int, losses: int) -> float:
    """The logarithm of B(wins + 1/2, losses + 1/2) / B(1/2, 1/2)."""
    parts = math.lgamma(wins + 0.5) + math.lgamma(losses + 0.5) - math.lgamma(wins + losses + 1)
    return parts - math.log(math.pi)


def kappa(pairs: Sequence[tuple[str, str]]) -> float:
    """Agreement of two raters beyond chance (Cohen 1960), of the two verdicts on each item; nan if chance explains all.

    1: they always agree; 0: as often as by chance.
    """
    number = len(pairs)
    agreed = sum(a == b for a, b in pairs)
    counts = [Counter(side) for side in zip(*pairs, strict=True)] or [Counter()]
    chance = sum(counts[0][verdict] * counts[-1][verdict] for verdict in counts[0]) / max(number, 1)
    return (agreed - chance) / (number - chance) if chance < number else math.nan


def is_share(tasks: Iterable[Sequence[float]]) -> bool:
    """Whether all values are 0 or 1."""
    return all(value in (0, 1) for task in tasks for value in task)


def wilson(share: float, trials: float) -> tuple[float, float]:
    """Wilson's interval of a share of that many independent trials, which need not be a whole number."""
    shrink = 1 + _Z**2 / trials
    center = (share + _Z**2 / (2 * trials)) / shrink
    half = _Z / shrink * math.sqrt(share * (1 - share) / trials + (_Z / (2 * trials)) ** 2)
    return (0.0 if share == 0 else max(0.0, center - half)), (1.0 if share == 1 else min(1.0, center + half))


def bootstrap(sizes: Sequence[int], statistic: Callable[..., np.ndarray]) -> tuple[float, float]:
    """Expanded percentile interval of `statistic` of units that are drawn with replacement.

    `sizes`: number of units of each independent sample. `statistic` gets, for each sample, indices of drawn units
    [draws, size] and returns [draws]. A percentile interval is too narrow for few units, so its level is that of t with
    the sample's variance (Hesterberg 2015, 1411.5279, section 4.2.2). As no bootstrap mean exceeds the largest unit,
    fewer than 5 units have the interval of t itself, with the bootstrap's standard error. Draws have a fixed seed: the
    same data give the same interval.
    """
    from scipy import stats

    n, units = min(sizes), [np.arange(size) for size in sizes]
    deviations, level = _expanded(n)
    result = stats.bootstrap(
        units,
        lambda *drawn, axis: statistic(*drawn),
        n_resamples=_DRAWS,
        batch=max(1, _BATCH // max(sizes)),
        confidence_level=level,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    if n < _FEW:
        center, width = float(statistic(*(side[None] for side in units))[0]), deviations * result.standard_error
        return float(center - width), float(center + width)
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def clustered(
    tasks: Sequence[str], statistic: Callable[[np.ndarray], np.ndarray], bounds: tuple[float, float]
) -> Estimate:
    """A statistic of rows, between `bounds`, with the bootstrap interval of drawing whole tasks; `tasks`: of each row.

    `statistic` gets weights [draws, rows], how often the task of each row was drawn, and returns [draws], nan where it
    is undefined. The interval is that of `bootstrap`, over the draws that define it. There is none for fewer than two
    tasks, if all draws agree, or if more than a tenth of them are undefined.
    """
    value = float(statistic(np.ones((1, len(tasks))))[0]) if len(tasks) else math.nan
    names, codes = np.unique(np.asarray(tasks, object), return_inverse=True)
    number = len(names)
    if number < 2 or math.isnan(value):
        return Estimate(value)
    chance, size = np.random.default_rng(0), max(1, _BATCH // (4 * len(tasks)))  # statistics have copies
    drawn = []
    for begin in range(0, _DRAWS, size):
        draws = min(size, _DRAWS - begin)
        units = chance.integers(0, number, (draws, number)) + number * np.arange(draws)[:, None]
        counts = np.bincount(units.ravel(), minlength=draws * number).reshape(draws, number)
        drawn.append(statistic(counts[:, codes].astype(float)))
    values = np.concatenate(drawn)
    values = values[~np.isnan(values)]
    if len(values) < 0.9 * _DRAWS or np.ptp(values) <= 1e-12:
        return Estimate(value)
    deviations, level = _expanded(number)
    if number < _FEW:
        width = deviations * float(values.std(ddof=1))
        ends = np.array([value - width, value + width])
    else:
        ends = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    low, high = np.clip(ends, *bounds)
    return Estimate(value, float(low), float(high))


def _expanded(number: int) -> tuple[float, float]:
    """Standard errors to either side for so many units, and the level of a percentile interval that is as wide."""
    from scipy import stats

    deviations = math.sqrt(number / (number - 1)) * float(stats.t.ppf(_SIDE, number - 1))
    return deviations, float(2 * stats.norm.cdf(deviations) - 1)


def _of_chances(estimate: Estimate) -> Estimate:
    """The estimate of a probability, whose interval ends at 0 and 1."""
    low, high = np.clip((estimate.low, estimate.high), 0.0, 1.0)
    return Estimate(estimate.value, float(low), float(high))


def _of_means(means: np.ndarray) -> tuple[float, float]:
    """The bootstrap interval of the mean of independent values; nan if all are equal, as they determine none."""
    if np.ptp(means) <= 1e-12 * np.abs(means).max():
        return math.nan, math.nan
    return bootstrap([len(means)], lambda units: means[units].mean(-1))


def _of_shares(shares: np.ndarray, trials: int) -> Estimate:
    """The mean of the tasks' shares, each of one trial or more, with Wilson's interval; none for fewer than two."""
    value = float(shares.mean())
    return Estimate(value, *(wilson(value, _independent(shares, trials)) if len(shares) > 1 else ()))


def _independent(shares: np.ndarray, trials: int) -> float:
    """The number of independent trials with the variance that the mean of the tasks' shares has.

    As in surveys (Korn and Graubard 1998): p (1 - p) / variance, less for few tasks, whose variance is uncertain: by
    the square of the ratio of normal and Student's quantiles. At most the trials, and at least the tasks, as if trials
    of a task always agreed; so many if all failed or all succeeded, since they may then have agreed.
    """
    number, p, variance = len(shares), float(shares.mean()), float(shares.var(ddof=1)) / len(shares)
    if trials == number or p in (0, 1):
        return float(number)
    if not variance:
        return float(trials)
    from scipy import stats

    shrink = (_Z / float(stats.t.ppf(_SIDE, number - 1))) ** 2
    return max(number, min(p * (1 - p) / variance * shrink, trials))
