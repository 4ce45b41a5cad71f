"""Compares counted memory with the estimates of `doctor --plan`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_collab.planning.memory import GIB, MemoryPart
from megatron_collab.rehearsal.ledger import PASSING
from megatron_collab.rehearsal.rank import GATHERED, WORKSPACES
from megatron_collab.rehearsal.run import RankMemory

_PHASES = ("training", "sampling", "host")
_NOTHING = 1 << 20  # bytes; smaller parts are not compared
_NOT_PLANNED = {PASSING, GATHERED, WORKSPACES}  # see planning/memory.py


@dataclass(frozen=True)
class Comparison:
    """Bytes of a part in a phase, for a class of ranks; `counted` or `planned` is 0 if only the other has the part."""

    part: str
    phase: str
    planned: float
    counted: float

    @property
    def ratio(self) -> float | None:
        """Planned over counted; None if both are tiny, or the part is never planned."""
        if self.part in _NOT_PLANNED or max(self.planned, self.counted) < _NOTHING:
            return None
        return self.planned / max(self.counted, 1.0)


def lines(planned: Sequence[MemoryPart], counted: Sequence[MemoryPart]) -> Iterator[Comparison]:
    """A comparison for every planned or counted part in every phase."""
    plan, counts = ({part.name: part for part in parts} for parts in (planned, counted))
    for name in [*plan, *(name for name in counts if name not in plan)]:
        for phase in _PHASES:
            yield Comparison(name, phase, getattr(plan.get(name), phase, 0.0), getattr(counts.get(name), phase, 0.0))


def ratios(classes: Iterable[tuple[RankMemory, Sequence[MemoryPart]]]) -> list[float]:
    """Planned over counted for every part of every class."""
    line_ratios = (line.ratio for memory, planned in classes for line in lines(planned, memory.parts))
    return [ratio for ratio in line_ratios if ratio is not None]


def table(memory: RankMemory, planned: Sequence[MemoryPart]) -> str:
    """A class of ranks: its parts in GiB, counted and planned."""
    title = f"{_spans(memory.ranks)} (stage {memory.kind.stage})"
    rows = [f"{title:34}{'training':>18}{'sampling':>18}{'host':>18}"]
    rows += [f"{'GiB':34}" + f"{'counted':>9}{'plan':>9}" * len(_PHASES)]
    names = dict.fromkeys(line.part for line in lines(planned, memory.parts))
    cells = {(line.part, line.phase): line for line in lines(planned, memory.parts)}
    for name in names:
        row = [cells[name, phase] for phase in _PHASES]
        rows.append(f"{name:34}" + "".join(f"{cell.counted / GIB:9.2f}{cell.planned / GIB:9.2f}" for cell in row))
    rows.append(
        f"{'peak in a step':34}{memory.peak / GIB:9.2f}; a checkpoint takes {memory.snapshot / GIB:.2f} on the host"
    )
    return "\n".join(rows)


def _spans(ranks: Sequence[int]) -> str:
    """Ranges of ranks, such as "ranks 0-7, 16-23"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return "ranks " + ", ".join(f"{first}-{last}" if first < last else f"{first}" for first, last in spans)
