"""Pairs of scored candidates: of each prompt of a conversation the best against the worst."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from megatron_collab.data.examples import Examples
from megatron_collab.data.formats import FORMATS
from megatron_collab.data.pairs import Pair
from megatron_collab.data.readers import Unfit
from megatron_collab.data.survey import candidates_of


class Extremes(NamedTuple):
    """Of the candidates of a prompt: the numbers of the rows of the first of the best and the first of the worst."""

    best: int
    worst: int
    scores: tuple[float, float]


def extremes(examples: Examples[Any]) -> Iterator[Extremes]:
    """Of every prompt, in the order of the rows; best and worst are the same row where there is one candidate."""
    turns: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for number, candidate, prompt in candidates_of(examples, FORMATS[examples.format]):
        turns.setdefault((candidate.conversation, prompt), []).append((number, candidate.score))
    for scored in turns.values():
        best, worst = max(scored, key=lambda one: one[1]), min(scored, key=lambda one: one[1])
        yield Extremes(best[0], worst[0], (best[1], worst[1]))


def pair_of(best: Any, worst: Any, scores: tuple[float, float]) -> Pair:
    """The pair of two conversations that differ in their last message."""
    return Pair(best[:-1], best[-1:], worst[-1:], scores)


def paired(examples: Examples[Any]) -> Examples[Pair]:
    """The pairs of a source of candidates."""
    found = list(extremes(examples))

    def read(row: tuple[Any, Any], number: int) -> Pair:
        one = found[number]
        if one.scores[0] == one.scores[1]:
            raise Unfit("whose candidates are not better and worse")
        best, worst = (examples.read(side, at) for side, at in zip(row, one[:2], strict=True))
        return pair_of(best, worst, one.scores)

    def at(number: int) -> str:
        return examples.at(found[number].best)

    why = f"{examples.why}, best against worst of {len(examples.rows)} candidates"
    rows = _Rows(examples.rows, found)
    return Examples(examples.source, rows, read, at, "pair", examples.format, why, examples.splits, distinct=True)


class _Rows(Sequence[Any]):
    """The rows of best and worst."""

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
