"""A rubric as data: criteria with points in the task's row, each of which a judge finds met or not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_collab.data.parsing import json_in
from megatron_collab.data.readers import CRITERIA
from megatron_collab.llm.answer import Field
from megatron_collab.reward.explanations import gather_in_order
from megatron_collab.reward.metrics import THOUGHT, Metric, judges_prompt, prompt
from megatron_collab.settings import option
from megatron_collab.types import Conversation, Missing, Score, Task

# The names of a criterion's text and points in HealthBench and in Rubrics as Rewards.
_TEXTS, _POINTS = ("criterion", "description"), ("points", "weight")
_VARIABLES = ("criteria",)


class Criterion(NamedTuple):
    """What a good conversation does; with negative points, what it must not do."""

    text: str
    points: float


class Rubric(Metric):
    """Points of the criteria that the judge finds met, over the sum of the positive points: at most 1.

    The criteria are a list in the task's metadata: {"criterion": text, "points": number} as in HealthBench, or
    {"description": text, "weight": number} as in Rubrics as Rewards. Criteria with negative points are faults, so the
    score may be negative. With a panel, a criterion counts by the share of judges that find it met.
    """

    @dataclass(frozen=True)
    class Options:
        column: str | None = option(None, "key of the metadata with the criteria; null: rubric, else rubrics")
        calls: str = option("all", "one call for all criteria, or one for each", choices=("all", "each"))
        most: int = option(32, "a task with more criteria is refused", ge=1, le=1000)
        model: str | None = option(None, "LiteLLM model of the judge; null: reward.judge.model")
        panel: list[str] = option([], "LiteLLM models that judge beside it")
        prompt: str | None = option(None, "FILE.j2, which shows {{ criteria }}; null: the built-in one")

        def __post_init__(self) -> None:
            if "criteria" not in judges_prompt(self.prompt, "rubric", _VARIABLES).used:
                raise ValueError(f"prompt={self.prompt}: lacks {{{{ criteria }}}}; add it")

    @classmethod
    def judged(cls, options: Any) -> bool:
        return True

    @classmethod
    def questions(cls, options: Any) -> int:
        return int(options.most) if options.calls == "each" else 1

    @classmethod
    def lacks(cls, options: Any, task: Task) -> str | None:
        column = _column(options, task)
        return None if task.metadata.get(column) else f"criteria in metadata.{column}"

    @classmethod
    def check_task(cls, options: Any, task: Task) -> None:
        criteria = criteria_of(options, task)
        rubric = judges_prompt(options.prompt, "rubric", _VARIABLES)
        prompt(rubric, task, Conversation(task.messages, ()), (), {"criteria": _listed(criteria)})

    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        criteria = criteria_of(self.options, task)
        if not criteria:
            return None
        parts = [criteria] if self.options.calls == "all" else [[criterion] for criterion in criteria]
        answers = await gather_in_order([self._verdicts(task, conversation, part) for part in parts])
        verdicts = list[float]()
        for answer in answers:
            if isinstance(answer, Missing):
                return answer
            verdicts += answer
        earned = sum(criterion.points * verdict for criterion, verdict in zip(criteria, verdicts, strict=True))
        return earned / sum(criterion.points for criterion in criteria if criterion.points > 0)

    async def _verdicts(
        self, task: Task, conversation: Conversation, criteria: Sequence[Criterion]
    ) -> list[float] | Missing:
        """For each of the criteria the share of judges, 0 or 1 of a single one, that find it met."""
        names = [f"criterion_{number}" for number in range(1, len(criteria) + 1)]
        fields = (THOUGHT, *(Field(name, bool) for name in names))
        rubric = judges_prompt(self.options.prompt, "rubric", _VARIABLES)
        answer = await self.ask_judge(rubric, task, conversation, fields, {"criteria": _listed(criteria)})
        return answer if isinstance(answer, Missing) else [float(answer[name]) for name in names]


def _column(options: Any, task: Task) -> str:
    """The key of the task's metadata with the criteria."""
    return options.column or next((name for name in CRITERIA if task.metadata.get(name)), CRITERIA[0])


def criteria_of(options: Any, task: Task) -> list[Criterion]:
    """The criteria in the task's metadata. Raises ValueError like `read_criteria`."""
    column = _column(options, task)
    return read_criteria(task.metadata.get(column) or [], column, options.most)


def read_criteria(entries: Any, column: str, most: int) -> list[Criterion]:
    """The criteria of a task's row, a list or its JSON text.

    Raises ValueError, with the remedy, for other data and without positive points.
    """
    entries = json_in(entries, entries) if isinstance(entries, str) else entries
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise ValueError(f"metadata.{column}: is no list of criteria; give a list of objects with criterion and points")
    if len(entries) > most:
        raise ValueError(f"metadata.{column}: has {len(entries)} criteria; set the metric's setting most to that many")
    criteria = [_criterion(entry, f"metadata.{column}[{place}]") for place, entry in enumerate(entries)]
    if criteria and not any(criterion.points > 0 for criterion in criteria):
        raise ValueError(f"metadata.{column}: no criterion has positive points; add one for something good")
    return criteria


def _criterion(entry: Any, place: str) -> Criterion:
    texts, points = (
        [entry[name] for name in names if entry.get(name) is not None] if isinstance(entry, Mapping) else []
        for names in (_TEXTS, _POINTS)
    )
    if len(texts) != 1 or not isinstance(texts[0], str) or not texts[0].strip():
        raise ValueError(f"{place}: has no text; give one of {' and '.join(_TEXTS)}")
    number = points[0] if len(points) == 1 else None
    if isinstance(number, bool) or not isinstance(number, int | float) or not number or not math.isfinite(number):
        raise ValueError(f"{place}: has no points; give one of {' and '.join(_POINTS)}, a number other than 0")
    return Criterion(texts[0], float(number))


def _listed(criteria: Sequence[Criterion]) -> str:
    texts = [" ".join(criterion.text.split()) for criterion in criteria]  # a line each, so that none imitates another
    return "\n".join(f"criterion_{number}: {text}" for number, text in enumerate(texts, 1))
