"""The page of a study: our table beside the published one, equal and different settings, cost of each program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_collab.reproduce.plan import StudyOptions
from megatron_collab.reproduce.results import ArmResult, Results, reference_of
from megatron_collab.reproduce.study import Study, StudyTask


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
    yield f"Model: `{options.model}`. Each problem is played with {seeds}; intervals of 95 % are over problems:"
    yield "Wilson's of a share, a bootstrap of other means, paired by problem of gains."
    for name in options.tasks:
        yield from _table(study, options, name, results)
        yield from _gains(study, options, name, results)
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
    heads = list[str]()
    for column in task.columns:
        lacks = column.lacks((*study.settings, *task.settings, *options.settings))
        heads.append(f"{column.name}, own scale" if lacks else column.name)
        heads += [f"published{', other scale' if lacks else ''}"] if published else []
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


def _gains(study: Study, options: StudyOptions, name: str, results: Results) -> Iterator[str]:
    """Differences to the arm that each one starts from, where both are evaluated."""
    columns, rows = study.tasks[name].columns, list[str]()
    for arm in options.arms:
        reference = reference_of(study, arm)
        values, compared = results.get((name, arm)), results.get((name, reference)) if reference else None
        if reference and values and compared:
            pairs = zip(values, compared, strict=True)
            cells = [value.gain(other).text("{:+.2f}".format) if value and other else "-" for value, other in pairs]
            rows.append(f"| {study.arms[arm].title} | {study.arms[reference].title} | {' | '.join(cells)} |")
    if rows:
        heads = ["", "over", *(column.name for column in columns)]
        yield from ("", "Gains, paired by problem:", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *rows)


def _cell(result: ArmResult | None) -> str:
    return result.estimate.text(_number) if result else "-"


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
        task = study.tasks[name]
        for column in task.columns:
            if lacks := column.lacks((*study.settings, *task.settings, *options.settings)):
                settings = " and ".join(f"`{setting}=AUTHORS.j2`" for setting in lacks)
                yield f"{task.title}: {column.name} is on our own scale; the published one needs {settings}."
        yield from _shortfalls(task, [results.get((name, arm)) for arm in options.arms])


def _shortfalls(task: StudyTask, rows: Sequence[Sequence[ArmResult | None] | None]) -> Iterator[str]:
    values = [value for row in rows for value in row or () if value]
    if values and (most := max(len(value.scores) for value in values)) < task.eval_tasks:
        yield f"{task.title}: {most} problems were evaluated, and {task.eval_tasks} were to be."
    for column in range(len(task.columns)):
        missing = sum(value.missing for row in rows if row and (value := row[column]))
        if missing:
            yield f"{task.title}: {missing} conversations have no {task.columns[column].name}; they are left out."
