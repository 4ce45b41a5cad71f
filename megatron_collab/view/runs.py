"""What the page can ask about a run, read from its folder. The run may still be written; nothing here writes."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from megatron_collab.config import recorded_value
from megatron_collab.observability import evaluations, metric_kinds, records, tokens
from megatron_collab.observability.judges import JudgeChange
from megatron_collab.observability.run_record import SETTINGS
from megatron_collab.observability.transcript_index import Index
from megatron_collab.observability.transcripts import OLD_FILE, SCORE, TOKENS, step_file, step_files
from megatron_collab.runtime import files
from megatron_collab.runtime.text import one_line
from megatron_collab.settings import ConfigError, RewardConfig, require
from megatron_collab.settings.documents import parse_json
from megatron_collab.statistics import Estimate
from megatron_collab.view.labels import Label
from megatron_collab.view.selection import Selection, columns

logger = logging.getLogger(__name__)

_UNRECORDED = {evaluations.BEFORE: 0, evaluations.AFTER: 0}  # evaluations of an early version
METRICS, HISTORY, ALARMS = "metrics.jsonl", "history.jsonl", "alarms.jsonl"
MOST_ROWS = 5000  # steps in an answer; the page asks for the next ones
_LONGEST_VALUE = 120  # characters of a value in an event
_OF_REWARD = ("mode", "mode_options", "weights", "clamp", "metrics", "malformed", "malformed_worst")
_SCORED = ("rollout", "future", "ending", "reward", "scores")  # keys of a row from which a reward is computed


class RunView:
    """A run in `folder`, which the page knows by `name`. Several threads may ask at a time.

    `labels`: of its conversations, by people. Raises ConfigError if the folder holds no run.
    """

    def __init__(self, folder: Path, labels: Sequence[Label] = ()) -> None:
        shown = one_line(str(folder))
        require(folder.is_dir(), f"{shown}: no such folder; give the folder of a run")
        expected = f"{METRICS}, {evaluations.FILE} or settings in {SETTINGS}"
        require(_is_run(folder), f"{shown}: has no {expected}; give the folder of a run")
        if fault := evaluations.readable(folder)[1]:
            logger.warning(f"{one_line(str(folder / evaluations.FILE))}: {fault}; the page shows its other records")
        self.labels = labels
        self.folder, self.name = folder, Path(os.path.realpath(folder)).name
        self._metrics = Metrics(folder / METRICS)
        self._lock = Lock()  # of the indexes
        self._indexes: dict[tuple[str, int] | None, Index] = {}  # by evaluation, of which there is one; None: training

    def summary(self) -> dict[str, Any]:
        """The run's entry in the list of runs."""
        has_transcripts = (self.folder / OLD_FILE).is_file() or bool(step_files(self.folder))
        return {
            "name": self.name,
            "folder": str(self.folder),
            "program": _settings(self.folder).get("program"),
            "finished": records.finished(self.folder),
            "steps": len(self._metrics.rows()),
            "has_transcripts": has_transcripts,
            "evaluations": [*self.evaluated()],
        }

    def metrics(self, after: int, start: int | None = None) -> dict[str, Any]:
        """Rows of steps after `after`, at most MOST_ROWS, and whether the run will write no further ones.

        `start` in the answer is another number each time that the run resumed and repeats steps. If a request has an
        earlier one, the rows begin with the first. `records` is another text if evaluations or events may have changed.
        """
        finished = records.finished(self.folder)  # before the rows, since the run may write its last ones in between
        rows = self._metrics.rows()
        outdated = start not in (None, self._metrics.starts)
        later = [row for row in rows if row["step"] > after or outdated]
        return {
            "rows": later[:MOST_ROWS],
            "finished": finished and len(later) <= MOST_ROWS,
            "start": self._metrics.starts,
            "records": " ".join(map(_version, (self.folder / name for name in (evaluations.FILE, HISTORY, ALARMS)))),
        }

    def evaluations(self) -> list[dict[str, Any]]:
        """The evaluations in their order; a bound of an interval is None if it is not recorded."""
        readable, _ = evaluations.readable(self.folder)
        return [_evaluation(name, record) for name, record in readable.items()]

    def events(self) -> list[dict[str, Any]]:
        """Later starts, changed settings and alarms of sentinels, by step."""
        events = [*_history(self.folder / HISTORY), *_alarms(self.folder / ALARMS)]
        return sorted(events, key=lambda event: event["step"])

    def settings(self) -> Any:
        """The content of config.json. Raises OSError if there is none, ConfigError if it cannot be read."""
        file = self.folder / SETTINGS
        try:
            return parse_json(files.read_text(file))
        except ValueError as error:
            raise ConfigError(f"{file}: cannot be read as JSON ({error}); restore it") from None

    def reward(self) -> dict[str, Any]:
        """The settings of the reward at the run's last start, from which the reward of a turn is computed.

        Raises OSError if there is no config.json, ConfigError if it has no reward or cannot be read.
        """
        settings = self.settings()
        defaults = RewardConfig()
        values = {name: recorded_value(settings, f"reward.{name}", getattr(defaults, name)) for name in _OF_REWARD}
        fault = _fault_of_reward(values)
        require(fault is None, f"{self.folder / SETTINGS}: {fault}")
        return values

    def evaluated(self) -> dict[str, int]:
        """The evaluations with conversations, by name their step. Earlier versions wrote some without records."""
        recorded = evaluations.readable(self.folder)[0]
        steps = {name: record["step"] for name, record in recorded.items()} or _UNRECORDED
        return {name: step for name, step in steps.items() if self._has_conversations(name)}

    def _has_conversations(self, evaluation: str) -> bool:
        try:
            return evaluations.file_of(self.folder, evaluation).is_file()
        except (OSError, ValueError):  # no file can have such a name
            return False

    def futures(self, selection: Selection, evaluation: str = "") -> dict[str, Any]:
        """The selected futures, how many there are in all, endings, columns of numbers, and the evaluations of the run.

        `evaluation`, here and below: whose conversations, if not those of training. Raises LookupError if there is none
        of this name.
        """
        with self._indexed(evaluation) as index:
            total, futures = selection.of(index)
            rows = [_future(index, int(number)) for number in futures]
            offered = {"endings": list(index.endings), "columns": columns(index), "evaluations": [*self.evaluated()]}
            return {"total": total, "rows": rows, **offered}

    def group(self, step: int, position: int, evaluation: str = "") -> dict[str, Any]:
        """All futures of a group, whole, and whether its tokens are recorded.

        Raises LookupError if there is none, OSError if a resume just removed it.
        """
        with self._indexed(evaluation) as index:
            rows = index.group_rows(step, position)
        place = {"evaluation": evaluation, "step": step, "position": position}
        first = {name: rows[0].get(name) for name in ("task", "goal", "user")}
        has_tokens = not evaluation and step_file(self.folder, step, TOKENS).is_file()
        return {**place, **first, "has_tokens": has_tokens, "rows": rows}

    def tokens(self, step: int, position: int, rollout: int) -> list[tokens.Row]:
        """The tokens of the trained turns of a rollout. Raises LookupError if none are recorded."""
        turns = tokens.read(self.folder, step, position, rollout)
        if not turns:
            raise LookupError(f"step {step} has no tokens of rollout {rollout} of group {position}")
        return turns

    def scores(self, places: Sequence[tuple[int, int]], evaluation: str = "") -> list[dict[str, Any]]:
        """What the rewards of groups, named by step and position, are computed from. Raises as `group`."""
        with self._indexed(evaluation) as index:
            groups = [index.group_rows(*place) for place in places]
        return [
            {"step": step, "position": position, "rows": [{name: row.get(name) for name in _SCORED} for row in rows]}
            for (step, position), rows in zip(places, groups, strict=True)
        ]

    def transcript_steps(self) -> list[int]:
        """The steps that have transcripts, in order. Those of an earlier version are known to the index alone."""
        steps = set(step_files(self.folder))
        if (self.folder / OLD_FILE).is_file():
            with self._indexed() as index:
                steps.update(map(int, np.unique(index.step)))
        return sorted(steps)

    @contextmanager
    def _indexed(self, evaluation: str = "") -> Iterator[Index]:
        """The index over the run's transcripts as they are now, for one thread at a time. Raises as `futures`."""
        evaluated = self.evaluated() if evaluation else {}
        if evaluation and evaluation not in evaluated:
            raise LookupError(f"{self.name} has no conversations of {one_line(evaluation, 80)}")
        key = (evaluation, evaluated[evaluation]) if evaluation else None
        with self._lock:
            if key in self._indexes:
                self._indexes[key].refresh()
            else:
                self._indexes = {of: index for of, index in self._indexes.items() if of is None}
                self._indexes[key] = Index(self.folder, key, metric_kinds.pairs(self.folder))
            yield self._indexes[key]


class Metrics:
    """The rows of metrics.jsonl. A call reads only what was written since the last one.

    `starts`: how often another file replaced it.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self.starts = 0
        self._lock = Lock()
        self._rows: list[dict[str, Any]] = []
        self._identity: tuple[int, int] | None = None  # device and inode of what is read
        self._bytes = 0  # of it, up to the end of a line

    def rows(self) -> list[dict[str, Any]]:
        """The step of each row, and its metrics, None if a value is no number that can be drawn.

        A resume puts another file in the place of this one, without the steps that it repeats.
        """
        with self._lock:
            if not self._file.is_file():
                self.starts += self._identity is not None
                self._rows, self._identity = [], None
                return []
            with self._file.open("rb") as stream:
                status = os.fstat(stream.fileno())
                if self._identity != (status.st_dev, status.st_ino) or status.st_size < self._bytes:
                    self._rows, self._identity, self._bytes = [], (status.st_dev, status.st_ino), 0
                    self.starts += 1
                stream.seek(self._bytes)
                for line in stream:
                    row = _metrics_row(line)
                    if not line.endswith(b"\n"):  # the run has not finished the line, or was killed meanwhile
                        return self._rows + ([row] if row else [])
                    self._bytes += len(line)
                    self._rows += [row] if row else []
            return list(self._rows)


def _version(file: Path) -> str:
    """A text that differs for each content of the file."""
    with suppress(OSError):
        status = file.stat()
        return f"{status.st_ino}.{status.st_size}.{status.st_mtime_ns}"
    return "-"


def _metrics_row(line: bytes) -> dict[str, Any] | None:
    row = records.parsed(line.decode(errors="replace"))
    if row is None or not records.of_step(row):
        return None
    return {name: value if name == "step" else records.number(value) for name, value in row.items()}


def _future(index: Index, number: int) -> dict[str, Any]:
    place, values = index.place(number), index.values
    numbers = {name: _shortest(of_futures[number]) for name, of_futures in values.items()}
    ending = index.ending[number]
    return {
        "step": place.step,
        "position": place.position,
        "task": index.tasks[index.task[index.group[number]]].as_py(),
        "rollout": place.rollout,
        "future": place.future,
        "ending": index.endings[ending] if ending >= 0 else None,
        **{name: value for name, value in numbers.items() if not name.startswith(SCORE)},
        "scores": {name.removeprefix(SCORE): value for name, value in numbers.items() if name.startswith(SCORE)},
    }


def _shortest(value: Any) -> float | None:
    """The number with the fewest digits that is this one in float32: 0.6, not 0.6000000238418579. None for NaN."""
    return None if np.isnan(value) else float(str(value))


def _is_run(folder: Path) -> bool:
    written = (METRICS, evaluations.FILE)
    return any((folder / name).is_file() for name in written) or isinstance(_settings(folder).get("run"), dict)


def _settings(folder: Path) -> records.Row:
    """The content of config.json; empty if it cannot be read. The folder of a model has another file of that name."""
    try:
        return records.parsed(files.read_text(folder / SETTINGS)) or {}
    except (OSError, ValueError):
        return {}


def _fault_of_reward(values: dict[str, Any]) -> str | None:
    """Why these are no settings of a reward; None if they are."""
    mappings = [name for name in ("weights", "clamp", "metrics", "mode_options") if not isinstance(values[name], dict)]
    if mappings or not isinstance(values["mode"], str):
        return f"reward.{(mappings or ['mode'])[0]} is no setting; restore the file"
    if not values["weights"]:
        return "has no reward.weights: this run computed no rewards"
    numbers = {f"{kind}.{name}": value for kind in ("weights", "clamp") for name, value in values[kind].items()}
    if values["malformed"] is not None:
        numbers["malformed"] = values["malformed"]
    wrong = [name for name, value in numbers.items() if records.number(value) is None]
    return f"reward.{one_line(wrong[0], _LONGEST_VALUE)} is no number; restore the file" if wrong else None


def _evaluation(name: str, record: evaluations.Record) -> dict[str, Any]:
    estimates = {
        f"{kind}/{metric}": interval(estimate)
        for kind in ("score", "gap", "gap_growth")
        for metric, estimate in evaluations.estimates(record, kind).items()
    }
    reward = [records.number(record.get(f"reward{end}")) for end in ("", "_low", "_high")]
    if reward[0] is not None:
        estimates["reward"] = dict(zip(("value", "low", "high"), reward, strict=True))
    missing = {key.removeprefix("missing/"): value for key, value in record.items() if key.startswith("missing/")}
    return {
        "name": name,
        "step": record["step"],
        "set": record.get("set", ""),
        "tasks": record.get("tasks"),
        "estimates": estimates,
        "missing": missing,
    }


def interval(estimate: Estimate) -> dict[str, float | None]:
    """An estimate for the page: value, low, high, None for an end that the data do not determine."""
    bounds = {"value": estimate.value, "low": estimate.low, "high": estimate.high}
    return {name: None if math.isnan(bound) else bound for name, bound in bounds.items()}


def _history(file: Path) -> Iterator[dict[str, Any]]:
    for _, row in records.lines(file):
        if row is None or not records.of_step(row):
            continue
        if "setting" not in row:
            yield _event(row, "restart", f"restart at step {row['step']}")
        else:
            before, after = (_value(row.get(name)) for name in ("before", "after"))
            yield _event(row, "setting", f"{row.get('setting')}: {before} → {after}")


def _alarms(file: Path) -> Iterator[dict[str, Any]]:
    for _, row in records.lines(file):
        if row is not None and records.of_step(row):
            places = row["conversations"] if isinstance(row.get("conversations"), list) else []
            value, baseline, sentinel = (row.get(name) for name in ("value", "baseline", "sentinel"))
            if isinstance(value, str) and isinstance(baseline, str):
                text = JudgeChange(str(sentinel), value, baseline, [*map(str, places)]).text()
            else:
                examples = f"; conversations {', '.join(map(str, places))}" if places else ""
                text = f"sentinel {sentinel}: {_value(value)}, baseline {_value(baseline)}{examples}"
            yield _event(row, "alarm", text)


def _event(row: records.Row, kind: str, text: str) -> dict[str, Any]:
    return {"step": row["step"], "kind": kind, "text": one_line(text)}


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"
