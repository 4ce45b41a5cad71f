"""How often do the 95 % intervals of megatron_collab/statistics.py hold the true value?

`python tools/bench/intervals.py [--smoke]` draws data whose true value is known, 1,000 times each, and prints for each
kind of interval the share of draws whose interval holds it:

- percentile_N: the expanded percentile interval, and mean_N: the one that is recorded, of N independent units, from a
  normal and from an exponential distribution: the lower share. Both are the same from 5 units on.
- share_N: of a share of 0.6 with N conversations, one a task.
- clustered_N, pass_at_N, pass_hat_N: of a share with 8 conversations for each of N tasks, which differ, and of pass@4
  and pass^4; the lowest share over chances of 0.5 and 0.9 that differ little and much.
- seeds_S, seeds_own_S, seeds_share_S: of S training seeds with the same 120 tasks or 120 of their own, whose seeds and
  tasks both differ; the lowest and the highest share over seeds that differ by 0 to 5 times as much as the mean over
  drawn tasks.

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

UNITS, SHARES, SEEDS, TASKS = (2, 3, 4, 5, 10, 30), (5, 20, 100), (2, 3, 4, 5, 7), 120
CLUSTERS, CONVERSATIONS, GROUP = (3, 5, 10, 20), 8, 4
CHANCES = ((0.25, 0.25), (2.0, 2.0), (0.45, 0.05), (3.6, 0.4))  # of a task: parameters of beta distributions
DIFFERING = (0.0, 0.5, 1.0, 2.0, 3.0, 5.0)  # of seeds: see of_seeds
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


def of_clusters(name: str, tasks: int, chances: tuple[float, float], rng: np.random.Generator) -> Estimate:
    successes = rng.random((tasks, CONVERSATIONS)) < rng.beta(*chances, (tasks, 1))
    names = {"clustered": "x", "pass_at": f"x_pass@{GROUP}", "pass_hat": f"x_pass^{GROUP}"}
    return statistics.with_passes("x", successes.astype(float).tolist())[names[name]]


def true_share(name: str, chances: tuple[float, float]) -> float:
    """What `of_clusters` estimates."""
    chance = stats.beta(*chances)
    if name == "clustered":
        return float(chance.mean())
    return float(chance.moment(GROUP)) if name == "pass_hat" else 1 - float(stats.beta(*chances[::-1]).moment(GROUP))


def of_seeds(name: str, seeds: int, differing: float, rng: np.random.Generator) -> Estimate:
    """An estimate of 0 (of 0.6 for shares): a value is that of its seed, of its task, and noise.

    `differing`: standard deviation of seeds, in standard errors of the mean of the drawn tasks.
    """
    tasks = rng.normal(size=(seeds if name == "seeds_own" else 1, TASKS))
    of_seed = differing * rng.normal(size=(seeds, 1)) / np.sqrt(TASKS)
    if name != "seeds_share":
        scores = tasks + of_seed + 0.5 * rng.normal(size=(seeds, TASKS))
    else:  # a task is solved with the chance 0.6 on average, 0.3 to 0.9
        chances = 0.6 + 0.3 * (2 * stats.norm.cdf(tasks) - 1) + 0.49 * of_seed
        scores = (rng.random((seeds, TASKS)) < chances).astype(float)
    draw = [seed if name == "seeds_own" else 0 for seed in range(seeds)]
    return statistics.mean_of_seeds(
        [
            {f"{draw[seed]}-{task}": [score] for task, score in enumerate(row)}
            for seed, row in enumerate(scores.tolist())
        ]
    )


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
    for tasks, name in product(CLUSTERS, ("clustered", "pass_at", "pass_hat")):
        shares_held = [
            coverage(partial(of_clusters, name, tasks, chances), true_share(name, chances), draws)
            for chances in CHANCES
        ]
        keep(f"{name}_{tasks}", min(shares_held))
    for seeds, (name, true) in product(SEEDS, {"seeds": 0.0, "seeds_own": 0.0, "seeds_share": 0.6}.items()):
        shares_held = [coverage(partial(of_seeds, name, seeds, differing), true, draws) for differing in DIFFERING]
        keep(f"{name}_{seeds}_lowest", min(shares_held))
        keep(f"{name}_{seeds}_highest", max(shares_held))
    print(json.dumps({"name": "intervals", "values": shares}))


if __name__ == "__main__":
    main()
