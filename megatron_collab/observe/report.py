"""report.html: the run as one self-contained page, made from the files in its folder."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape

# Curves: (title, metrics that share the axes)
CURVES = (
    ("Reward of the trained turn", ("reward",)),
    ("Scores", ("score/",)),
    ("Loss", ("loss",)),
    ("KL to the first policy", ("kl",)),
    ("Tokens of the trained turn", ("turn_tokens",)),
    ("Seconds by stage", ("seconds/",)),
)
CONVERSATIONS = 10


def write(folder: Path) -> Path:
    """Make `folder`/report.html from what is there; the file's path."""
    evaluations = _json(folder / "evaluations.json") or {}
    page = Environment(
        loader=PackageLoader("megatron_collab.observe", "templates"), autoescape=select_autoescape(), trim_blocks=True
    ).get_template("report.html.j2")
    rows = _lines(folder / "metrics.jsonl")
    html = page.render(
        name=str(folder),
        steps=len(rows),
        config=(folder / "config.json").read_text() if (folder / "config.json").exists() else "",
        table=table(evaluations),
        curves=[(title, _svg(rows, names)) for title, names in CURVES if _series(rows, names)],
        pairs=pairs(_lines(folder / "eval_before.jsonl"), _lines(folder / "eval_after.jsonl")),
    )
    file = folder / "report.html"
    draft = folder / "report.html.tmp"
    draft.write_text(html)
    draft.replace(file)
    return file


def table(evaluations: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """Rows (metric, before, after) of the evaluations."""
    before, after = evaluations.get("before", {}), evaluations.get("after", {})
    names = [name for name in before | after if name.startswith("score/")] + ["turn_tokens"]
    shown = [(name.removeprefix("score/"), _number(before.get(name)), _number(after.get(name))) for name in names]
    return [row for row in shown if row[1:] != ("–", "–")]


def pairs(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same tasks before and after, those whose conversation changed first."""
    later = {row["task"]: row for row in after}
    both = [{"task": row["task"], "before": row, "after": later[row["task"]]} for row in before if row["task"] in later]
    both.sort(key=lambda pair: pair["before"]["messages"] == pair["after"]["messages"])
    return both[:CONVERSATIONS]


def _series(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, list[tuple[int, float]]]:
    """Points (step, value) of every metric that is one of `names`, or begins with one that ends in a slash."""
    series: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for key, value in row.items():
            if value is not None and any(key == name or (name.endswith("/") and key.startswith(name)) for name in names):
                series.setdefault(key, []).append((row["step"], value))
    return series


def _svg(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 2.6))
    axes = figure.subplots()
    for key, points in _series(rows, names).items():
        axes.plot(*zip(*points, strict=True), label=key.partition("/")[2] or key, linewidth=1.2)
    if names == ("reward",):
        values = [(row["step"], row["reward"], row["reward_se"]) for row in rows if row.get("reward") is not None]
        steps, means, errors = zip(*values, strict=True)
        low, high = ([m + sign * e for m, e in zip(means, errors, strict=True)] for sign in (-1, 1))
        axes.fill_between(steps, low, high, alpha=0.2)
    if len(axes.lines) > 1:
        axes.legend(frameon=False, fontsize=7)
    axes.set_xlabel("step", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _json(file: Path) -> Any:
    return json.loads(file.read_text()) if file.exists() else None


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in file.read_text().splitlines()] if file.exists() else []
