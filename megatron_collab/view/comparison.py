"""Two sides on the same tasks: the conversations of an evaluation, or of a step of training, of one run or of two."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from megatron_collab.observability import transcripts
from megatron_collab.observability.conversations import TRAINING, MetricChange, changes, rows_of_part, step_of
from megatron_collab.observability.records import number
from megatron_collab.runtime.text import one_line
from megatron_collab.settings import require
from megatron_collab.view.runs import RunView, interval

MOST_STEPS = 1000  # in the list of what can be compared: the last ones
_SURROGATE = re.compile("[\ud800-\udfff]")
_Tasks = Mapping[str, Sequence[transcripts.Row]]  # by id, the rows of a task


def parts(run: RunView) -> list[str]:
    """What can be compared: the evaluations with conversations, then the steps of training with transcripts."""
    steps = run.transcript_steps()[-MOST_STEPS:]
    return [*run.evaluated(), *(f"{TRAINING}{step}" for step in steps)]


@dataclass(frozen=True)
class Side:
    """The conversations `part` of a run: the name of an evaluation, or training/STEP.

    Raises LookupError if the run has no such part.
    """

    run: RunView
    part: str

    def __post_init__(self) -> None:
        is_step = self.step is not None and self.step in self.run.transcript_steps()
        if not is_step and self.part not in self.run.evaluated():
            raise LookupError(f"{self.run.name} has no conversations of {one_line(self.part, 80)}")

    def rows(self) -> Iterator[transcripts.Row]:
        """The conversations, read as they are requested. Raises ConfigError if the file is damaged."""
        return rows_of_part(self.run.folder, self.part)

    def conversations(self, task: str) -> dict[str, Any]:
        """Those about a task, whole: a row each. Raises LookupError if there are none.

        A browser sends U+FFFD for half of a surrogate pair, so ids are compared with that.
        """
        rows = [row for row in self.rows() if _SURROGATE.sub("\ufffd", row["task"]) == task]
        if not rows:
            raise LookupError(f"{self.part} has no conversation about task {one_line(task, 80)}")
        return {"task": rows[0]["task"], "rows": rows}

    def scores(self) -> _Tasks:
        """By task, the rows with nothing but their task and scores."""
        tasks: dict[str, list[transcripts.Row]] = {}
        for row in self.rows():
            tasks.setdefault(row["task"], []).append({"task": row["task"], "scores": row["scores"]})
        return tasks

    @property
    def step(self) -> int | None:
        """The step of training that it is."""
        return step_of(self.part)


def side(runs: Sequence[RunView], name: str, text: str) -> Side:
    """The side that the parameter `name` of an address describes, as RUN:PART.

    Raises ConfigError if it is malformed, LookupError if there is no such run or part.
    """
    match = re.fullmatch(r"(\d{1,6}):(.+)", text, re.ASCII | re.DOTALL)
    message = f"{name}={one_line(text, 80)}: give RUN:EVALUATION or RUN:{TRAINING}STEP, as in 0:after"
    require(match is not None, message)
    assert match
    number_of_run = int(match[1])
    if number_of_run >= len(runs):
        raise LookupError(f"no run {number_of_run}; there are {len(runs)}")
    return Side(runs[number_of_run], match[2])


def compared(first: Side, second: Side) -> dict[str, Any]:
    """Metrics on the tasks that both sides have, with the paired difference, and by task: `first` is at the left.

    A task's score is the mean over its conversations, so the mean over tasks of the differences is that of the metric.
    A step of training has no pass@k: futures of a turn are not independent samples.
    """
    sides = [first.scores(), second.scores()]
    common = [task for task in sides[0] if task in sides[1]]
    before, after = ([tasks[task] for task in common] for tasks in sides)
    metrics = changes(before, after)
    if first.step is not None or second.step is not None:
        names = {name for task in (*before, *after) for row in task for name in row["scores"]}
        metrics = [change for change in metrics if change.label in names]
    return {
        "left": {"tasks": len(sides[0])},
        "right": {"tasks": len(sides[1])},
        "common": len(common),
        "metrics": [_metric(change) for change in metrics],
        "tasks": [
            {"task": task, "left": _means(a), "right": _means(b), "conversations": [len(a), len(b)]}
            for task, a, b in zip(common, before, after, strict=True)
        ],
    }


def _metric(change: MetricChange) -> dict[str, Any]:
    estimates = zip(("left", "right", "difference"), (*change.means, change.difference), strict=True)
    intervals = {name: estimate and interval(estimate) for name, estimate in estimates}
    return {"name": change.label, **intervals, "missing": change.missing}


def _means(rows: Sequence[transcripts.Row]) -> dict[str, float]:
    """By metric, the mean of a task's scores; metrics without a score are left out."""
    names = dict.fromkeys(name for row in rows for name in row["scores"])
    values = {name: [value for row in rows if (value := number(row["scores"].get(name))) is not None] for name in names}
    return {name: fmean(scores) for name, scores in values.items() if scores}
