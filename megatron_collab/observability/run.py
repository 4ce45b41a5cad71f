"""The folder of a run (docs/reference/run-files.md): what it writes while it goes, and what it says on the console."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from tqdm import tqdm

from megatron_collab import __version__
from megatron_collab.config import SETTINGS, Config, changes
from megatron_collab.observability import evaluations
from megatron_collab.observability.evaluations import AFTER, BEFORE, Evaluations
from megatron_collab.observability.writers import CONVERSATIONS, writers
from megatron_collab.runtime import files, process
from megatron_collab.runtime.process import BEST, FINISHED, global_rank
from megatron_collab.runtime.redact import redacted
from megatron_collab.types import Group, Missing, visible

VERSIONS = ("torch", "megatron-core", "sglang", "ray", "litellm", "transformers", "datasets", "hydra-core")
LOG_EVERY = 10.0  # seconds between two lines of progress in a log file


class Run(AbstractContextManager["Run"]):
    """The folder of a run and its console; only rank 0 writes.

    `start`: the first step still to be done; `state`: of an earlier start; `names`: metrics by their result.json names.
    """

    def __init__(self, config: Config, start: int, state: Mapping[str, Any], names: Mapping[str, str]) -> None:
        self.config = config
        self.names = names
        self.folder = Path(config.run.dir)
        self.leader = global_rank() == 0
        self._seconds_before = float(state.get("seconds", 0.0))
        self._start, self._began = start, time.monotonic()
        self._last_line = 0.0
        if not self.leader:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self.folder / ".lock")
        try:
            self._lock.acquire(timeout=10)  # a run that was just killed may still be ending
        except Timeout:
            raise RuntimeError(f"run.dir={self.folder}: another process trains there; choose another run.dir") from None
        (self.folder / FINISHED).unlink(missing_ok=True)  # of fewer steps
        at = datetime.now(UTC).isoformat(timespec="seconds")
        rows = [
            {"time": at, "step": start, "setting": change.setting, "before": change.before, "after": change.after}
            for change in changes(config)
        ]
        if rows:
            _append(self.folder / "history.jsonl", rows)
        _replace(self.folder / SETTINGS, asdict(config))
        for file in (self.folder / "metrics.jsonl", self.folder / "transcripts.jsonl"):
            _keep_before(file, start)
        self._evaluations = Evaluations(self.folder, start, config.train.steps)
        self._best: tuple[int, float] | None = None
        self._mark_best(start)
        self._bar = progress("training", config.train.steps, unit="step", done=start, keep=True)
        self._writers = [*writers(config, start)]
        for record in self._evaluations.records.values():
            if record["step"] == start:  # which TensorBoard's writer drops with the steps that are done again
                self._write(start, evaluations.scalars(record))

    def __exit__(self, *_: object) -> None:
        if self.leader:
            self._bar.close()
            self._lock.release()

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"seconds": self._seconds()}

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """One finished step: a line on the console, metrics.jsonl, TensorBoard, Weights & Biases."""
        _append(self.folder / "metrics.jsonl", [{"step": step, **metrics}])
        self._write(step, metrics)
        self._bar.update(1)
        last = step + 1 == self.config.train.steps
        if last or time.monotonic() - self._last_line >= 1:  # faster steps would hide the bar
            self._last_line = time.monotonic()
            rate = (time.monotonic() - self._began) / (step + 1 - self._start)  # of this start
            left = timedelta(seconds=round(rate * (self.config.train.steps - step - 1)))
            tqdm.write(f"{line(step, self.config.train.steps, metrics)} | {left} left")

    def transcripts(self, step: int, groups: Sequence[Group]) -> None:
        """Every future of a step with its scores."""
        _append(self.folder / "transcripts.jsonl", [{"step": step, **row} for row in _rows(groups)])

    def evaluation_due(self, one: str, step: int) -> str | None:
        """The name of the evaluation of the set `one` that is due at `step`, unless it is recorded; on rank 0."""
        return self._evaluations.due(one, step, self.config.train.eval_every)

    def evaluation(
        self, name: str, one: str, step: int, metrics: Mapping[str, float], groups: Sequence[Group] = ()
    ) -> None:
        """Record the evaluation `name`, of the set `one`: its means with their errors, and its conversations if any."""
        record = _plain({"step": step, "set": one, "tasks": len(groups), **metrics})
        if rows := [*_rows(groups)]:
            file = evaluations.file_of(self.folder, name)
            file.unlink(missing_ok=True)
            _append(file, rows)
        self._evaluations.records[name] = record
        _replace(self.folder / evaluations.FILE, self._evaluations.records)
        self._write(step, evaluations.scalars(record))
        for writer in self._writers if rows else ():
            writer.conversations(step, evaluations.prefix(one), redacted(rows[:CONVERSATIONS]))
        tqdm.write(f"evaluation {name} ({record['tasks']} tasks): {_with_errors(record)}")
        self._mark_best(step)

    def finish(self) -> None:
        """Write result.json and report.html; a folder with a result.json is a run that is done."""
        if not self.leader:
            return
        from megatron_collab.observability import report  # and with it what draws, a second of imports

        scores: dict[str, dict[str, float]] = {BEFORE: {}, AFTER: {}}
        for name, record in self._evaluations.records.items():
            if (when := evaluations.moment_of(name)) in scores:
                of_set = name.removesuffix(when)  # empty, or the name of a set and a slash
                scores[when] |= {f"{of_set}{metric}": value for metric, value in _scores(record).items()}
        result: dict[str, Any] = {
            f"{name}_{when}": found.get(metric) for name, metric in self.names.items() for when, found in scores.items()
        }
        result |= scores
        result["train_minutes"] = round(self._seconds() / 60, 2)
        result["versions"] = {"megatron-collab": __version__, **{name: metadata.version(name) for name in VERSIONS}}
        report.write(self.folder)
        _replace(self.folder / FINISHED, result)

    def _seconds(self) -> float:
        """Seconds this run has taken over all its starts, from the start of torchrun on."""
        return self._seconds_before + process.age(os.getppid())

    def _mark_best(self, step: int) -> None:
        """Write which checkpoint is to be kept for train.keep_best; that of `step` may still be being written."""
        metric = self.config.train.keep_best

        def kept(found: int) -> bool:
            return 0 < found == step or (self.folder / "checkpoints" / f"step_{found}").is_dir()

        best = self._evaluations.best(metric, kept) if metric else None
        if best is None:
            (self.folder / BEST).unlink(missing_ok=True)
        elif best != self._best:
            self._best = best
            row = {"metric": metric, "value": best[1], "step": best[0], "checkpoint": f"checkpoints/step_{best[0]}"}
            _replace(self.folder / BEST, row)
            tqdm.write(f"best by {metric}: {best[1]:.4g} at step {best[0]}, whose checkpoint is kept")

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        for writer in self._writers:
            writer.scalars(step, metrics)


def line(step: int, steps: int, metrics: Mapping[str, float]) -> str:
    """One step on the console: what is there of reward, scores, loss, KL and seconds by stage."""
    parts = [f"step {step + 1}/{steps}"]
    if "reward" in metrics:
        parts += [f"reward {metrics['reward']:.3f}±{metrics['reward_se']:.3f}", _shown(_scores(metrics))]
    parts += [f"{name} {metrics[name]:.3g}" for name in ("loss", "kl", "grad_norm", "lr") if name in metrics]
    if metrics.get("missing"):
        parts.append(f"missing scores {metrics['missing']:.0f}")
    laps = [f"{name.removeprefix('seconds/')} {value:.2f}s" for name, value in metrics.items() if "seconds/" in name]
    return " | ".join([*parts, " ".join(laps)])


def _scores(metrics: Mapping[str, float]) -> dict[str, float]:
    """By metric, of those that a step or an evaluation has."""
    return {name.removeprefix("score/"): value for name, value in metrics.items() if name.startswith("score/")}


def _shown(scores: Mapping[str, float]) -> str:
    return " ".join(f"{name} {value:.3f}" for name, value in scores.items())


def _with_errors(record: Mapping[str, Any]) -> str:
    errors = {name: record.get(f"score_se/{name}") for name in _scores(record)}
    shown = ((name, value, errors[name]) for name, value in _scores(record).items() if value is not None)
    return " ".join(
        f"{name} {value:.3f}" + (f"±{error:.3f}" if error is not None else "") for name, value, error in shown
    )


def _rows(groups: Sequence[Group]) -> Iterator[dict[str, Any]]:
    """Every future of the groups, as JSON."""
    for group in groups:
        for i, rollout in enumerate(group.rollouts):
            for j, future in enumerate(rollout.futures):
                conversation, reward = future.conversation, rollout.reward.value
                raw = [turn.text for turn in conversation.turns]
                yield {
                    "task": group.task.id,
                    "rollout": i,
                    "future": j,
                    "reward": None if isinstance(reward, Missing) else reward,
                    **({"turns": raw} if any(text != visible(text) for text in raw) else {}),  # with their thoughts
                    **({"turn_rewards": conversation.turn_rewards} if any(conversation.turn_rewards) else {}),
                    "ending": conversation.ending,
                    "error": conversation.error,
                    "messages": [message.as_dict() for message in conversation.messages],
                    "scores": {
                        name: {"missing": score.why} if isinstance(score, Missing) else score
                        for name, score in future.scores.items()
                    },
                }


def _append(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append JSON lines, keys redacted."""
    with files.writing(file), file.open("a") as stream:
        for row in rows:
            stream.write(json.dumps(_plain(redacted(row))) + "\n")


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """With null for numbers that JSON does not have (NaN)."""
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}


def _replace(file: Path, content: Mapping[str, Any]) -> None:
    files.replace(file, json.dumps(redacted(content), indent=2) + "\n")


def _keep_before(file: Path, step: int) -> None:
    """Drop the lines of `step` and later ones, and one that was cut off."""
    if not file.exists():
        return
    kept = []
    for text in file.read_text().splitlines():
        try:
            row = json.loads(text)
        except json.JSONDecodeError:  # the process was killed while it wrote
            continue
        if row["step"] < step:
            kept.append(text)
    files.replace(file, "".join(text + "\n" for text in kept))


class Log:
    """Progress in a log file: a line at most every LOG_EVERY seconds."""

    def __init__(self, title: str, total: int, unit: str, done: int) -> None:
        self._n = done
        self._shown = partial(tqdm.format_meter, total=total, ncols=0, prefix=title, unit=unit, initial=done)
        self._began = self._printed = time.monotonic()

    def update(self, n: int) -> None:
        self._n += n
        now = time.monotonic()
        if now - self._printed >= LOG_EVERY:
            self._printed = now
            print(self._shown(self._n, elapsed=now - self._began), file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing stays open."""


def progress(title: str, total: int, unit: str = "task", done: int = 0, keep: bool = False) -> tqdm | Log:
    """Progress towards `total`, of which `done` is done, on stderr; `keep`: the bar stays when it is full."""
    if not sys.stderr.isatty():
        return Log(title, total, unit, done)
    return tqdm(total=total, desc=title, unit=unit, initial=done, leave=keep, dynamic_ncols=True, mininterval=0.2)


class Stopwatch:
    """Seconds by stage of one step."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._laps: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        """Count the time since the last lap as `stage`."""
        now = time.monotonic()
        self._laps[stage] = self._laps.get(stage, 0.0) + now - self._last
        self._last = now

    def read(self) -> dict[str, float]:
        """The laps since the last reading, as `seconds/STAGE`."""
        laps, self._laps = self._laps, {}
        return {f"seconds/{stage}": seconds for stage, seconds in laps.items()}
