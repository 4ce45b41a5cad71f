"""Versions of the judges' models that answered in a run, and an alarm if a judge begins to answer as another version.

Providers exchange models behind a name, and scores before and after may then not be comparable. judges.jsonl has a line
for the first answer of each version: step, metric, version, and the evaluation if it was given in one. The versions of
a metric's first step, or of its first evaluation, are the baseline; every later version raises one alarm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_collab.observability import records
from megatron_collab.types import Group

FILE = "judges.jsonl"
EXAMPLES = 2  # conversations that an alarm names
_MOST = 20  # versions of a judge: one that names another for every answer says nothing
_SHOWN = 3  # versions before a change that an alarm names, the last ones


@dataclass(frozen=True)
class JudgeChange:
    """The judge of a metric, `sentinel` judge/METRIC, answers as `value` and before as `baseline`: versions.

    `conversations`: examples that the new version judged, as TASK/ROLLOUT/FUTURE in the transcripts.
    """

    sentinel: str
    value: str
    baseline: str
    conversations: Sequence[str]

    def text(self) -> str:
        change = f"{self.sentinel} answers as {self.value}, before as {self.baseline}"
        advice = "scores before and after may not be comparable"
        return f"{change}: {advice}; conversations {', '.join(self.conversations)}"


class JudgeVersions:
    """The versions of the run in `folder`, by metric in the order of their first answers, as judges.jsonl has them."""

    def __init__(self, folder: Path) -> None:
        self._known: dict[str, list[str]] = {}
        for _, row in records.lines(folder / FILE):
            if row is not None and isinstance(row.get("metric"), str) and isinstance(row.get("version"), str):
                self._known.setdefault(row["metric"], []).append(row["version"])

    def watch(self, groups: Sequence[Group]) -> tuple[list[dict[str, str]], list[JudgeChange]]:
        """New lines of the file, without their step, and an alarm for each metric whose judge has changed."""
        examples: dict[str, dict[str, list[str]]] = {}  # by metric and version, the conversations that it judged
        for group in groups:
            for i, rollout in enumerate(group.rollouts):
                for j, future in enumerate(rollout.futures):
                    for metric, judgment in future.judgments.items():
                        for version in judgment.versions:
                            by_version = examples.setdefault(metric, {})
                            by_version.setdefault(version, []).append(f"{group.task.id}/{i}/{j}")
        lines, alarms = [], []
        for metric, by_version in sorted(examples.items()):
            known = self._known.setdefault(metric, [])
            fresh = [version for version in by_version if version not in known][: _MOST - len(known)]
            if known and fresh:
                places = [place for version in fresh for place in by_version[version][:EXAMPLES]]
                baseline = ", ".join(known[-_SHOWN:])
                alarms.append(JudgeChange(f"judge/{metric}", ", ".join(fresh), baseline, places[:EXAMPLES]))
            lines += [{"metric": metric, "version": version} for version in fresh]
            known += fresh
        return lines, alarms
