"""report.html: the run as one self-contained page, made from the files in its folder."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from jinja2 import Environment, PackageLoader
from matplotlib import rc_context
from matplotlib.figure import Figure

from megatron_collab.config import SETTINGS
from megatron_collab.observability import evaluations
from megatron_collab.observability.evaluations import AFTER, BEFORE
from megatron_collab.observability.records import lines, number, of_step, unreadable_lines
from megatron_collab.observability.writers import CONVERSATIONS, Rows
from megatron_collab.runtime import files

logger = logging.getLogger(__name__)

Series = dict[str, list[tuple[int, float]]]


def write(folder: Path) -> Path:
    """Write `folder`/report.html from the files of the run. Returns its path."""
    pages = Environment(
        loader=PackageLoader("megatron_collab.observability", "templates"), autoescape=True, trim_blocks=True
    )
    pages.filters["score"] = _score
    metrics = _rows(folder / "metrics.jsonl", of_step)
    records, fault = evaluations.readable(folder)
    if fault:
        _warn(folder / evaluations.FILE, fault)
    html = pages.get_template("report.html.j2").render(
        name=str(folder),
        steps=len(metrics),
        config=settings.read_text(errors="replace") if (settings := folder / SETTINGS).is_file() else "",
        sets=[*comparisons(folder, records)],
        curves=[(title, _svg(series, errors)) for title, series, errors in curves(metrics, records)],
    )
    report = folder / "report.html"
    files.replace(report, html.encode(errors="replace").decode())  # without halves of surrogate pairs
    return report


def comparisons(folder: Path, records: Mapping[str, evaluations.Record]) -> Iterator[dict[str, Any]]:
    """Compare the first and the last evaluation with conversations of each set of data.eval: names, table, pairs."""
    by_set: dict[str, list[str]] = {}
    for name in records or (BEFORE, AFTER):  # earlier versions wrote conversations without records
        if evaluations.file_of(folder, name).exists():
            by_set.setdefault(name.rpartition("/")[0], []).append(evaluations.moment_of(name))
    for set_name, moments in by_set.items():
        shown_moments = [moments[0], *moments[1:][-1:]]
        conversation_files = [
            evaluations.file_of(folder, evaluations.name_of(set_name, moment)) for moment in shown_moments
        ]
        conversations = [_rows(file, _is_conversation) for file in conversation_files]
        first, last = conversations[0], conversations[-1] if len(conversations) > 1 else []
        yield {
            "name": set_name,
            "moments": [moment.replace("_", " ") for moment in shown_moments],
            "table": table(first, last),
            "counts": [len(_by_task(rows)) for rows in conversations],
            "pairs": pairs(first, last),
        }


def table(before: Rows, after: Rows) -> list[tuple[str, str, str]]:
    """(metric, before, after): means over the tasks of an evaluation, with standard errors."""
    names = sorted({name for row in (*before, *after) for name in row["scores"]})
    return [(name, _mean(before, name), _mean(after, name)) for name in names]


def pairs(before: Rows, after: Rows) -> list[dict[str, Any]]:
    """The first conversation about each task before and after, changed ones first; some of `before` if no `after`."""
    firsts, later = ([task[0] for task in _by_task(rows)] for rows in (before, after))
    if not after:
        return [{"task": row["task"], "rows": [row]} for row in firsts[:CONVERSATIONS]]
    after_by_task = {row["task"]: row for row in later}
    matched = [
        {"task": row["task"], "rows": [row, after_by_task[row["task"]]]}
        for row in firsts
        if row["task"] in after_by_task
    ]
    matched.sort(key=lambda pair: pair["rows"][0]["messages"] == pair["rows"][1]["messages"])
    return matched[:CONVERSATIONS]


def curves(metrics: Rows, records: Mapping[str, evaluations.Record] = {}) -> list[tuple[str, Series, Series]]:
    """The plots: title, the series that share a pair of axes, and their standard errors if they have any.

    Plots without data are left out.
    """
    scores, errors = _series(metrics, "score/"), _series(metrics, "reward_se")
    tested = _series([{"step": record["step"], **evaluations.scalars(record)} for record in records.values()], "eval/")
    test_errors = {name: tested[f"{name}_se"] for name in tested if f"{name}_se" in tested}
    excluded = {f"{name}_se" for name in test_errors} | {name for name in tested if "ending/" in name}
    means = {name: points for name, points in tested.items() if name not in excluded}
    plots = [
        *_by_scale("Evaluation, with standard errors", means, test_errors),
        (
            "Reward of the trained turn, with the standard error from its futures",
            _series(metrics, "reward"),
            {"reward": errors.get("reward_se", [])},
        ),
        *_by_scale("Scores of the rollouts", scores, {}),
        ("Loss", _series(metrics, "loss"), {}),
        ("KL to the first policy", _series(metrics, "kl"), {}),
        ("Tokens of the trained turn", _series(metrics, "turn_tokens"), {}),
        ("Seconds by stage", _series(metrics, "seconds/"), {}),
    ]
    return [(title, series, errors) for title, series, errors in plots if series]


def _by_scale(title: str, scores: Series, errors: Series) -> Iterator[tuple[str, Series, Series]]:
    """Series between 0 and 1 share axes; every other series has its own."""
    rates = {name: points for name, points in scores.items() if all(0 <= value <= 1 for _, value in points)}
    yield title, rates, errors
    for name in scores:
        if name not in rates:
            yield f"{title}: {name}", {name: scores[name]}, errors


def _series(metrics: Rows, name: str) -> Series:
    """Points (step, value) of the metric `name`, or of every metric below it if it ends in a slash."""
    series: Series = {}
    for row in metrics:
        for key, value in row.items():
            if number(value) is not None and (key == name or (name.endswith("/") and key.startswith(name))):
                series.setdefault(key.removeprefix(name) or key, []).append((row["step"], value))
    return series


def _svg(series: Series, errors: Series) -> str:
    span = {step for points in series.values() for step, _ in points}
    with rc_context({"svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(6, 2.6), layout="constrained")
        axes = figure.subplots()
        for name, points in series.items():
            steps, values = zip(*points, strict=True)
            style = "-" if 2 * len(steps) > len(span) > 1 else "."  # points if most steps have no value
            label = name.encode(errors="replace").decode().replace("$", r"\$")  # else matplotlib reads a formula
            (drawn,) = axes.plot(steps, values, style, label=label, linewidth=1.2)
            if widths := dict(errors.get(name, [])):
                low, high = ([value + sign * widths.get(step, 0.0) for step, value in points] for sign in (-1, 1))
                axes.fill_between(steps, low, high, alpha=0.25, color=drawn.get_color())
        if len(series) > 1:
            axes.legend(frameon=False, fontsize=7)
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata={"Date": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]


def _mean(rows: Rows, name: str) -> str:
    """Mean over tasks of the mean over a task's conversations, which are not independent of one another.

    With its standard error, and the number of conversations that lack this score.
    """
    lacking = sum(isinstance(row["scores"].get(name), Mapping) for row in rows)
    missing = f" ({lacking} missing)" if lacking else ""
    tasks = ([row["scores"].get(name) for row in task] for task in _by_task(rows))
    numbers = ([score for score in scores if number(score) is not None] for scores in tasks)
    values = [fmean(task_scores) for task_scores in numbers if task_scores]
    if not values:
        return f"\u2013{missing}"
    error = f" \u00b1 {stdev(values) / math.sqrt(len(values)):.3f}" if len(values) > 1 else ""
    return f"{fmean(values):.3f}{error}{missing}"


def _by_task(rows: Rows) -> list[list[Mapping[str, Any]]]:
    """The rows by task; rows of a task are consecutive, with its first conversation first."""
    tasks: list[list[Mapping[str, Any]]] = []
    for row in rows:
        if row.get("rollout", 0) == 0 or not tasks:
            tasks.append([])
        tasks[-1].append(row)
    return tasks


def _score(value: Any) -> str:
    """A conversation's score as text, or why it is missing."""
    if isinstance(value, dict):
        return f"missing ({value.get('missing')})"
    return str(value) if number(value) is None else f"{value:g}"


def _is_conversation(row: Mapping[str, Any]) -> bool:
    messages, scores = row.get("messages"), row.get("scores")
    has_messages = isinstance(messages, list) and all(isinstance(message, dict) for message in messages)
    return has_messages and isinstance(scores, dict) and isinstance(row.get("task"), str)


def _rows(file: Path, fit: Callable[[Mapping[str, Any]], bool]) -> Rows:
    """The rows that `fit`. The file may be torn: a running run may not have finished its last line."""
    rows = [row for _, row in lines(file)]
    valid = [row for row in rows if row is not None and fit(row)]
    if len(valid) < len(rows):
        _warn(file, f"skipped {unreadable_lines(len(rows) - len(valid))}")
    return valid


def _warn(file: Path, fault: str) -> None:
    logger.warning(f"{file}: {fault}")
