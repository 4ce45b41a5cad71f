"""The order in which a run takes rows from its sources: a function of (run.seed, position), so no cursor is saved.

Position p is the p-th row of the run: step * train.prompts_per_step + its index in the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from megatron_collab.data.sources import TrainingSource
from megatron_collab.settings import require

_WINDOW = 1024  # positions computed together


class Pick(NamedTuple):
    """A row: number `row` of the source number `source`."""

    source: int
    row: int


class _Phase(NamedTuple):
    """Positions [begin, end), taken from the sources `active`; `offsets`: rows of each source taken before."""

    begin: int
    end: int | None
    active: tuple[int, ...]
    offsets: tuple[int, ...]


class Mixture:
    """Maps positions of the run to rows of its sources.

    At every position, the rows taken from each active source match its share to within one row. An epoch takes every
    row of a source once: in an order drawn from the seed, or sorted by the sort keys if there are any, with ties in
    that order.
    """

    def __init__(
        self,
        sources: Sequence[TrainingSource],
        counts: Sequence[int],
        per_step: int,
        keys: Sequence[np.ndarray | None] = (),
    ) -> None:
        """`counts`: rows of each source; `per_step`: rows of a step; `keys`: sort keys of each source, or None.

        Raises ConfigError if only some sources have `epochs`.
        """
        self._counts, self._keys = tuple(counts), tuple(keys) or (None,) * len(counts)
        epochs = [source.epochs for source in sources]
        message = "of several sources all have epochs or none has; set it for every source, or use weight alone"
        require(None not in epochs or not any(epochs), f"data.train: {message}")
        self._shares = [
            source.weight if source.epochs is None else source.epochs * count
            for source, count in zip(sources, counts, strict=True)
        ]
        self.epoch_rows = float(sum(counts) if None in epochs else sum(self._shares))  # of a pass over all sources
        self._phases = self._phases_of(sources, per_step)
        self._order = lru_cache(maxsize=16)(self._epoch_order)

    def place(self, position: int, seed: int) -> Pick:
        """The row at `position`. The step of the position must not be empty."""
        phase = next(phase for phase in self._phases if phase.end is None or position < phase.end)
        source, draw = self._draw(phase, position - phase.begin)
        epoch, at = divmod(draw + phase.offsets[source], self._counts[source])
        return Pick(source, int(self._order(source, seed, epoch)[at]))

    def empty_step(self, steps: int, per_step: int) -> int | None:
        """The first of `steps` steps in which no source is active, or None."""
        gaps = [phase.begin for phase in self._phases if not phase.active]
        return next((begin // per_step for begin in gaps if begin < steps * per_step), None)

    def _draw(self, phase: _Phase, at: int) -> tuple[int, int]:
        """The source of row `at` of a phase, and how many rows the phase took from that source before."""
        if len(phase.active) == 1:
            return phase.active[0], at
        begin = at - at % _WINDOW
        source, draw = interleaved(tuple(self._shares[number] for number in phase.active), begin, begin + _WINDOW)
        return phase.active[source[at - begin]], int(draw[at - begin])

    def _epoch_order(self, source: int, seed: int, epoch: int) -> np.ndarray:
        order = np.random.default_rng((seed, epoch, source) if source else (seed, epoch)).permutation(
            self._counts[source]
        )
        keys = self._keys[source]
        return order if keys is None else order[np.argsort(keys[order], kind="stable")]

    def _phases_of(self, sources: Sequence[TrainingSource], per_step: int) -> list[_Phase]:
        edges = {0, *(source.from_step for source in sources)}
        begins = sorted(edges | {source.until_step for source in sources if source.until_step is not None})
        phases, offsets = list[_Phase](), (0,) * len(sources)
        for number, step in enumerate(begins):
            active = tuple(
                at
                for at, source in enumerate(sources)
                if source.from_step <= step and (source.until_step is None or step < source.until_step)
            )
            last = number + 1 == len(begins)
            end = None if last else begins[number + 1] * per_step
            phases.append(_Phase(step * per_step, end, active, offsets))
            if end is not None and active:
                shares = tuple(self._shares[at] for at in active)
                more = dict(zip(active, counts_before(shares, end - step * per_step), strict=True))
                offsets = tuple(before + more.get(at, 0) for at, before in enumerate(offsets))
        return phases


@lru_cache(maxsize=64)
def interleaved(shares: tuple[float, ...], begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """The source of each position in [begin, end), and how many earlier positions that source has.

    The k-th row of source i with share s_i of the sum comes at time (k + 1/2) / s_i, k = 0, 1, …
    """
    before, source, draw = _around(shares, begin, end)
    here = slice(begin - before.sum(), end - before.sum())
    return source[here], draw[here]


def counts_before(shares: tuple[float, ...], position: int) -> list[int]:
    """The number of positions of each source before `position`."""
    before, source, _ = _around(shares, position, position)
    near = source[: position - before.sum()]
    return (before + np.bincount(near, minlength=len(shares))).tolist()


def _around(shares: tuple[float, ...], begin: int, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Source and row number of the rows from somewhat before `begin` to somewhat after `end`, in order, and the number
    of earlier rows of each source.

    Of m sources at most t + m / 2 rows have a time (k + 1/2) / s_i of up to t, and at least t - m / 2.
    """
    fractions = np.array(shares) / sum(shares)
    before = np.maximum(((begin - len(shares)) * fractions).astype(np.int64) - 1, 0)
    stops = ((end + len(shares)) * fractions).astype(np.int64) + 2
    draws = [np.arange(first, stop) for first, stop in zip(before, stops, strict=True)]
    times = np.concatenate([(draw + 0.5) / fraction for draw, fraction in zip(draws, fractions, strict=True)])
    source: np.ndarray = np.repeat(np.arange(len(shares)), [len(draw) for draw in draws])
    order = np.lexsort((source, times))
    return before, source[order], np.concatenate(draws)[order]
