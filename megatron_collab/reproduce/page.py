"""The page of a study: our table beside the published one, equal and different settings, cost of each program."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from megatron_collab.reproduce.plan import StudyOptions
from megatron_collab.reproduce.results import Estimate
from megatron_collab.reproduce.study import Study, StudyTask

Results = Mapping[tuple[str, str], Sequence[Estimate | None] | None]  # by task and arm; None: not evaluated yet


def page(
    study: Study, options: StudyOptions, results: Results, costs: Sequence[tuple[str, float, float | None]]
) -> str:
    """The page as Markdown. `took`: (program, minutes, USD if it called models that have a price)."""
    return "\n".join(_lines(study, options, results, costs)) + "\n"


def _lines(
    study: Study, options: StudyOptions, results: Results, costs: Sequence[tuple[str, float, float | None]]
) -> Iterator[str]:
    yield f"# {study.title}"
    yield ""
    seeds = f"{options.seeds} seed{'s' * (options.seeds > 1)}"
    yield f"Model: `{options.model}`. Each problem is played with {seeds}; intervals of 95 % are over problems."
    for name in options.tasks:
        yield from _table(study, options, name, results)
    if study.equal:
        yield from ("", "## What is equal, where no setting below changes it", "")
        yield from (f"- {line}" for line in study.equal)
    yield from ("", "## What is not", "", *(f"- {line}" for line in study.different))
    yield from (f"- {line}" for line in _differences(study, options, results))
    yield from ("", "## What it took", "", "| program | minutes | USD |", "|---|---|---|")
    for title, minutes, usd in costs:
        yield f"| {title} | {minutes:.1f} | {'' if usd is None else f'{usd:.2f}'} |"
    yield f"| all | {sum(row[1] for row in costs):.1f} | {sum(row[2] or 0 for row in costs):.2f} |"


def _table(study: Study, options: StudyOptions, name: str, results: Results) -> Iterator[str]:
    task = study.tasks[name]
    published = any(name in arm.published for arm in study.arms.values())
    heads = [head for column in task.columns for head in (column.name, *(["published"] if published else []))]
    yield from ("", f"## {task.title}", "", f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|")
    for arm in options.arms:
        values = results.get((name, arm)) or [None] * len(task.columns)
        printed = study.arms[arm].published.get(name, [])
        cells = []
        for number, value in enumerate(values):
            cells.append(_cell(value))
            if published:
                cells.append(f"{printed[number]:g}" if number < len(printed) else "")
        yield f"| {study.arms[arm].title} | {' | '.join(cells)} |"


def _cell(value: Estimate | None) -> str:
    if value is None:
        return "-"
    return _number(value.value) if math.isnan(value.half) else f"{_number(value.value)} ± {_number(value.half)}"


def _number(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"


def _differences(study: Study, options: StudyOptions, results: Results) -> Iterator[str]:
    """Differences that come from this command's options, and those that the evaluations show."""
    if options.model != study.model:
        yield f"The model is `{options.model}`; the study's is `{study.model}`."
    if options.settings:
        yield f"Settings of the command line: `{' '.join(options.settings)}`."
    not_evaluated = [study.arms[arm].title for arm in study.arms if arm not in options.arms]
    if not_evaluated:
        yield f"Not evaluated: {', '.join(not_evaluated)}."
    if options.build and not all(study.tasks[name].build for name in options.tasks):
        yield "Training data were built anew, by the program of `build-dataset`, and are not the published ones."
    for name in options.tasks:
        yield from _shortfalls(study.tasks[name], [results.get((name, arm)) for arm in options.arms])


def _shortfalls(task: StudyTask, rows: Sequence[Sequence[Estimate | None] | None]) -> Iterator[str]:
    values = [value for row in rows for value in row or () if value]
    if values and (most := max(value.problems for value in values)) < task.eval_tasks:
        yield f"{task.title}: {most} problems were evaluated, and {task.eval_tasks} were to be."
    for column in range(len(task.columns)):
        missing = sum(value.missing for row in rows if row and (value := row[column]))
        if missing:
            yield f"{task.title}: {missing} conversations have no {task.columns[column].name}; they are left out."
