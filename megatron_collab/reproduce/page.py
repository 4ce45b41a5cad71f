"""The page of a study: our table beside the published one, what is equal and what is not, what each program took."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from megatron_collab.reproduce.plan import Given
from megatron_collab.reproduce.results import Measured
from megatron_collab.reproduce.study import Study, StudyTask

Found = Mapping[tuple[str, str], Sequence[Measured | None] | None]  # by task and arm; None: not evaluated yet


def page(study: Study, given: Given, found: Found, took: Sequence[tuple[str, float, float | None]]) -> str:
    """As Markdown. `took`: by program its minutes and, where models with a price were asked, its USD."""
    return "\n".join(_lines(study, given, found, took)) + "\n"


def _lines(study: Study, given: Given, found: Found, took: Sequence[tuple[str, float, float | None]]) -> Iterator[str]:
    yield f"# {study.title}"
    yield ""
    seeds = f"{given.seeds} seed{'s' * (given.seeds > 1)}"
    yield f"Model: `{given.model}`. Each problem is played with {seeds}; intervals of 95 % are over problems."
    for name in given.tasks:
        yield from _table(study, given, name, found)
    if study.equal:
        yield from ("", "## What is equal, where no setting below changes it", "")
        yield from (f"- {line}" for line in study.equal)
    yield from ("", "## What is not", "", *(f"- {line}" for line in study.different))
    yield from (f"- {line}" for line in _changed(study, given, found))
    yield from ("", "## What it took", "", "| program | minutes | USD |", "|---|---|---|")
    for title, minutes, usd in took:
        yield f"| {title} | {minutes:.1f} | {'' if usd is None else f'{usd:.2f}'} |"
    yield f"| all | {sum(row[1] for row in took):.1f} | {sum(row[2] or 0 for row in took):.2f} |"


def _table(study: Study, given: Given, name: str, found: Found) -> Iterator[str]:
    task = study.tasks[name]
    published = any(name in arm.published for arm in study.arms.values())
    heads = [head for column in task.columns for head in (column.name, *(["published"] if published else []))]
    yield from ("", f"## {task.title}", "", f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|")
    for arm in given.arms:
        values = found.get((name, arm)) or [None] * len(task.columns)
        printed = study.arms[arm].published.get(name, [])
        cells = []
        for number, value in enumerate(values):
            cells.append(_cell(value))
            if published:
                cells.append(f"{printed[number]:g}" if number < len(printed) else "")
        yield f"| {study.arms[arm].title} | {' | '.join(cells)} |"


def _cell(value: Measured | None) -> str:
    if value is None:
        return "-"
    return _number(value.value) if math.isnan(value.half) else f"{_number(value.value)} ± {_number(value.half)}"


def _number(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"


def _changed(study: Study, given: Given, found: Found) -> Iterator[str]:
    """What this command has made different, and what the evaluations themselves say."""
    if given.model != study.model:
        yield f"The model is `{given.model}`; the study's is `{study.model}`."
    if given.settings:
        yield f"Settings of the command line: `{' '.join(given.settings)}`."
    left = [study.arms[arm].title for arm in study.arms if arm not in given.arms]
    if left:
        yield f"Not evaluated: {', '.join(left)}."
    if given.build and not all(study.tasks[name].build for name in given.tasks):
        yield "Training data were built anew, by the program of `build-dataset`, and are not the published ones."
    for name in given.tasks:
        yield from _counted(study.tasks[name], [found.get((name, arm)) for arm in given.arms])


def _counted(task: StudyTask, rows: Sequence[Sequence[Measured | None] | None]) -> Iterator[str]:
    values = [value for row in rows for value in row or () if value]
    if values and (most := max(value.problems for value in values)) < task.eval_tasks:
        yield f"{task.title}: {most} problems were evaluated, and {task.eval_tasks} were to be."
    for column in range(len(task.columns)):
        missing = sum(value.missing for row in rows if row and (value := row[column]))
        if missing:
            yield f"{task.title}: {missing} conversations have no {task.columns[column].name}; they are left out."
