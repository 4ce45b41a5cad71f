"""report.html: the run as one self-contained page, made from the files in its folder."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cycler import cycler
from jinja2 import Environment, PackageLoader
from matplotlib import rc_context
from matplotlib.figure import Figure

from megatron_collab.observability import evaluations
from megatron_collab.observability.conversations import MetricChange, changes, is_conversation, rows_of_file
from megatron_collab.observability.evaluations import AFTER, BEFORE
from megatron_collab.observability.records import number, of_step
from megatron_collab.observability.run_record import SETTINGS
from megatron_collab.observability.transcripts import by_group
from megatron_collab.observability.writers import CONVERSATIONS, Rows
from megatron_collab.runtime import files
from megatron_collab.statistics import Estimate

logger = logging.getLogger(__name__)

Series = dict[str, list[tuple[int, float]]]
Bands = dict[str, dict[int, tuple[float, float]]]  # by series and step: low, high


def write(folder: Path) -> Path:
    """Write `folder`/report.html from the files of the run. Returns its path."""
    pages = Environment(
        loader=PackageLoader("megatron_collab.observability", "templates"), autoescape=True, trim_blocks=True
    )
    pages.filters["score"] = _score
    metrics = rows_of_file(folder / "metrics.jsonl", of_step)
    records, fault = evaluations.readable(folder)
    if fault:
        logger.warning(f"{folder / evaluations.FILE}: {fault}")
    html = pages.get_template("report.html.j2").render(
        name=str(folder),
        steps=len(metrics),
        config=settings.read_text(errors="replace") if (settings := folder / SETTINGS).is_file() else "",
        sets=[*comparisons(folder, records)],
        alarms=rows_of_file(folder / "alarms.jsonl", _is_alarm),
        curves=[(title, _svg(series, bands)) for title, series, bands in curves(metrics, records)],
    )
    report = folder / "report.html"
    files.replace(report, html.encode(errors="replace").decode())  # lone surrogates become ?
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
        conversations = [rows_of_file(file, is_conversation) for file in conversation_files]
        first, last = conversations[0], conversations[-1] if len(conversations) > 1 else []
        yield {
            "name": set_name,
            "moments": [moment.replace("_", " ") for moment in shown_moments],
            "table": table(first, last),
            "counts": [len([*by_group(rows)]) for rows in conversations],
            "pairs": pairs(first, last),
            "gaps": gap_table(records.get(evaluations.name_of(set_name, moments[-1]), {})),
        }


def table(before: Rows, after: Rows) -> list[tuple[str, str, str, str]]:
    """(metric, before, after, paired change): means over the tasks of an evaluation, with 95 % intervals.

    With several samples of a task, shares also have rows for pass@k and pass^k.
    """
    return [_cells(change) for change in changes([*by_group(before)], [*by_group(after)])]


def _cells(change: MetricChange) -> tuple[str, str, str, str]:
    before, after = (
        (mean.text() if mean else "\u2013") + (f" ({missing} missing)" if missing else "")
        for mean, missing in zip(change.means, change.missing, strict=True)
    )
    paired = change.difference.text("{:+.3f}".format) if change.difference else "\u2013"
    return change.label, before, after, paired


def gap_table(record: evaluations.Record) -> list[tuple[str, str, str]]:
    """(metric, gap, its growth since the first evaluation) of an evaluation of a set that is compared with another."""
    growths, signed = evaluations.estimates(record, "gap_growth"), "{:+.3f}".format
    return [
        (name, gap.text(signed), growths.get(name, Estimate(math.nan)).text(signed))
        for name, gap in evaluations.estimates(record, "gap").items()
    ]


def pairs(before: Rows, after: Rows) -> list[dict[str, Any]]:
    """The first conversation about each task before and after, changed ones first; of `before` alone if no `after`."""
    firsts, later = ([group[0] for group in by_group(rows)] for rows in (before, after))
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
    tested = _series([{"step": record["step"], **evaluations.scalars(record)} for record in records.values()], "eval/")
    bands: Bands = {}
    for name in tested:
        low, high = (dict(tested.get(f"{name}_{end}", [])) for end in ("low", "high"))
        if low and high:
            bands[name] = {step: (low[step], high[step]) for step in low if step in high}
    excluded = {f"{name}_{end}" for name in bands for end in ("low", "high")}
    shown = {name: points for name, points in tested.items() if name not in excluded and "ending/" not in name}
    gaps = {name: points for name, points in shown.items() if name.endswith("_gap")}
    means = {name: points for name, points in shown.items() if not name.endswith(("_gap", "_gap_growth"))}
    plots = [
        *_by_scale("Evaluation, with 95 % intervals", means, bands),
        *_by_scale("Gap to the compared set, with 95 % intervals", gaps, bands),
        ("Mean reward of the trained turns", _series(metrics, "reward"), {}),
        (
            "How well rewards tell the turns of a group apart: share of their variance that is due to the turns "
            "(reliability), shares of the groups in which it matters what the policy replies (decision_density) and "
            "with equal rewards",
            _series(metrics, "reliability") | _series(metrics, "decision_density") | _series(metrics, "equal_rewards"),
            {},
        ),
        *_by_scale("Scores of the rollouts", _series(metrics, "score/"), {}),
        ("Loss", _series(metrics, "loss"), {}),
        ("KL to the first policy", _series(metrics, "kl"), {}),
        ("Tokens of the trained turn", _series(metrics, "turn_tokens"), {}),
        *_by_scale("Sentinels of reward hacking", _series(metrics, "sentinel/"), {}),
        ("Seconds by stage", _series(metrics, "seconds/"), {}),
    ]
    return [(title, series, bands) for title, series, bands in plots if series]


def _by_scale(title: str, scores: Series, bands: Bands) -> Iterator[tuple[str, Series, Bands]]:
    """Series between -1 and 1 share axes, or those of each set share some if there are more series than colors.

    Every other series has its own axes.
    """
    rates = {name: points for name, points in scores.items() if all(-1 <= value <= 1 for _, value in points)}
    shared: dict[str, Series] = {}
    for name, points in rates.items():
        evaluated = name.rpartition("/")[0] if len(rates) > len(_PALETTE) else ""
        shared.setdefault(f"{title}: {evaluated}" if evaluated else title, {})[name] = points
    for heading, series in shared.items():
        yield heading, series, bands
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


# As on the page `view`, as far as they suit both.
_PALETTE = ["#3f8fd0", "#d8702f", "#3fa36b", "#a76cc0", "#b08a12", "#cf5b80", "#3c9dab", "#8b8b8b"]
_COLORS = {
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), "#7b7f84"),  # lines; the page colors texts
    "axes.prop_cycle": cycler(color=_PALETTE),
}


def _svg(series: Series, bands: Bands) -> str:
    span = {step for points in series.values() for step, _ in points}
    with rc_context({"svg.fonttype": "none", "font.size": 8, "savefig.transparent": True, **_COLORS}):
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


def _score(value: Any) -> str:
    """A conversation's score as text, or why it is missing."""
    if isinstance(value, dict):
        return f"missing ({value.get('missing')})"
    return str(value) if number(value) is None else f"{value:g}"


def _is_alarm(row: Mapping[str, Any]) -> bool:
    values = [row.get(name) for name in ("value", "baseline")]  # versions of a judge are texts
    is_shown = all(isinstance(value, str) or number(value) is not None for value in values)
    return of_step(row) and is_shown and isinstance(row.get("conversations"), list)
