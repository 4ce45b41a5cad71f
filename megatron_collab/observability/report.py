"""report.html: the run as one self-contained page, made from the files in its folder."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from jinja2 import Environment, PackageLoader
from matplotlib import rc_context
from matplotlib.figure import Figure

from megatron_collab.runtime import files

CONVERSATIONS = 10
Rows = Sequence[Mapping[str, Any]]
Series = dict[str, list[tuple[int, float]]]


def write(folder: Path) -> Path:
    """Make `folder`/report.html from what is there; the file's path."""
    pages = Environment(
        loader=PackageLoader("megatron_collab.observability", "templates"), autoescape=True, trim_blocks=True
    )
    metrics = _lines(folder / "metrics.jsonl")
    before, after = _lines(folder / "eval_before.jsonl"), _lines(folder / "eval_after.jsonl")
    html = pages.get_template("report.html.j2").render(
        name=str(folder),
        steps=len(metrics),
        config=(folder / "config.json").read_text() if (folder / "config.json").exists() else "",
        table=table(before, after),
        counts=(len(before), len(after)),
        curves=[(title, _svg(series, metrics)) for title, series in curves(metrics)],
        pairs=pairs(before, after),
    )
    report = folder / "report.html"
    files.replace(report, html)
    return report


def table(before: Rows, after: Rows) -> list[tuple[str, str, str]]:
    """(metric, before, after): means over the conversations of an evaluation with their standard errors."""
    names = sorted({name for row in (*before, *after) for name in row["scores"]})
    return [(name, _mean(before, name), _mean(after, name)) for name in names]


def pairs(before: Rows, after: Rows) -> list[dict[str, Any]]:
    """The same tasks before and after, those whose conversation changed first."""
    later = {row["task"]: row for row in after}
    both = [{"task": row["task"], "before": row, "after": later[row["task"]]} for row in before if row["task"] in later]
    both.sort(key=lambda pair: pair["before"]["messages"] == pair["after"]["messages"])
    return both[:CONVERSATIONS]


def curves(metrics: Rows) -> list[tuple[str, Series]]:
    """What is drawn: titles with the series that share a pair of axes; what the run does not have is left out."""
    scores = _series(metrics, "score/")
    rates = {name: points for name, points in scores.items() if all(0 <= value <= 1 for _, value in points)}
    found = [
        ("Reward of the trained turn, with the standard error from its futures", _series(metrics, "reward")),
        ("Scores of the futures", rates),
        *((f"Scores of the futures: {name}", {name: scores[name]}) for name in scores if name not in rates),
        ("Loss", _series(metrics, "loss")),
        ("KL to the first policy", _series(metrics, "kl")),
        ("Tokens of the trained turn", _series(metrics, "turn_tokens")),
        ("Seconds by stage", _series(metrics, "seconds/")),
    ]
    return [(title, series) for title, series in found if series]


def _series(metrics: Rows, name: str) -> Series:
    """Points (step, value) of the metric `name`, or of every metric below it where it ends in a slash."""
    series: Series = {}
    for row in metrics:
        for key, value in row.items():
            if value is not None and (key == name or (name.endswith("/") and key.startswith(name))):
                series.setdefault(key.removeprefix(name) or key, []).append((row["step"], value))
    return series


def _svg(series: Series, metrics: Rows) -> str:
    with rc_context({"svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(6, 2.6), layout="constrained")
        axes = figure.subplots()
        for name, points in series.items():
            steps, values = zip(*points, strict=True)
            style = "-" if 2 * len(steps) > len(metrics) > 1 else "."  # points where most steps have no value
            axes.plot(steps, values, style, label=name, linewidth=1.2)
        if "reward" in series:
            errors = {row["step"]: row.get("reward_se") or 0.0 for row in metrics}
            low, high = ([value + sign * errors[step] for step, value in series["reward"]] for sign in (-1, 1))
            axes.fill_between([step for step, _ in series["reward"]], low, high, alpha=0.25)
        if len(series) > 1:
            axes.legend(frameon=False, fontsize=7)
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata={"Date": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]


def _mean(rows: Rows, name: str) -> str:
    values = [score for row in rows if isinstance(score := row["scores"].get(name), int | float)]
    if not values:
        return "\u2013"
    error = f" \u00b1 {stdev(values) / math.sqrt(len(values)):.3f}" if len(values) > 1 else ""
    return f"{fmean(values):.3f}{error}"


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in file.read_text().splitlines()] if file.exists() else []
