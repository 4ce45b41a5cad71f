"""How full micro-batches are, how balanced the ranks' work is, and how long planning takes.

`python tools/bench/packing.py [--seeds 0 1 2 3 4]`: 4,096 samples, at most 8,192 positions a micro-batch. Lengths are
lognormal, rounded and clipped to [16, 8192]: `exp(6.0 + 0.8 z)`, median 403, as in conversations of a few turns; and
harder, `exp(7.8 + 0.6 z)`, median 2,441, of which few sequences fit into a micro-batch.

    fill_over_bound = ceil(sum of lengths / 8192) / micro-batches, on one rank: 1 if no plan needs fewer;
    ms = CPU milliseconds of one plan for one rank, the median of 21;
    rank_cost_over_mean = the work of the busiest of 8 ranks (`prefix_tree.cost`) / the mean, in plans for 8 ranks with
                          multiples of 4 micro-batches each.

Over the seeds: the worst fill and balance, the median time. `hard_…` are those of the harder lengths. --smoke: one
seed of 512 samples. The last line is one JSON object.
"""
# ruff: noqa: E402 (patches come before Megatron-Core)

from __future__ import annotations

import argparse
import json
import math
import time
from statistics import median

import numpy as np

from megatron_collab import patches

patches.apply("megatron")

from megatron_collab.trainer import microbatches, prefix_tree

SAMPLES, SMOKE_SAMPLES = 4096, 512
BUDGET, SHORTEST = 8192, 16
RANKS, MULTIPLE_OF, REPEATS = 8, 4, 21
DISTRIBUTIONS = {"": (6.0, 0.8), "hard_": (7.8, 0.6)}  # mean and standard deviation of the logarithm


def lengths_of(seed: int, mean: float, sigma: float, samples: int) -> list[int]:
    drawn = np.random.default_rng(seed).lognormal(mean, sigma, samples)
    return np.clip(drawn.round(), SHORTEST, BUDGET).astype(int).tolist()


def measure(lengths: list[int]) -> tuple[float, float, float]:
    """Fill over the bound, CPU milliseconds, cost of the busiest rank over the mean."""
    times = []
    for _ in range(REPEATS):
        began = time.process_time()
        alone = microbatches.pack(lengths, 1, BUDGET)
        times.append(1e3 * (time.process_time() - began))
    fill = math.ceil(sum(lengths) / BUDGET) / len(alone[0])
    costs = prefix_tree.cost(np.array(lengths))
    dealt = microbatches.pack(lengths, RANKS, BUDGET, multiple_of=MULTIPLE_OF)
    totals = [sum(costs[index] for micro_batch in rank for index in micro_batch) for rank in dealt]
    return fill, median(times), max(totals) / (sum(totals) / RANKS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--smoke", action="store_true", help="one seed of few samples: shows that it runs, no figures")
    arguments = parser.parse_args()
    seeds, samples = (arguments.seeds[:1], SMOKE_SAMPLES) if arguments.smoke else (arguments.seeds, SAMPLES)
    values: dict[str, float] = {}
    for name, (mean, sigma) in DISTRIBUTIONS.items():
        results = [measure(lengths_of(seed, mean, sigma, samples)) for seed in seeds]
        fills, times, balances = zip(*results, strict=True)
        values |= {
            f"{name}fill_over_bound": min(fills),
            f"{name}ms": median(times),
            f"{name}rank_cost_over_mean": max(balances),
        }
    print(json.dumps({"name": "packing", "values": {name: round(value, 4) for name, value in values.items()}}))


if __name__ == "__main__":
    main()
