"""What was counted beside what `doctor --plan` says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_collab.planning.memory import GIB, MemoryPart
from megatron_collab.planning.rehearsal.ledger import PASSING
from megatron_collab.planning.rehearsal.rank import GATHERED, WORKSPACES
from megatron_collab.planning.rehearsal.run import Rehearsed

_PHASES = ("training", "sampling", "host")
_NOTHING = 1 << 20  # bytes: what is less is not compared
_NOT_PLANNED = {PASSING, GATHERED, WORKSPACES}  # see planning/memory.py


@dataclass(frozen=True)
class Comparison:
    """A part in a phase of a class of ranks, in bytes; `counted` or `planned` is 0 where only the other has it."""

    part: str
    phase: str
    planned: float
    counted: float

    @property
    def ratio(self) -> float | None:
        """Planned over counted; None where neither is worth it, or no plan has it."""
        if self.part in _NOT_PLANNED or max(self.planned, self.counted) < _NOTHING:
            return None
        return self.planned / max(self.counted, 1.0)


def lines(planned: Sequence[MemoryPart], counted: Sequence[MemoryPart]) -> Iterator[Comparison]:
    """Every part of either in every phase."""
    plan, found = ({part.name: part for part in parts} for parts in (planned, counted))
    for name in [*plan, *(name for name in found if name not in plan)]:
        for phase in _PHASES:
            yield Comparison(name, phase, getattr(plan.get(name), phase, 0.0), getattr(found.get(name), phase, 0.0))


def ratios(every: Iterable[tuple[Rehearsed, Sequence[MemoryPart]]]) -> list[float]:
    """Planned over counted, of every part of every class."""
    found = (line.ratio for one, planned in every for line in lines(planned, one.parts))
    return [ratio for ratio in found if ratio is not None]


def table(one: Rehearsed, planned: Sequence[MemoryPart]) -> str:
    """A class of ranks: its parts in GiB, counted and planned."""
    title = f"{_spans(one.ranks)} (stage {one.kind.stage})"
    rows = [f"{title:34}{'training':>18}{'sampling':>18}{'host':>18}"]
    rows += [f"{'GiB':34}" + f"{'counted':>9}{'plan':>9}" * len(_PHASES)]
    names = dict.fromkeys(line.part for line in lines(planned, one.parts))
    cells = {(line.part, line.phase): line for line in lines(planned, one.parts)}
    for name in names:
        row = [cells[name, phase] for phase in _PHASES]
        rows.append(f"{name:34}" + "".join(f"{cell.counted / GIB:9.2f}{cell.planned / GIB:9.2f}" for cell in row))
    rows.append(
        f"{'most at once in a step':34}{one.peak / GIB:9.2f}; a checkpoint takes {one.snapshot / GIB:.2f} of the host"
    )
    return "\n".join(rows)


def _spans(ranks: Sequence[int]) -> str:
    """0-7, 16-23"""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return "ranks " + ", ".join(f"{first}-{last}" if first < last else f"{first}" for first, last in spans)
