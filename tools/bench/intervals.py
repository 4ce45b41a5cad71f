"""How often do the 95 % intervals of megatron_collab/statistics.py hold the true value?

`python tools/bench/intervals.py [--smoke]` draws data whose true value is known, 1,000 times each, and prints for each
kind of interval the share of draws whose interval holds it:

- percentile_N: the expanded percentile interval, and mean_N: the one that is recorded, of N independent units, from a
  normal and from an exponential distribution: the lower share. Both are the same from 5 units on.
- share_N: of a share of 0.6 with N conversations, one a task.
- seeds_S, seeds_share_S: of S training seeds with the same 120 tasks, whose seeds and tasks both differ; the lowest and
  the highest share over seeds that differ by 0, 0.5 and 2 times as much as the mean over drawn tasks.

--smoke: few draws.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from itertools import product

import numpy as np
from scipy import stats

from megatron_collab import statistics
from megatron_collab.statistics import Estimate

UNITS, SHARES, SEEDS, TASKS = (2, 3, 4, 5, 10, 30), (5, 20, 100), (2, 3, 5), 120
DIFFERING = (0.0, 0.5, 2.0)  # of seeds: see of_seeds
DISTRIBUTIONS = {"normal": 0.0, "exponential": 1.0}  # and their means

Draw = Callable[[np.random.Generator], Estimate]
Interval = Callable[[np.ndarray], Estimate]


def coverage(draw: Draw, true: float, draws: int) -> float:
    """The share of intervals that hold the true value."""
    rng = np.random.default_rng(0)
    estimates = [draw(rng) for _ in range(draws)]
    return sum(estimate.low <= true <= estimate.high for estimate in estimates) / draws


def values(distribution: str, units: int, rng: np.random.Generator) -> np.ndarray:
    return rng.normal(size=units) if distribution == "normal" else rng.exponential(size=units)


def percentile(sample: np.ndarray) -> Estimate:
    """The expanded percentile interval, also for few units."""
    n = len(sample)
    level = 2 * stats.norm.cdf(np.sqrt(n / (n - 1)) * stats.t.ppf(0.975, n - 1)) - 1
    result = stats.bootstrap((sample,), np.mean, confidence_level=level, n_resamples=2000, method="percentile", rng=0)
    return Estimate(float(sample.mean()), *map(float, result.confidence_interval))


def recorded(sample: np.ndarray) -> Estimate:
    return statistics.mean(sample[:, None])


def of_units(distribution: str, units: int, interval: Interval, rng: np.random.Generator) -> Estimate:
    return interval(values(distribution, units, rng))


def of_share(tasks: int, rng: np.random.Generator) -> Estimate:
    """An estimate of 0.6."""
    return recorded((rng.random(tasks) < 0.6).astype(float))


def of_seeds(seeds: int, differing: float, shares: bool, rng: np.random.Generator) -> Estimate:
    """An estimate of 0 (of 0.6 for shares): a value is that of its seed, of its task, and noise.

    `differing`: standard deviation of seeds, in standard errors of the mean of the drawn tasks.
    """
    tasks = rng.normal(size=TASKS)
    of_seed = differing * rng.normal(size=(seeds, 1)) / np.sqrt(TASKS)
    if not shares:
        scores = tasks + of_seed + 0.5 * rng.normal(size=(seeds, TASKS))
    else:  # a task is solved with the chance 0.6 on average, 0.3 to 0.9
        chances = 0.6 + 0.3 * (2 * stats.norm.cdf(tasks) - 1) + 0.49 * of_seed
        scores = (rng.random((seeds, TASKS)) < chances).astype(float)
    return statistics.mean_of_seeds([{str(task): [score] for task, score in enumerate(row)} for row in scores.tolist()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="few draws: shows that it runs")
    draws = 40 if parser.parse_args().smoke else 1000
    shares: dict[str, float] = {}

    def keep(name: str, share: float) -> None:
        shares[name] = round(share, 3)
        print(f"{name}: {share:.3f}", flush=True)

    intervals: dict[str, Interval] = {"percentile": percentile, "mean": recorded}
    for units, (name, interval) in product(UNITS, intervals.items()):
        shares_held = [
            coverage(partial(of_units, kind, units, interval), true, draws) for kind, true in DISTRIBUTIONS.items()
        ]
        keep(f"{name}_{units}", min(shares_held))
    for tasks in SHARES:
        keep(f"share_{tasks}", coverage(partial(of_share, tasks), 0.6, draws))
    for seeds, (name, true) in product(SEEDS, {"seeds": 0.0, "seeds_share": 0.6}.items()):
        shares_held = [coverage(partial(of_seeds, seeds, differing, true > 0), true, draws) for differing in DIFFERING]
        keep(f"{name}_{seeds}_lowest", min(shares_held))
        keep(f"{name}_{seeds}_highest", max(shares_held))
    print(json.dumps({"name": "intervals", "values": shares}))


if __name__ == "__main__":
    main()
