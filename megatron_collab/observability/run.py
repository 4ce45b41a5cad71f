"""The folder of a training run (docs/reference/run-files.md): files written while it runs, and console output."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from megatron_collab.observability import evaluations, judges, tokens, transcripts
from megatron_collab.observability.evaluations import AFTER, BEFORE
from megatron_collab.observability.folder import RunFolder, append, keep, rows_of, scores, with_intervals
from megatron_collab.observability.judges import JudgeChange, JudgeVersions
from megatron_collab.observability.run_record import RunRecord
from megatron_collab.observability.sentinels import Alarm
from megatron_collab.observability.step_view import StepView
from megatron_collab.runtime import screen
from megatron_collab.settings import TrainConfig
from megatron_collab.types import Group

logger = logging.getLogger(__name__)

_GROUPS = 2  # of a step whose conversations writers get: the first future of each rollout
_EVALUATION = "evaluation"  # key of rows that were written in one


class Run(RunFolder):
    """The folder and the console of a training run; only rank 0 writes.

    `record`: what it records of the settings; `start`: first step to do; `state`: from an earlier start's checkpoint;
    `names`: metrics by result.json name.
    """

    def __init__(
        self, record: RunRecord, train: TrainConfig, start: int, state: Mapping[str, Any], names: Mapping[str, str]
    ) -> None:
        super().__init__(record, start, train.steps, float(state.get("seconds", 0.0)), train.keep_best)
        self._train, self._steps = train, train.steps
        self.names = names
        self._start, self._began = start, time.monotonic()
        self._view = self._show() if self.leader and screen.is_drawn() else None
        if self.leader:
            for name in ("metrics.jsonl", "alarms.jsonl", judges.FILE):  # evaluations at `start` are not repeated
                keep(self.folder / name, lambda row: row["step"] < start + (_EVALUATION in row))
            transcripts.forget(self.folder, start)
        self._judges = JudgeVersions(self.folder)

    def __exit__(self, *error: object) -> None:
        screen.close()
        super().__exit__(*error)

    def _show(self) -> StepView:
        """The view of this run, from now on at the bottom of the terminal."""
        view = StepView(self.folder.name, self._steps, self._start)
        screen.show(view)
        return view

    def state(self) -> dict[str, Any]:
        """State to store in a checkpoint."""
        return {"seconds": self._seconds()}

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a finished step: metrics.jsonl and the writers; the view on a terminal, else a line."""
        append(self.folder / "metrics.jsonl", [{"step": step, **metrics}])
        self._write(step, metrics)
        if self._view:
            self._view.record(step, metrics)
        if self._view is None or not sys.stdout.isatty():
            rate = (time.monotonic() - self._began) / (step + 1 - self._start)  # average of this start
            remaining = screen.duration(rate * (self._steps - step - 1))
            logger.info(f"{line(step, self._steps, metrics)} | {remaining} left")

    def transcripts(self, step: int, groups: Sequence[Group]) -> None:
        """Write every future of a step with its scores; print a line if some failed."""
        self._report_failures(f"step {step + 1}", groups)
        rows = [[*rows_of([group])] for group in groups]
        transcripts.write_step(self.folder, step, rows)
        if self._is_sampled(step):
            self._write_sample(step, "train", (row for group in rows[:_GROUPS] for row in group if not row["future"]))
        self._watch_judges(step, groups)
        if self._view and groups:
            last = groups[-1].rollouts[-1].futures[-1].conversation
            self._view.conversation([message.as_dict() for message in last.messages])

    def _is_sampled(self, step: int) -> bool:
        """Whether writers get conversations of a step: its weights are evaluated or saved by the settings."""
        every = self._train.eval_every
        return step in (0, self._steps - 1) or self._train.checkpoint_due(step) or (every > 0 and step % every == 0)

    def record_tokens(self, step: int, rows: Iterable[tokens.Row]) -> None:
        """Write the tokens of a step's trained turns, see train.record_tokens."""
        tokens.write(self.folder, step, rows)

    def alarms(self, step: int, alarms: Sequence[Alarm | JudgeChange], evaluation: str = "") -> None:
        """Write the alarms at a step, or in an evaluation before it, and print a line for each."""
        append(self.folder / "alarms.jsonl", [{**_moment(step, evaluation), **asdict(alarm)} for alarm in alarms])
        for alarm in alarms:
            text = f"{f'evaluation {evaluation}' if evaluation else f'step {step + 1}'}: {alarm.text()}"
            logger.warning(text)
            if self._view:
                self._view.alarm(text)

    def _watch_judges(self, step: int, groups: Sequence[Group], evaluation: str = "") -> None:
        """Write the versions that answered for the first time, and the alarms that they raise."""
        lines, alarms = self._judges.watch(groups)
        if lines:
            append(self.folder / judges.FILE, [{**_moment(step, evaluation), **line} for line in lines])
            self.alarms(step, alarms, evaluation)

    def evaluation(
        self,
        name: str,
        set_name: str,
        step: int,
        metrics: Mapping[str, float],
        groups: Sequence[Group] = (),
        against: str | None = None,
    ) -> None:
        super().evaluation(name, set_name, step, metrics, groups, against)
        self._watch_judges(step, groups, name)
        if self._view:
            self._view.evaluation(f"{name}: {with_intervals(self._evaluations.records[name])}")

    def evaluation_due(self, set_name: str, step: int) -> str | None:
        """The name of the evaluation of `set_name` if it is due at `step`, see Evaluations.due. Call on rank 0."""
        return self._evaluations.due(set_name, step, self._train.eval_every)

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
        if lacking:
            counts = ", ".join(f"{name} ({count:.0f})" for name, count in lacking.items())
            remedy = f"`megatron-collab evaluate model.path={self.folder}@STEP` evaluates a checkpoint again"
            logger.warning(f"evaluations with conversations that lack a score: {counts}; {remedy}")
        super().finish(
            {**named_scores, **by_phase, **incomplete, "train_minutes": round(self._seconds() / 60, 2), **result}
        )


def _moment(step: int, evaluation: str) -> dict[str, Any]:
    return {"step": step, **({_EVALUATION: evaluation} if evaluation else {})}


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
