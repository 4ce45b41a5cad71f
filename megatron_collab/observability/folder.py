"""What every run folder holds, in training and in evaluation: settings, evaluations, the report, the result."""

from __future__ import annotations

import json
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from itertools import chain, islice
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from filelock import FileLock, Timeout

from megatron_collab import __version__
from megatron_collab.observability import evaluations, metric_kinds, records
from megatron_collab.observability.evaluations import Evaluations
from megatron_collab.observability.gap import gap_metrics
from megatron_collab.observability.run_record import SETTINGS, RunRecord
from megatron_collab.observability.transcripts import write
from megatron_collab.observability.writers import CONVERSATIONS, Writers
from megatron_collab.runtime import files, process
from megatron_collab.runtime.process import BEST, FINISHED, RunStopped, global_rank
from megatron_collab.runtime.redact import redacted
from megatron_collab.types import Conversation, Finish, Group, Judgment, Missing, Reward, visible

logger = logging.getLogger(__name__)

VERSIONS = ("torch", "megatron-core", "sglang", "ray", "litellm", "transformers", "datasets", "hydra-core")


class RunFolder:
    """The folder run.dir, which one process uses at a time; only rank 0 writes.

    `start`: step of the first weights; `steps`: step of the final ones; `seconds`: duration of earlier starts;
    `keep_best`: see train.keep_best.
    """

    def __init__(
        self, record: RunRecord, start: int, steps: int, seconds: float = 0.0, keep_best: str | None = None
    ) -> None:
        self._keep_best = keep_best
        self.folder = Path(record.run.dir)
        self.leader = global_rank() == 0
        self._reported_reasons = set[str]()  # reasons of failures
        self._seconds_before = seconds
        self._lock = FileLock(self.folder / ".writer.lock")  # besides the run's own lock, which its first process holds
        self._evaluations = Evaluations(self.folder, steps)
        self._best: tuple[int, float] | None = None
        self._writers: Writers | None = None  # of rank 0
        if self.leader:
            self._begin(record, start)

    def _begin(self, record: RunRecord, start: int) -> None:
        """Lock the folder, record settings, their changes and later starts, resume evaluations, open the writers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=10)  # rank 0 of a run that was just killed may still be ending
        except Timeout:
            message = "rank 0 of an earlier start is still writing there; start again when it has ended"
            raise RunStopped(f"run.dir={self.folder}: {message}") from None
        (self.folder / FINISHED).unlink(missing_ok=True)  # result of a run with fewer steps or sets
        at = datetime.now(UTC).isoformat(timespec="seconds")
        rows = [{"time": at, "step": start}] if (self.folder / SETTINGS).is_file() else []  # started again
        rows += [
            {"time": at, "step": start, "setting": change.setting, "before": change.before, "after": change.after}
            for change in record.changes
        ]
        keep(self.folder / "history.jsonl", lambda row: True)
        if rows:
            append(self.folder / "history.jsonl", rows)
        replace(self.folder / SETTINGS, record.settings)
        self._evaluations.resume(start)
        self._mark_best(start)
        self._writers = Writers(record, start)
        for evaluation in self._evaluations.records.values():
            if evaluation["step"] == start:  # TensorBoard's writer drops it with the repeated steps
                self._write(start, evaluations.scalars(evaluation))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._writers:
            self._writers.close(failed=kind is not None)
        self._lock.release()

    def evaluation_due(self, set_name: str, step: int) -> str | None:
        """The name of the evaluation of `set_name`; None if it is recorded with all scores. Call on rank 0."""
        name = evaluations.name_of(set_name, evaluations.MODEL)
        return None if evaluations.is_complete(self._evaluations.records.get(name)) else name

    def evaluation(
        self,
        name: str,
        set_name: str,
        step: int,
        metrics: Mapping[str, float],
        groups: Sequence[Group] = (),
        against: str | None = None,
    ) -> None:
        """Record the evaluation `name` of `set_name`: means with intervals, and its conversations if any.

        `against`: the set that it is compared with, for the gap between them.
        """
        record = {"step": step, "set": set_name, "tasks": len(groups), **metrics}
        rows = [[*rows_of([group])] for group in groups]
        if rows:
            file, old_file = evaluations.files_of(self.folder, name)
            write(file, rows)
            old_file.unlink(missing_ok=True)
        self._evaluations.records[name] = record
        gaps = gap_metrics(self.folder, self._evaluations.records, name, against) if against else {}
        self._evaluations.records[name] = record = records.finite({**record, **gaps})
        replace(self.folder / evaluations.FILE, self._evaluations.records)
        self._write(step, evaluations.scalars(record))
        self._write_sample(step, evaluations.prefix(set_name), chain.from_iterable(rows))
        if scored := with_intervals(record):
            self._report_failures(f"evaluation {name}", groups)
        logger.info(f"evaluation {name} ({record['tasks']} tasks): {scored or _missing_reason(groups)}")
        for kind, label in (("gap", f"gap to {against}"), ("gap_growth", f"growth of the gap to {against}")):
            if text := with_intervals(record, kind):
                logger.info(f"evaluation {name}, {label}: {text}")
        if self._keep_best and not evaluations.is_complete(record):
            logger.warning(f"evaluation {name}: scores are missing, so train.keep_best does not compare it")
        self._mark_best(step)

    @property
    def complete(self) -> bool:
        """Whether no recorded evaluation lacks a score."""
        return all(map(evaluations.is_complete, self._evaluations.records.values()))

    def record_metric_kinds(self, opinions: Sequence[str], ground_truths: Sequence[str]) -> None:
        """Record which metrics a model decides, and which facts do."""
        replace(self.folder / metric_kinds.FILE, {"opinions": opinions, "ground_truths": ground_truths})

    def scalars(self) -> dict[str, float]:
        """The metrics of all evaluations; if a set has several, those of the last one."""
        metrics: dict[str, float] = {}
        for record in self._evaluations.records.values():
            metrics |= evaluations.scalars(record)
        return metrics

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write report.html and, last, result.json, which marks the run as finished. Call on rank 0."""
        from megatron_collab.observability import report  # imports matplotlib, which takes a second

        installed = {name: version for name in VERSIONS if (version := _installed_version(name))}
        versions = {"megatron-collab": __version__, **installed}
        report.write(self.folder)
        replace(self.folder / FINISHED, {**result, "versions": versions})

    def _seconds(self) -> float:
        """Seconds this run has taken over all its starts, each counted from the start of torchrun."""
        return self._seconds_before + process.age(os.getppid())

    def _mark_best(self, step: int) -> None:
        """Write which checkpoint train.keep_best keeps. The checkpoint of `step` may still be being written."""
        metric = self._keep_best

        def has_checkpoint(candidate: int) -> bool:
            return 0 < candidate == step or (self.folder / "checkpoints" / f"step_{candidate}").is_dir()

        best = self._evaluations.best(metric, has_checkpoint) if metric else None
        if best is None:
            (self.folder / BEST).unlink(missing_ok=True)
        elif best != self._best:
            self._best = best
            row = {"metric": metric, "value": best[1], "step": best[0], "checkpoint": f"checkpoints/step_{best[0]}"}
            replace(self.folder / BEST, row)
            logger.info(f"best by {metric}: {best[1]:.4g} at step {best[0]}, whose checkpoint is kept")

    def _report_failures(self, label: str, groups: Sequence[Group]) -> None:
        """Print the most frequent failure of conversations or scores, unless that reason was printed before."""
        rollouts = [(rollout, group.task.id) for group in groups for rollout in group.rollouts]
        failures = [(reason, task) for rollout, task in rollouts for reason in rollout.failures]
        counts = Counter(reason for reason, _ in failures)
        for reason, count in counts.most_common(1):
            if reason not in self._reported_reasons:
                self._reported_reasons.add(reason)
                first = next(task for why, task in failures if why == reason)
                more = f"; {len(counts) - 1} other reasons are in the transcripts" if len(counts) > 1 else ""
                counted = f"failed and counted as missing: {reason} ({count} times, e.g. task {first})"
                logger.warning(f"{label}: {counted}{more}")

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._writers:
            self._writers.scalars(step, metrics)

    def _write_sample(self, step: int, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Give the writers the first CONVERSATIONS of `rows`."""
        if self._writers and (first_rows := [*islice(rows, CONVERSATIONS)]):
            self._writers.conversations(step, name, redacted(first_rows))


def _installed_version(name: str) -> str | None:
    """The version of a distribution; None if it is not installed, as SGLang need not be for sft and dpo."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def scores(metrics: Mapping[str, float]) -> dict[str, float]:
    """The scores of a step or an evaluation, by metric."""
    return {name.removeprefix("score/"): value for name, value in metrics.items() if name.startswith("score/")}


def with_intervals(record: Mapping[str, Any], kind: str = "score") -> str:
    """The estimates of `kind` in the record of an evaluation, as "accuracy 0.50 [0.40, 0.60] (2 missing) …"."""
    texts = []
    for name, estimate in evaluations.estimates(record, kind).items():
        if not math.isnan(estimate.value):
            missing = record.get(f"missing/{name}") if kind == "score" else None
            texts.append(f"{name} {estimate.text()}" + (f" ({missing:.0f} missing)" if missing else ""))
    return " ".join(texts)


def _missing_reason(groups: Sequence[Group]) -> str:
    """Why an evaluation has no score: the first reason."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    values = [rollout.reward.value for rollout in rollouts]
    values += [score for rollout in rollouts for future in rollout.futures for score in future.scores.values()]
    reason = next((value.why for value in values if isinstance(value, Missing)), None)
    return "no rollout has a score" + (f"; the first: {reason}" if reason else "")


def rows_of(groups: Sequence[Group]) -> Iterator[dict[str, Any]]:
    """Every future of the groups as a JSON row: docs/reference/run-files.md describes the keys."""
    for group in groups:
        of_group = {"goal": group.task.goal, "user": group.user or group.task.user}
        for i, rollout in enumerate(group.rollouts):
            for j, future in enumerate(rollout.futures):
                conversation, reward = future.conversation, rollout.reward.value
                raw = [turn.text for turn in conversation.turns]
                cut = [at for at, turn in enumerate(conversation.turns) if turn.finish is Finish.LENGTH]
                notes = enumerate(message.private for message in conversation.messages)
                private = {str(at): dict(of_message) for at, of_message in notes if of_message}
                judgments = {name: _judgment(judgment) for name, judgment in future.judgments.items()}
                yield {
                    "task": group.task.id,
                    "rollout": i,
                    "future": j,
                    **({"played": group.task.played} if group.task.played else {}),  # as the user's first message
                    **(of_group if i == j == 0 else {}),
                    "reward": None if isinstance(reward, Missing) else reward,
                    **(_terms(rollout.reward) | _surprise(rollout.start) if j == 0 else {}),
                    **({"turns": raw} if any(text != visible(text) for text in raw) else {}),  # with their thoughts
                    **({"cut": cut} if cut else {}),  # turns that were cut at their token budget
                    **({"turn_rewards": conversation.turn_rewards} if any(conversation.turn_rewards) else {}),
                    "ending": conversation.ending,
                    "error": conversation.error,
                    "messages": [message.as_dict() for message in conversation.messages],
                    "scores": {
                        name: {"missing": score.why} if isinstance(score, Missing) else score
                        for name, score in future.scores.items()
                    },
                    **({"turn_scores": future.turn_scores} if future.turn_scores else {}),
                    **({"judgments": judgments} if judgments else {}),
                    **({"private": private} if private else {}),
                }


def _judgment(judgment: Judgment) -> dict[str, Any]:
    versions = {"versions": [*judgment.versions]} if judgment.versions else {}
    return {"reason": judgment.reason, "answer": judgment.answer, **versions}


def _terms(reward: Reward) -> dict[str, Any]:
    """What the reward was computed from, if it was: nothing of a missing reward, or of one of a malformed turn."""
    if not reward.parts:
        return {}
    terms: dict[str, Any] = records.finite({"parts": dict(reward.parts), "standard_error": reward.standard_error})
    return terms


def _surprise(start: Conversation) -> dict[str, float]:
    """Mean of -log p over the sampled tokens of the trained turns; nothing if no probability is known."""
    log_probs = [
        log_prob
        for turn in start.turns
        for at, (token, log_prob) in enumerate(zip(turn.token_ids, turn.log_probs, strict=True))
        if token >= 0 and not turn.forced[0] <= at < turn.forced[1]  # below 0: of an endpoint, which are only counted
    ]
    return {"surprise": round(-fmean(log_probs), 6)} if log_probs else {}


def keep(file: Path, is_kept: Callable[[Mapping[str, Any]], bool]) -> None:
    """Drop the rows of a JSONL file that `is_kept` rejects, and unreadable lines, whose number is printed.

    The last line is torn if the process was killed while it wrote it.
    """
    if not file.exists():
        return
    kept_lines, unreadable = [], 0
    for text, row in records.lines(file):
        if row is None or not records.of_step(row):
            unreadable += 1
        elif is_kept(row):
            kept_lines.append(text)
    if unreadable:
        logger.warning(f"{file}: skipped {records.unreadable_lines(unreadable)}")
    files.replace(file, "".join(text + "\n" for text in kept_lines))


def append(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append JSON lines, keys redacted."""
    with files.writing(file), file.open("a") as stream:
        for row in rows:
            stream.write(json.dumps(records.finite(redacted(row))) + "\n")


def replace(file: Path, content: Mapping[str, Any]) -> None:
    files.replace(file, json.dumps(redacted(content), indent=2) + "\n")
