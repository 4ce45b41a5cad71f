"""The folder of a training run (docs/reference/run-files.md): files written while it runs, and console output."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from tqdm import tqdm

from megatron_collab.config import Config
from megatron_collab.observability import evaluations
from megatron_collab.observability.evaluations import AFTER, BEFORE
from megatron_collab.observability.folder import RunFolder, append, keep, rows_of, scores
from megatron_collab.runtime import console
from megatron_collab.types import Group

logger = logging.getLogger(__name__)

LOG_EVERY = 10.0  # seconds between two lines of progress in a log file


class Run(RunFolder):
    """The folder and the console of a training run; only rank 0 writes.

    `start`: first step to do; `state`: from an earlier start's checkpoint; `names`: metrics by result.json name.
    """

    def __init__(self, config: Config, start: int, state: Mapping[str, Any], names: Mapping[str, str]) -> None:
        train = config.train
        super().__init__(config, start, train.steps, float(state.get("seconds", 0.0)), train.keep_best)
        self._steps, self._eval_every = train.steps, train.eval_every
        self.names = names
        self._start, self._began = start, time.monotonic()
        self._last_line = 0.0
        if self.leader:
            for file in (self.folder / "metrics.jsonl", self.folder / "transcripts.jsonl"):
                keep(file, lambda row: row["step"] < start)
            self._bar = progress("training", train.steps, unit="step", done=start, keep=True)

    def __exit__(self, *error: object) -> None:
        if self.leader:
            self._bar.close()
        super().__exit__(*error)

    def state(self) -> dict[str, Any]:
        """State to store in a checkpoint."""
        return {"seconds": self._seconds()}

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a finished step: a console line, metrics.jsonl, TensorBoard, Weights & Biases."""
        append(self.folder / "metrics.jsonl", [{"step": step, **metrics}])
        self._write(step, metrics)
        self._bar.update(1)
        last = step + 1 == self._steps
        if last or time.monotonic() - self._last_line >= 1:  # more lines would hide the bar if steps are faster
            self._last_line = time.monotonic()
            rate = (time.monotonic() - self._began) / (step + 1 - self._start)  # average of this start
            remaining = timedelta(seconds=round(rate * (self._steps - step - 1)))
            logger.info(f"{line(step, self._steps, metrics)} | {remaining} left")

    def transcripts(self, step: int, groups: Sequence[Group]) -> None:
        """Write every future of a step with its scores; print a line if some failed."""
        self._report_failures(f"step {step + 1}", groups)
        append(self.folder / "transcripts.jsonl", [{"step": step, **row} for row in rows_of(groups)])

    def evaluation_due(self, set_name: str, step: int) -> str | None:
        """The name of the evaluation of `set_name` if one is due at `step` and not recorded. Call on rank 0."""
        return self._evaluations.due(set_name, step, self._eval_every)

    def finish(self, result: Mapping[str, Any] = {}) -> None:
        """Write the result: scores before and after training, and the minutes of all starts."""
        if not self.leader:
            return
        by_phase: dict[str, dict[str, float]] = {BEFORE: {}, AFTER: {}}
        records = self._evaluations.records
        for name, record in records.items():
            if (phase := evaluations.moment_of(name)) in by_phase:
                set_prefix = name.removesuffix(phase)  # empty, or the name of a set and a slash
                by_phase[phase] |= {f"{set_prefix}{metric}": value for metric, value in scores(record).items()}
        named_scores = {
            f"{name}_{phase}": phase_scores.get(metric)
            for name, metric in self.names.items()
            for phase, phase_scores in by_phase.items()
        }
        lacking = {name: count for name, record in records.items() if (count := record.get("incomplete"))}
        incomplete = {"incomplete": lacking} if lacking else {}
        super().finish(
            {**named_scores, **by_phase, **incomplete, "train_minutes": round(self._seconds() / 60, 2), **result}
        )


def line(step: int, steps: int, metrics: Mapping[str, float]) -> str:
    """Console line of a step: reward, scores, loss, KL and seconds by stage, if measured."""
    parts = [f"step {step + 1}/{steps}"]
    if "reward" in metrics:
        parts.append(f"reward {metrics['reward']:.3f}±{metrics['reward_se']:.3f}")
        parts.append(" ".join(f"{name} {value:.3f}" for name, value in scores(metrics).items()))
    of_update = ("loss", "kl", "dpo/accuracy", "dpo/margin", "grad_norm", "lr")
    parts += [f"{name.removeprefix('dpo/')} {metrics[name]:.3g}" for name in of_update if name in metrics]
    if metrics.get("missing"):
        parts.append(f"missing scores {metrics['missing']:.0f}")
    laps = [f"{name.removeprefix('seconds/')} {value:.2f}s" for name, value in metrics.items() if "seconds/" in name]
    return " | ".join([*parts, " ".join(laps)])


class Log:
    """Progress in a log file: at most one line every `every` seconds."""

    def __init__(self, title: str, total: int, unit: str, done: int, every: float = LOG_EVERY) -> None:
        self._n, self._every = done, every
        self._shown = partial(tqdm.format_meter, total=total, ncols=0, prefix=title, unit=unit, initial=done)
        self._began = self._printed = time.monotonic()

    def update(self, n: int) -> None:
        self._n += n
        now = time.monotonic()
        if now - self._printed >= self._every:
            self._printed = now
            print(self._shown(self._n, elapsed=now - self._began), file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing to close."""


def progress(title: str, total: int, unit: str = "task", done: int = 0, keep: bool = False) -> tqdm | Log:
    """Progress on stderr from `done` to `total`; `keep`: the bar stays when it is full."""
    hidden = console.quiet()
    if hidden or not sys.stderr.isatty():
        return Log(title, total, unit, done, math.inf if hidden else LOG_EVERY)
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
        """The laps since the last call, as `seconds/STAGE`."""
        laps, self._laps = self._laps, {}
        return {f"seconds/{stage}": seconds for stage, seconds in laps.items()}
