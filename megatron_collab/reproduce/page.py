"""The page of a study: tables of results and differences, what is equal and what differs, cost of each program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isnan, nan

from megatron_collab.reproduce.plan import StudyOptions
from megatron_collab.reproduce.results import (
    ArmResult,
    Effort,
    Efforts,
    Results,
    online_pairs,
    passes_of,
    predictions_of,
    reference_of,
)
from megatron_collab.reproduce.study import Column, Study, StudyTask
from megatron_collab.statistics import Estimate

EQUAL = 1.1  # arms count as equal if the largest number is at most this multiple of the smallest
EFFORTS = {"optimizer_steps": "optimizer steps", "sampled_tokens": "sampled tokens"}
Rows = Mapping[tuple[str, str], Sequence[Estimate | None]]  # of a table of differences, by pair of arms
Costs = Sequence[tuple[str, float, float | None]]  # program, minutes, USD if it called models that have a price


def page(study: Study, options: StudyOptions, results: Results, efforts: Efforts, costs: Costs) -> str:
    """The page as Markdown."""
    return "\n".join(_lines(study, options, results, efforts, costs)) + "\n"


def _lines(study: Study, options: StudyOptions, results: Results, efforts: Efforts, costs: Costs) -> Iterator[str]:
    yield f"# {study.title}"
    yield ""
    repetitions = f"{options.seeds} seed{'s' * (options.seeds > 1)}"
    yield f"Model: `{options.model}`. Each problem is played with {repetitions}; intervals are of 95 %."
    if options.train_seeds > 1:
        yield f"Each arm is trained {options.train_seeds} times. Intervals are over trainings and problems (Student's t"
        yield "with the variances of both); differences are paired by problem within a training."
    else:
        yield "Each arm is trained once. Intervals are over problems, not over trainings: Wilson's of a share, a"
        yield "bootstrap of other means; differences are paired by problem."
    for name in options.tasks:
        yield from _table(study, options, name, results, efforts)
        yield from _passes(study, options, name, results)
        yield from _gains(study, options, name, results)
        yield from _comparison(study, options, name, results, efforts)
    if study.equal:
        yield from ("", "## What is equal, unless a setting below changes it", "")
        yield from (f"- {line}" for line in study.equal)
    yield from ("", "## What differs", "", *(f"- {line}" for line in study.different))
    yield from (f"- {line}" for line in _differences(study, options, results))
    yield from ("", "## Time and cost", "", "| program | minutes | USD |", "|---|---|---|")
    for title, minutes, usd in costs:
        yield f"| {title} | {minutes:.1f} | {'' if usd is None else f'{usd:.2f}'} |"
    yield f"| all | {sum(row[1] for row in costs):.1f} | {sum(row[2] or 0 for row in costs):.2f} |"


def _table(study: Study, options: StudyOptions, name: str, results: Results, efforts: Efforts) -> Iterator[str]:
    task = study.tasks[name]
    published = any(name in arm.published for arm in study.arms.values())
    heads = list[str]()
    for column in task.columns:
        lacks = _lacks(study, options, task, column)
        heads.append(f"{column.name}, own scale" if lacks else column.name)
        heads += [f"published{', other scale' if lacks else ''}"] if published else []
    heads += EFFORTS.values()
    yield from ("", f"## {task.title}", "", f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|")
    for title, predicted in predictions_of(study, options, name)[0].items():
        cells = []
        for column in task.columns:
            prediction = Estimate(predicted.get(column.key, nan))
            score = column.scaled(prediction, not _lacks(study, options, task, column)).value
            cells.append("" if isnan(score) else _number(score))
            cells += [""] if published else []
        yield f"| {title}, predicted | {' | '.join([*cells, *('' for _ in EFFORTS)])} |"
    for arm in options.arms:
        values = results.get((name, arm)) or [None] * len(task.columns)
        printed = study.arms[arm].published.get(name, [])
        cells = []
        for number, value in enumerate(values):
            cells.append(_cell(value))
            if published:
                cells.append(f"{printed[number]:g}" if number < len(printed) else "")
        cells += [_whole(getattr(efforts[name, arm], field)) for field in EFFORTS]
        yield f"| {study.arms[arm].title} | {' | '.join(cells)} |"


def _passes(study: Study, options: StudyOptions, name: str, results: Results) -> Iterator[str]:
    """pass@k and pass^k of the columns that are shares, if problems were played with several seeds."""
    rows = dict[str, dict[str, Estimate]]()
    for arm in options.arms:
        columns = zip(study.tasks[name].columns, results.get((name, arm)) or (), strict=False)
        by_column = {column.name: passes_of(result) for column, result in columns if result}
        rows[arm] = {f"{column} {label}": e for column, passes in by_column.items() for label, e in passes.items()}
    heads = [*dict.fromkeys(head for passes in rows.values() for head in passes)]
    if not heads:
        return
    title = "The probability that one of k conversations about a problem succeeds (pass@k), and that all do (pass^k):"
    yield from ("", title, "", f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|")
    for arm, passes in rows.items():
        cells = [passes[head].text("{:.2f}".format) if head in passes else "-" for head in heads]
        yield f"| {study.arms[arm].title} | {' | '.join(cells)} |"


def _gains(study: Study, options: StudyOptions, name: str, results: Results) -> Iterator[str]:
    """Gains of the arms over those that they start from."""
    pairs = [(arm, reference) for arm in options.arms if (reference := reference_of(study, arm))]
    if rows := _gains_of(results, name, pairs):
        yield from _difference_table(study, name, "Gains", "over", rows)


def _comparison(study: Study, options: StudyOptions, name: str, results: Results, efforts: Efforts) -> Iterator[str]:
    """How online arms differ: in what they were trained with, and pair by pair in their results."""
    pairs = online_pairs(options, name, efforts)
    if not pairs:
        return
    arms = dict.fromkeys(arm for pair in pairs for arm in reversed(pair))
    yield from ("", equality({study.arms[arm].title: efforts[name, arm] for arm in arms}))
    rows = _gains_of(results, name, pairs)
    if not rows:
        return
    yield from _difference_table(study, name, "Differences of online arms", "less", rows)
    yield from ("", "Among pairs that are equal, about one interval in twenty excludes 0 by chance.", "")
    for number, column in enumerate(study.tasks[name].columns):
        of_column = {pair: gain for pair, gains in rows.items() if (gain := gains[number])}
        yield f"- {column.name}: {_verdict(study, of_column)}"


def _verdict(study: Study, gains: Mapping[tuple[str, str], Estimate]) -> str:
    """Which pairs of arms differ in a column."""
    apart = list[str]()
    for (first, second), gain in gains.items():
        if gain.low > 0 or gain.high < 0:
            above, below = (first, second) if gain.low > 0 else (second, first)
            apart.append(f"{study.arms[above].title} above {study.arms[below].title}")
    return "; ".join(apart) or "no pair is told apart"


def equality(efforts: Mapping[str, Effort]) -> str:
    """Whether arms (by title) took the same number of optimizer steps and sampled tokens, within 10 %."""
    arms, unequal = f"({', '.join(efforts)})", list[str]()
    for field, label in EFFORTS.items():
        numbers = {title: getattr(effort, field) or 0.0 for title, effort in efforts.items()}
        least, most = min(numbers, key=numbers.__getitem__), max(numbers, key=numbers.__getitem__)
        if numbers[most] > EQUAL * numbers[least]:
            unequal.append(f"{label} ({least} {_whole(numbers[least])}, {most} {_whole(numbers[most])})")
    if unequal:
        return f"The online arms {arms} are not equal: they differ by more than 10 % in {' and '.join(unequal)}."
    return f"The online arms {arms} are equal within 10 % in {' and '.join(EFFORTS.values())}."


def _gains_of(results: Results, name: str, pairs: Iterable[tuple[str, str]]) -> Rows:
    """By pair of arms that are both evaluated, the gain of the first over the second, by column."""
    rows = dict[tuple[str, str], list[Estimate | None]]()
    for arm, other in pairs:
        values, compared = results.get((name, arm)), results.get((name, other))
        if values and compared:
            columns = zip(values, compared, strict=True)
            rows[arm, other] = [value.gain(before) if value and before else None for value, before in columns]
    return rows


def _difference_table(study: Study, name: str, title: str, word: str, rows: Rows) -> Iterator[str]:
    heads = ["", word, *(column.name for column in study.tasks[name].columns)]
    yield from ("", f"{title}, paired by problem:", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|")
    for (arm, other), gains in rows.items():
        cells = [gain.text("{:+.2f}".format) if gain else "-" for gain in gains]
        yield f"| {study.arms[arm].title} | {study.arms[other].title} | {' | '.join(cells)} |"


def _lacks(study: Study, options: StudyOptions, task: StudyTask, column: Column) -> list[str]:
    return column.lacks((*study.settings, *task.settings, *options.settings))


def _whole(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


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
        yield from (f"{task.title}: {fault}." for fault in predictions_of(study, options, name)[1])
        for arm in options.arms:
            trainings = max((len(value.scores) for value in results.get((name, arm)) or () if value), default=0)
            if 0 < trainings < options.train_seeds:
                evaluated = f"{trainings} of {options.train_seeds} trainings"
                yield f"{task.title}: {evaluated} of {study.arms[arm].title} are evaluated."
        for column in task.columns:
            if lacks := _lacks(study, options, task, column):
                settings = " and ".join(f"`{setting}=AUTHORS.j2`" for setting in lacks)
                yield f"{task.title}: {column.name} is on our own scale; the published one needs {settings}."
        yield from _shortfalls(task, [results.get((name, arm)) for arm in options.arms])


def _shortfalls(task: StudyTask, rows: Sequence[Sequence[ArmResult | None] | None]) -> Iterator[str]:
    values = [value for row in rows for value in row or () if value]
    if values and (most := max(value.problems for value in values)) < task.eval_tasks:
        yield f"{task.title}: only {most} of {task.eval_tasks} problems were evaluated."
    for column in range(len(task.columns)):
        missing = sum(value.missing for row in rows if row and (value := row[column]))
        if missing:
            yield f"{task.title}: {missing} conversations have no {task.columns[column].name} and are left out."
