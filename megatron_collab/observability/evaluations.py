"""The evaluations of a run: evaluations.json, a record each, by the names that their files of conversations have too.

A set of data.eval is evaluated `before` training, as `step_N` between steps, and `after` the last one; as `model` where
nothing is trained.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_collab.config import require
from megatron_collab.observability.records import number, of_step

FILE = "evaluations.json"
BEFORE, AFTER, MODEL = "before", "after", "model"
Record = Mapping[str, Any]  # step, set, tasks, and metrics as rollout/summary.py names them


class Evaluations:
    """The records of a run that goes on at step `start`; those of later steps are forgotten, as they are made again."""

    def __init__(self, folder: Path, start: int, steps: int) -> None:
        """`steps`: train.steps. What ended a run that now has more steps becomes one between its steps."""
        self.folder, self.steps = folder, steps
        self.records: dict[str, Record] = {}
        for name, record in read(folder).items():
            conversations = file_of(folder, name)
            if record["step"] > start:
                conversations.unlink(missing_ok=True)
                continue
            if moment_of(name) == AFTER and record["step"] < steps:
                name = name_of(record.get("set", ""), f"step_{record['step']}")
                if conversations.exists():
                    conversations.rename(file_of(folder, name))
            self.records[name] = record

    def due(self, one: str, step: int, every: int) -> str | None:
        """The name of the evaluation of the set `one` at `step`; None where none is due, or it is recorded.

        Due are the first of a run, one every `every` steps (0: none) and that after the last step.
        """
        steps = [record["step"] for record in self.records.values() if record.get("set", "") == one]
        if step in steps:
            return None
        if step == self.steps:
            return name_of(one, AFTER)
        if not steps:
            return name_of(one, BEFORE)
        return name_of(one, f"step_{step}") if every and step % every == 0 else None

    def best(self, metric: str, kept: Callable[[int], bool]) -> tuple[int, float] | None:
        """Step and value of the evaluation with the highest eval/[SET/]METRIC, the lowest where a - precedes it.

        Of those whose weights are `kept` in a checkpoint; of equal values the first.
        """
        sign = -1.0 if metric.startswith("-") else 1.0
        found = []
        for record in self.records.values():
            value = scalars(record).get(metric.removeprefix("-"))
            if value is not None and kept(record["step"]):
                found.append((sign * value, -record["step"]))
        if not found:
            return None
        value, step = max(found)
        return -step, sign * value


def read(folder: Path) -> dict[str, Record]:
    """What evaluations.json holds, in the order of the evaluations; earlier versions recorded no set.

    ConfigError where it is torn, or something else.
    """
    found, fault = readable(folder)
    message = f"{folder / FILE}: {fault}; restore it, or remove it: what the run has evaluated is then not known"
    require(fault is None, message)
    return found


def readable(folder: Path) -> tuple[dict[str, Record], str | None]:
    """What can be read of evaluations.json, and what is wrong with the rest."""
    file = folder / FILE
    if not file.is_file():
        return {}, None
    try:
        found = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        return {}, f"cannot be read as JSON ({error})"
    if not isinstance(found, dict):
        return {}, f"holds a {type(found).__name__}, no evaluations"

    def whole(record: Any) -> bool:
        return isinstance(record, dict) and of_step(record) and isinstance(record.get("set", ""), str)

    kept = {name: record for name, record in found.items() if whole(record)}
    others = sorted(found.keys() - kept.keys())
    return kept, f"{others[0]!r} is no record of an evaluation" if others else None


def scalars(record: Record) -> dict[str, float]:
    """The metrics of an evaluation as TensorBoard and Weights & Biases have them: eval/[SET/]METRIC, METRIC_se."""

    def named() -> Iterator[tuple[str, Any]]:
        for name, value in record.items():
            kind, _, metric = name.partition("/")
            if kind == "score":
                yield metric, value
            elif kind == "score_se":
                yield f"{metric}_se", value
            elif kind in ("reward", "reward_se", "ending"):
                yield name, value

    start = prefix(record.get("set", ""))
    return {f"{start}/{name}": value for name, value in named() if number(value) is not None}


def prefix(one: str) -> str:
    """What the metrics of the set called `one` begin with."""
    return f"eval/{one}" if one else "eval"


def name_of(one: str, moment: str) -> str:
    """The name of the evaluation of the set called `one`, which the only set is not."""
    return f"{one}/{moment}" if one else moment


def moment_of(name: str) -> str:
    return name.rpartition("/")[2]


def file_of(folder: Path, name: str) -> Path:
    """Where the conversations of the evaluation `name` are."""
    return folder / f"eval_{name.replace('/', '_')}.jsonl"
