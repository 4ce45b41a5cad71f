from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron_collab.observability import report

COMMAND = [sys.executable, "-m", "megatron_collab.commands", "report"]


def conversation(task: int, reply: str, right: float) -> dict:
    messages = [{"role": "user", "content": "a table ."}, {"role": "assistant", "content": reply}]
    return {"task": f"t-{task}", "ending": "user_done", "error": "", "messages": messages, "scores": {"right": right}}


def write(file: Path, rows: list[dict]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    metrics = [
        {"step": i, "reward": i / 10, "reward_se": 0.1, "score/right": i / 10, "score/tokens": 15.0 + i, "kl": None,
         "loss": 0.5, "seconds/rollout": 2.0, "seconds/update": 1.0}
        for i in range(5)
    ]  # fmt: skip
    write(tmp_path / "metrics.jsonl", metrics)
    write(tmp_path / "eval_before.jsonl", [conversation(i, "<script>alert(1)</script> & done", 0.0) for i in range(12)])
    write(tmp_path / "eval_after.jsonl", [conversation(i, f"which day {i} ?", float(i > 5)) for i in range(12)])
    (tmp_path / "config.json").write_text('{"run": {"dir": "<b>"}}')
    return tmp_path


class Page(HTMLParser):
    """The page's tags with their attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)


@pytest.mark.seconds
def test_the_report_needs_nothing_but_itself(run: Path) -> None:
    html = report.write(run).read_text()
    for tag, attributes in Page(html).tags:
        assert tag not in ("script", "link", "iframe", "img", "b")
        assert "src" not in attributes
        for name in ("href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#")
    assert "@import" not in html and not re.search(r"url\((?!#)", html)


@pytest.mark.seconds
def test_text_of_conversations_is_text(run: Path) -> None:
    html = report.write(run).read_text()
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; done" in html
    assert "<script" not in html and "&lt;b&gt;" in html


def test_a_curve_shows_whether_the_choice_of_a_turn_matters() -> None:
    measured = {"reliability": 0.8, "decision_density": 0.4}
    rows = [{"step": i, "equal_rewards": 0.5, **(measured if i else {})} for i in range(2)]
    (title, series, _), *further = report.curves(rows)
    assert "tell the turns of a group apart" in title and "(decision_density)" in title and not further
    points = {"reliability": [(1, 0.8)], "decision_density": [(1, 0.4)], "equal_rewards": [(0, 0.5), (1, 0.5)]}
    assert series == points


@pytest.mark.seconds
def test_a_folder_of_an_earlier_version_is_read(run: Path) -> None:
    """Conversations of evaluations and no record of them, or records without sets and errors."""
    assert "<th>before</th><th>after</th>" in report.write(run).read_text()
    (run / "evaluations.json").write_text('{"before": {"step": 0, "score/right": 0.0}, "after": {"step": 5}}')
    assert "<th>before</th><th>after</th>" in report.write(run).read_text()


@pytest.mark.seconds
def test_ten_conversations_before_and_after_side_by_side(run: Path) -> None:
    classes = [attributes.get("class") for _, attributes in Page(report.write(run).read_text()).tags]
    assert classes.count("pair") == 10
    assert classes.count("message assistant") == 20


@pytest.mark.seconds
def test_what_is_drawn(run: Path) -> None:
    metrics = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    drawn = {title: series for title, series, _ in report.curves(metrics)}
    assert ("Mean reward of the trained turns", {"reward": [(i, i / 10) for i in range(5)]}, {}) in report.curves(
        metrics
    )
    assert drawn["Scores of the rollouts"] == {"right": [(i, i / 10) for i in range(5)]}
    assert drawn["Scores of the rollouts: tokens"] == {"tokens": [(i, 15.0 + i) for i in range(5)]}
    assert set(drawn["Seconds by stage"]) == {"rollout", "update"}
    assert not any(title.startswith("KL") for title in drawn)
    assert report.write(run).read_text().count("<svg") == len(drawn)


def test_means_and_intervals_of_the_table() -> None:
    failed = {"task": "t-2", "scores": {"right": {"missing": "down"}}}
    before = [conversation(0, "", 0.0), conversation(1, "", 1.0), failed]
    (row,) = report.table(before, [conversation(0, "", 1.0)])
    assert row == ("right", "0.500 [0.095, 0.905] (1 missing)", "1.000", "+1.000"), "a task is no interval"
    assert report.table([], before)[0][1:] == ("\u2013", row[1], "\u2013")


def test_nothing_right_in_twenty_tasks_is_no_certainty() -> None:
    wrong = [conversation(number, "", 0.0) for number in range(20)]
    (row,) = report.table(wrong, wrong)
    assert row == ("right", "0.000 [0.000, 0.161]", "0.000 [0.000, 0.161]", "+0.000 [-0.161, +0.161]")


def test_a_change_is_paired_by_task() -> None:
    before = [conversation(number, "", float(number % 2)) for number in range(40)]
    after = [*before[:1], conversation(0, "", 1.0), *before[1:]][1:]
    (row,) = report.table(before, after)
    assert row[1].startswith("0.500 [0.352, 0.648]") and row[3].startswith("+0.025 [")
    low, high = map(float, row[3].partition("[")[2].removesuffix("]").split(","))
    assert -0.1 < low < 0.025 < high < 0.15


def test_conversations_about_one_task_are_one_piece_of_evidence() -> None:
    """Two tasks of two conversations each, which agree."""
    rows = [{**conversation(i // 2, "", float(i < 2)), "rollout": i % 2} for i in range(4)]
    cells = {row[0]: row[1:] for row in report.table(rows, [])}
    interval = "0.500 [0.095, 0.905]"
    assert cells == dict.fromkeys(["right", "right_pass@2", "right_pass^2"], (interval, "\u2013", "\u2013"))


@pytest.mark.seconds
def test_evaluations_between_steps_are_curves_with_bands_and_sets_have_tables_of_their_own(run: Path) -> None:
    records: dict[str, dict] = {}
    for name in ("math", "code"):
        for step, moment in enumerate(("before", "step_1", "after")):
            scores = {"score/right": 0.25 * step, "score_low/right": 0.1, "score_high/right": 0.6, "score/tokens": 20.0}
            records[f"{name}/{moment}"] = {"step": step, "set": name, "tasks": 12, **scores}
            write(run / f"eval_{name}_{moment}.jsonl", [conversation(0, f"{name} {moment}", 0.5)])
    (run / "evaluations.json").write_text(json.dumps(records))
    drawn = {title: (series, bands) for title, series, bands in report.curves([], records)}
    series, bands = drawn["Evaluation, with 95 % intervals"]
    assert series == {f"{name}/right": [(0, 0.0), (1, 0.25), (2, 0.5)] for name in ("math", "code")}
    assert bands == {f"{name}/right": dict.fromkeys(range(3), (0.1, 0.6)) for name in ("math", "code")}
    assert "Evaluation, with 95 % intervals: math/tokens" in drawn
    html = report.write(run).read_text()
    assert html.count("<table>") == 2 and "Evaluation math" in html and "math after" in html
    assert "math step_1" not in html, "the first and the last stand side by side"


def test_each_set_has_axes_of_its_own_if_their_curves_are_more_than_the_colors() -> None:
    scores = {f"score/metric{number}": 0.5 for number in range(5)}
    titles = [[f"{name}/before" for name in ("math", "code")[:count]] for count in (1, 2)]
    drawn = [report.curves([], {name: {"step": 0, "set": name[:4], **scores} for name in names}) for names in titles]
    together, apart = ([(title, len(series)) for title, series, _ in curves] for curves in drawn)
    assert together == [("Evaluation, with 95 % intervals", 5)]
    assert apart == [(f"Evaluation, with 95 % intervals: {name}", 5) for name in ("math", "code")]


def test_a_set_of_one_task_has_a_curve_without_a_band() -> None:
    record = {"step": 0, "set": "one", "tasks": 1, "score/loss": 0.5, "score_low/loss": None, "ending/length": 1.0}
    ((title, series, bands),) = report.curves([], {"one/before": record})
    assert (title, series, bands) == ("Evaluation, with 95 % intervals", {"one/loss": [(0, 0.5)]}, {})


def test_conversations_that_changed_come_first() -> None:
    same = [conversation(i, "done", 1.0) for i in range(3)]
    after = [*same[:2], conversation(2, "which day ?", 1.0)]
    assert [pair["task"] for pair in report.pairs(same, after)] == ["t-2", "t-0", "t-1"]


def test_the_first_conversation_about_a_task_stands_for_the_others() -> None:
    before, after = (
        [{**conversation(i // 2, f"{text} {i % 2}", 1.0), "rollout": i % 2} for i in range(4)] for text in "ab"
    )
    shown = report.pairs(before, after)
    assert [(pair["task"], [row["rollout"] for row in pair["rows"]]) for pair in shown] == [
        ("t-0", [0, 0]),
        ("t-1", [0, 0]),
    ]
    assert [pair["rows"] for pair in report.pairs(before, [])] == [[before[0]], [before[2]]]


def test_a_supervised_run_has_curves_alone(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", [{"step": 0, "loss": 2.0}, {"step": 1, "loss": 1.0}])
    html = report.write(tmp_path).read_text()
    assert html.count("<svg") == 1 and "<table>" not in html and "before and after" not in html


@pytest.mark.processes
def test_the_command_makes_the_report_again_and_refuses_another_folder(run: Path, tmp_path: Path) -> None:
    result = subprocess.run([*COMMAND, str(run)], capture_output=True, text=True)
    assert result.returncode == 0 and (run / "report.html").exists()
    (tmp_path / "empty").mkdir()
    refused = subprocess.run([*COMMAND, str(tmp_path / "empty")], capture_output=True, text=True)
    assert refused.returncode == 2 and "has no metrics.jsonl or evaluations.json" in refused.stderr
