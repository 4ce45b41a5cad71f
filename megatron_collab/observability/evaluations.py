"""Evaluations of a run: evaluations.json has one record per evaluation, under the name of its conversations file.

A set of data.eval is evaluated `before` training, as `step_N` between steps, and `after` the last step; as `model` if
nothing is trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_collab.observability.records import number, of_step
from megatron_collab.settings import require
from megatron_collab.settings.documents import parse_json
from megatron_collab.statistics import Estimate

FILE = "evaluations.json"
BEFORE, AFTER, MODEL = "before", "after", "model"
Record = Mapping[str, Any]  # step, set, tasks, and metrics as rollout/summary.py names them


class Evaluations:
    """The records of a run; none before `resume`. `steps`: train.steps."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps
        self.records: dict[str, Record] = {}

    def resume(self, start: int) -> None:
        """Read the records of a run that resumes at step `start`. Later ones are dropped: their steps are repeated.

        If the run now has more steps than before, its `after` becomes a `step_N`.
        """
        for name, record in read(self.folder).items():
            conversations = file_of(self.folder, name)
            if record["step"] > start:
                conversations.unlink(missing_ok=True)
                continue
            if moment_of(name) == AFTER and record["step"] < self.steps:
                name = name_of(record.get("set", ""), f"step_{record['step']}")
                if conversations.exists():
                    conversations.rename(file_of(self.folder, name).with_suffix(conversations.suffix))
            self.records[name] = record

    def due(self, set_name: str, step: int, every: int) -> str | None:
        """Name of the evaluation of `set_name` that is due at `step`; None if none is due or it is recorded.

        An evaluation is due at the first step of a run, every `every` steps (0: never) and after the last step. If it
        is recorded without some scores, a run that resumes at its step repeats it, since it has the same weights.
        """
        records = {record["step"]: name for name, record in self.records.items() if record.get("set", "") == set_name}
        if step in records:
            return None if is_complete(self.records[records[step]]) else records[step]
        if step == self.steps:
            return name_of(set_name, AFTER)
        if not records:
            return name_of(set_name, BEFORE)
        return name_of(set_name, f"step_{step}") if every and step % every == 0 else None

    def best(self, metric: str, has_checkpoint: Callable[[int], bool]) -> tuple[int, float] | None:
        """(step, value) of the evaluation with the highest eval/[SET/]METRIC, or the lowest if `metric` starts with -.

        Only steps that have a checkpoint count, and only evaluations without missing scores: means over different tasks
        cannot be compared. Of equal values the first wins.
        """
        sign = -1.0 if metric.startswith("-") else 1.0
        candidates = []
        for record in self.records.values():
            value = scalars(record).get(metric.removeprefix("-"))
            if value is not None and is_complete(record) and has_checkpoint(record["step"]):
                candidates.append((sign * value, -record["step"]))
        if not candidates:
            return None
        value, step = max(candidates)
        return -step, sign * value


def is_complete(record: Record | None) -> bool:
    """Whether an evaluation is recorded and no score of it is missing; earlier versions counted none."""
    return record is not None and not record.get("incomplete")


def read(folder: Path) -> dict[str, Record]:
    """The records of evaluations.json in order of evaluation; earlier versions recorded no set.

    Raises ConfigError if the file is torn or holds something else.
    """
    records, fault = readable(folder)
    message = f"{folder / FILE}: {fault}; restore it, or remove it to forget the run's evaluations"
    require(fault is None, message)
    return records


def readable(folder: Path) -> tuple[dict[str, Record], str | None]:
    """The readable records of evaluations.json, and what is wrong with the file or its other records, if anything."""
    file = folder / FILE
    if not file.is_file():
        return {}, None
    try:
        content = parse_json(file.read_text())
    except ValueError as error:
        return {}, f"cannot be read as JSON ({error})"
    if not isinstance(content, dict):
        return {}, f"holds a {type(content).__name__}, not evaluations"

    def is_record(record: Any) -> bool:
        return isinstance(record, dict) and of_step(record) and isinstance(record.get("set", ""), str)

    valid = {name: record for name, record in content.items() if is_record(record)}
    invalid = sorted(content.keys() - valid.keys())
    return valid, f"{invalid[0]!r} is not an evaluation record" if invalid else None


def scalars(record: Record) -> dict[str, float]:
    """The metrics of an evaluation as logged by the writers: eval/[SET/]METRIC, METRIC_low, METRIC_high, METRIC_gap."""

    def metric_values() -> Iterator[tuple[str, Any]]:
        for name, value in record.items():
            kind, _, metric = name.partition("/")
            if kind == "score":
                yield metric, value
            elif kind in ("score_low", "score_high"):
                yield metric + kind.removeprefix("score"), value
            elif kind.startswith("gap"):  # with gap_low, gap_growth and so on
                yield f"{metric}_{kind}", value
            elif kind == "missing" and metric:
                yield f"{metric}_missing", value
            elif kind in ("reward", "reward_low", "reward_high", "ending", "incomplete"):
                yield name, value

    start = prefix(record.get("set", ""))
    return {f"{start}/{name}": value for name, value in metric_values() if number(value) is not None}


def estimates(record: Record, kind: str = "score") -> dict[str, Estimate]:
    """By metric, the values of a `kind` (score, gap, gap_growth) with their intervals, nan if they are not recorded."""

    def recorded(key: str) -> float:
        return math.nan if (value := number(record.get(key))) is None else value

    names = [name.removeprefix(f"{kind}/") for name in record if name.startswith(f"{kind}/")]
    return {name: Estimate(*(recorded(f"{kind}{end}/{name}") for end in ("", "_low", "_high"))) for name in names}


def prefix(set_name: str) -> str:
    """The prefix of the metrics of a set; `set_name` is empty if it is the only one."""
    return f"eval/{set_name}" if set_name else "eval"


def name_of(set_name: str, moment: str) -> str:
    """The name of an evaluation; `set_name` is empty if its set is the only one."""
    return f"{set_name}/{moment}" if set_name else moment


def moment_of(name: str) -> str:
    return name.rpartition("/")[2]


def file_of(folder: Path, name: str) -> Path:
    """The file with the conversations of the evaluation `name`: Parquet, or JSON lines of an earlier version."""
    file, old_file = files_of(folder, name)
    return old_file if old_file.is_file() and not file.exists() else file


def files_of(folder: Path, name: str) -> tuple[Path, Path]:
    """The file with the conversations of the evaluation `name`, and that of an earlier version."""
    stem = f"eval_{name.replace('/', '_')}"
    return folder / f"{stem}.parquet", folder / f"{stem}.jsonl"
