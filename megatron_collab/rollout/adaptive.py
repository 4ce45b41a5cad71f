"""How many futures each trained turn of a group gets when their number follows the uncertainty of its reward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def allocate(values_GF: Sequence[Sequence[float]], extra: int, most: int) -> list[int]:
    """How many of `extra` futures each of G turns gets, given the rewards of those it has had.

    GRPO's advantage of turn i has the variance s_i^2 / F_i over its futures, so one more future removes
    s_i^2 / (F_i (F_i + 1)) of it; each goes where it removes most, until a turn has `most`. With few futures s_i^2 is
    itself uncertain: it is the sample variance shrunk towards the group's, which counts as one more degree of freedom
    (Neyman allocation with an estimated variance). Turns without a value get none; where nothing is uncertain the
    futures are spread evenly.
    """
    counts = np.array([len(values) for values in values_GF], dtype=np.int64)
    squares = np.array([float(np.sum((np.array(v) - np.mean(v)) ** 2)) if len(v) else 0.0 for v in values_GF])
    freedom = np.maximum(counts - 1, 0)
    pooled = squares.sum() / max(int(freedom.sum()), 1)
    variances = (squares + pooled) / (freedom + 1)
    given = np.zeros_like(counts)
    for _ in range(extra):
        has = counts + given
        open_to = (counts > 0) & (has < most)
        if not open_to.any():
            break
        # Second key: where all gains are equal, the turn with the fewest futures.
        gains = np.where(open_to, variances / (has * (has + 1.0) + (has == 0)), -1.0)
        best = np.lexsort((has, -gains))[0]
        given[best] += 1
    return [int(n) for n in given]
