"""Pairs of scored candidates: the best against the worst candidate of each prompt of a conversation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from megatron_collab.data.examples import Examples
from megatron_collab.data.formats import FORMATS
from megatron_collab.data.messages import Unfit
from megatron_collab.data.pairs import Pair
from megatron_collab.data.survey import candidates_of


class Extremes(NamedTuple):
    """Row numbers of the first best and the first worst candidate of a prompt, and their scores."""

    best: int
    worst: int
    scores: tuple[float, float]


def extremes(examples: Examples[Any]) -> Iterator[Extremes]:
    """One entry per prompt, in the order of the rows. A single candidate is both best and worst."""
    turns: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for number, candidate, prompt in candidates_of(examples, FORMATS[examples.format]):
        turns.setdefault((candidate.conversation, prompt), []).append((number, candidate.score))
    for candidates in turns.values():
        best, worst = max(candidates, key=lambda entry: entry[1]), min(candidates, key=lambda entry: entry[1])
        yield Extremes(best[0], worst[0], (best[1], worst[1]))


def pair_of(best: Any, worst: Any, scores: tuple[float, float]) -> Pair:
    """The pair of two conversations that differ in their last message only."""
    return Pair(best[:-1], best[-1:], worst[-1:], scores)


def pairs_of_candidates(examples: Examples[Any]) -> Examples[Pair]:
    """The pairs of a source of scored candidates."""
    best_and_worst = list(extremes(examples))

    def read(row: tuple[Any, Any], number: int) -> Pair:
        extreme = best_and_worst[number]
        if extreme.scores[0] == extreme.scores[1]:
            raise Unfit("whose candidates all have the same score")
        best, worst = (examples.read(side, row_number) for side, row_number in zip(row, extreme[:2], strict=True))
        return pair_of(best, worst, extreme.scores)

    def at(number: int) -> str:
        return examples.at(best_and_worst[number].best)

    why = f"{examples.why}, best against worst of {len(examples.rows)} candidates"
    rows = _Rows(examples.rows, best_and_worst)
    return Examples(examples.source, rows, read, at, "pair", examples.format, why, examples.splits, distinct=True)


class _Rows(Sequence[Any]):
    """One row per pair: the rows of its best and its worst candidate."""

    def __init__(self, rows: Any, extremes: Sequence[Extremes]) -> None:
        self._rows, self._extremes = rows, extremes
        self.column_names = getattr(rows, "column_names", [])
        fingerprint = getattr(rows, "fingerprint", None)
        self.fingerprint = fingerprint and ["pairs", *fingerprint]

    def __len__(self) -> int:
        return len(self._extremes)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        best, worst, _ = self._extremes[index]
        return self._rows[best], self._rows[worst]
