"""report.html: the run as one self-contained page, made from the files in its folder."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
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
from megatron_collab.statistics import difference, with_passes

logger = logging.getLogger(__name__)

Series = dict[str, list[tuple[int, float]]]
Bands = dict[str, dict[int, tuple[float, float]]]  # by series and step: low, high


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
        curves=[(title, _svg(series, bands)) for title, series, bands in curves(metrics, records)],
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


def table(before: Rows, after: Rows) -> list[tuple[str, str, str, str]]:
    """(metric, before, after, paired change): means over the tasks of an evaluation, with 95 % intervals.

    With several samples of a task, shares also have rows for pass@k and pass^k.
    """
    names = sorted({name for row in (*before, *after) for name in row["scores"]})
    return [row for name in names for row in _metric_rows(name, before, after)]


def _metric_rows(name: str, before: Rows, after: Rows) -> Iterator[tuple[str, str, str, str]]:
    sides = [[*_scores_by_task(rows, name)] for rows in (before, after)]
    estimates = [with_passes(name, [values for _, values in side]) for side in sides]
    for label in dict.fromkeys((*estimates[0], *estimates[1])):
        cells = []
        for rows, columns in zip((before, after), estimates, strict=True):
            estimate = columns.get(label)
            shown = estimate.text() if estimate else "\u2013"
            lacking = sum(isinstance(row["scores"].get(name), Mapping) for row in rows) if label == name else 0
            cells.append(shown + (f" ({lacking} missing)" if lacking else ""))
        change = difference(*map(dict, sides)).text("{:+.3f}".format) if label == name and all(sides) else "\u2013"
        yield label, cells[0], cells[1], change


def _scores_by_task(rows: Rows, name: str) -> Iterator[tuple[str, list[float]]]:
    for task in _by_task(rows):
        if values := [score for row in task if number(score := row["scores"].get(name)) is not None]:
            yield task[0]["task"], values


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


def curves(metrics: Rows, records: Mapping[str, evaluations.Record] = {}) -> list[tuple[str, Series, Bands]]:
    """The plots: title, the series that share a pair of axes, and the bands around those that have one.

    Plots without data are left out.
    """
    scores, rewards = _series(metrics, "score/"), _series(metrics, "reward")
    errors = dict(_series(metrics, "reward_se").get("reward_se", []))
    reward_band = {
        step: (value - errors[step], value + errors[step])
        for step, value in rewards.get("reward", [])
        if step in errors
    }
    tested = _series([{"step": record["step"], **evaluations.scalars(record)} for record in records.values()], "eval/")
    bands: Bands = {}
    for name in tested:
        low, high = (dict(tested.get(f"{name}_{end}", [])) for end in ("low", "high"))
        if low and high:
            bands[name] = {step: (low[step], high[step]) for step in low if step in high}
    excluded = {f"{name}_{end}" for name in bands for end in ("low", "high")}
    means = {name: points for name, points in tested.items() if name not in excluded and "ending/" not in name}
    plots = [
        *_by_scale("Evaluation, with 95 % intervals", means, bands),
        (
            "Reward of the trained turn, with the standard error from its futures",
            rewards,
            {"reward": reward_band},
        ),
        *_by_scale("Scores of the rollouts", scores, {}),
        ("Loss", _series(metrics, "loss"), {}),
        ("KL to the first policy", _series(metrics, "kl"), {}),
        ("Tokens of the trained turn", _series(metrics, "turn_tokens"), {}),
        ("Seconds by stage", _series(metrics, "seconds/"), {}),
    ]
    return [(title, series, bands) for title, series, bands in plots if series]


def _by_scale(title: str, scores: Series, bands: Bands) -> Iterator[tuple[str, Series, Bands]]:
    """Series between 0 and 1 share axes; every other series has its own."""
    rates = {name: points for name, points in scores.items() if all(0 <= value <= 1 for _, value in points)}
    yield title, rates, bands
    for name in scores:
        if name not in rates:
            yield f"{title}: {name}", {name: scores[name]}, bands


def _series(metrics: Rows, name: str) -> Series:
    """Points (step, value) of the metric `name`, or of every metric below it if it ends in a slash."""
    series: Series = {}
    for row in metrics:
        for key, value in row.items():
            if number(value) is not None and (key == name or (name.endswith("/") and key.startswith(name))):
                series.setdefault(key.removeprefix(name) or key, []).append((row["step"], value))
    return series


def _svg(series: Series, bands: Bands) -> str:
    span = {step for points in series.values() for step, _ in points}
    with rc_context({"svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(6, 2.6), layout="constrained")
        axes = figure.subplots()
        for name, points in series.items():
            steps, values = zip(*points, strict=True)
            style = "-" if 2 * len(steps) > len(span) > 1 else "."  # points if most steps have no value
            label = name.encode(errors="replace").decode().replace("$", r"\$")  # else matplotlib reads a formula
            (drawn,) = axes.plot(steps, values, style, label=label, linewidth=1.2)
            if band := bands.get(name):
                low, high = ([band.get(step, (value, value))[end] for step, value in points] for end in (0, 1))
                axes.fill_between(steps, low, high, alpha=0.25, color=drawn.get_color())
        if len(series) > 1:
            axes.legend(frameon=False, fontsize=7)
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata={"Date": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]


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
