"""Two sides on the same tasks: which there are, their paired differences, and their conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.observability import evaluations, folder, transcripts
from megatron_collab.observability.report import table
from megatron_collab.observability.transcripts import by_group
from megatron_collab.settings import ConfigError
from megatron_collab.statistics import difference, mean
from megatron_collab.view import comparison
from megatron_collab.view.comparison import Side, compared, parts, side
from megatron_collab.view.runs import RunView
from tests.observability.test_transcripts import old_lines

Row = dict[str, Any]
BEFORE = {"a": [0.0], "b": [1.0], "c": [0.0], "d": [0.0], "only before": [1.0]}
AFTER = {"d": [1.0], "c": [1.0], "b": [1.0], "a": [0.0], "only after": [0.0]}


def conversation(task: str, rollout: int, **scores: Any) -> Row:
    messages = [{"role": "assistant", "content": f"{task}/{rollout}"}]
    return {"task": task, "rollout": rollout, "messages": messages, "scores": scores}


def groups_of(values: dict[str, list[float]]) -> list[list[Row]]:
    """A conversation for each value of `right`; its length is 10 more for every task."""
    return [
        [conversation(task, at, right=value, length=10.0 * number + value) for at, value in enumerate(of_task)]
        for number, (task, of_task) in enumerate(values.items())
    ]


def run_with(path: Path, **of_evaluations: list[list[Row]]) -> RunView:
    """A run with evaluations, whose names have `__` for a slash."""
    path.mkdir(exist_ok=True)
    names = {name.replace("__", "/"): groups for name, groups in of_evaluations.items()}
    folder.replace(path / evaluations.FILE, {name: {"step": at, "set": ""} for at, name in enumerate(names)})
    for name, groups in names.items():
        transcripts.write(evaluations.file_of(path, name), groups)
    return RunView(path)


@pytest.fixture
def run(tmp_path: Path) -> RunView:
    return run_with(tmp_path / "run", before=groups_of(BEFORE), test__after=groups_of(AFTER))


def test_what_can_be_compared(run: RunView, monkeypatch: pytest.MonkeyPatch) -> None:
    records = json.loads((run.folder / evaluations.FILE).read_text())
    odd = {name: {"step": 0, "set": ""} for name in ("no conversations", "n" * 300, "\x00")}
    folder.replace(run.folder / evaluations.FILE, records | odd)
    for step in (3, 12):
        transcripts.write_step(run.folder, step, groups_of({"a": [1.0]}))
    assert parts(run) == ["before", "test/after", "training/3", "training/12"]
    old_lines(run.folder, 1)
    assert parts(run)[2:] == ["training/1", "training/3", "training/12"]
    monkeypatch.setattr(comparison, "MOST_STEPS", 2)
    assert parts(run)[2:] == ["training/3", "training/12"]


def test_evaluations_without_records_can_be_compared(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "eval_before.jsonl").write_text(json.dumps(conversation("a", 0, right=1.0)) + '\n[]\n{"torn')
    run = RunView(tmp_path)
    assert parts(run) == ["before"]
    assert Side(run, "before").conversations("a")["rows"] == [conversation("a", 0, right=1.0)]
    assert compared(Side(run, "before"), Side(run, "before"))["common"] == 1


def test_differences_are_paired_by_task(run: RunView) -> None:
    answer = compared(Side(run, "before"), Side(run, "test/after"))
    assert (answer["left"], answer["right"], answer["common"]) == ({"tasks": 5}, {"tasks": 5}, 4)
    length, right = answer["metrics"]
    shared = {name: {task: values[task] for task in "abcd"} for name, values in (("left", BEFORE), ("right", AFTER))}
    paired = difference(shared["left"], shared["right"])
    assert right["name"] == "right" and length["name"] == "length"
    assert right["difference"] == {"value": 0.5, "low": paired.low, "high": paired.high}
    assert right["left"]["low"] == mean(shared["left"].values()).low
    assert [task["task"] for task in answer["tasks"]] == ["a", "b", "c", "d"]
    gains = [task["right"]["right"] - task["left"]["right"] for task in answer["tasks"]]
    assert gains == [0.0, 0.0, 1.0, 1.0]
    mirrored = compared(Side(run, "test/after"), Side(run, "before"))["metrics"][1]["difference"]
    assert mirrored["value"] == -0.5 and mirrored["low"] == pytest.approx(-paired.high)


def test_it_says_the_same_as_the_report(tmp_path: Path) -> None:
    """Of several conversations a task, some of which lack a score."""
    groups = [
        groups_of(
            {task: [float((at + shift) % 3 > 0) for at in range(4)] for shift, task in enumerate("abcdef", start)}
        )
        for start in (0, 1)
    ]
    for side_groups in groups:
        side_groups[0][1]["scores"]["right"] = {"missing": "no answer"}
    run = run_with(tmp_path / "run", before=groups[0], after=groups[1])
    answer = compared(Side(run, "before"), Side(run, "after"))
    rows = [[row for group in side_groups for row in group] for side_groups in groups]
    assert len(list(by_group(rows[0]))) == 6

    def text(value: Any, number: str) -> str:
        if value is None:
            return "\u2013"
        return number.format(value["value"]) + f" [{number.format(value['low'])}, {number.format(value['high'])}]"

    cells = {row[0]: row[1:] for row in table(*rows)}
    assert cells.keys() == {metric["name"] for metric in answer["metrics"]} > {"right_pass@2", "length"}
    for metric in answer["metrics"]:
        missing = " (1 missing)" if metric["name"] == "right" else ""
        means = (text(metric[name], "{:.3f}") + missing for name in ("left", "right"))
        assert cells[metric["name"]] == (*means, text(metric["difference"], "{:+.3f}"))
    assert answer["tasks"][0]["conversations"] == [4, 4]


def test_a_step_of_training_is_a_side(run: RunView, tmp_path: Path) -> None:
    """Its futures are conversations of the task, also of a task that has two groups."""
    rows = [[conversation("a", 0, right=1.0) | {"future": at} for at in range(3)], [conversation("a", 0, right=0.0)]]
    transcripts.write_step(run.folder, 12, [*rows, [conversation("other", 0, right=1.0)]])
    answer = compared(Side(run, "before"), Side(run, "training/12"))
    assert answer["common"] == 1 and answer["right"] == {"tasks": 2}
    (task,) = answer["tasks"]
    assert task == {
        "task": "a",
        "left": {"right": 0.0, "length": 0.0},
        "right": {"right": 0.75},
        "conversations": [1, 4],
    }
    assert [metric["difference"] for metric in answer["metrics"]] == [
        None,
        {"value": 0.75, "low": None, "high": None},
    ]


def test_nothing_in_common_is_an_answer(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", before=groups_of({"a": [1.0]}), after=groups_of({"b": [1.0]}))
    answer = compared(Side(run, "before"), Side(run, "after"))
    assert answer["common"] == 0 and not answer["metrics"] and not answer["tasks"]


def test_conversations_of_a_task(run: RunView) -> None:
    answer = Side(run, "test/after").conversations("c")
    assert answer["task"] == "c" and [row["messages"][0]["content"] for row in answer["rows"]] == ["c/0"]
    with pytest.raises(LookupError, match="before has no conversation about task only after"):
        Side(run, "before").conversations("only after")


def test_a_task_is_named_as_browsers_send_it(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", after=groups_of({"half \ud800": [1.0]}))
    assert Side(run, "after").conversations("half \ufffd")["task"] == "half \ud800"


@pytest.mark.parametrize("text", ["", "0", "0:", ":after", "x:after", "-1:after", "1e3:after", "\u0661:after"])
def test_a_malformed_side_is_refused(run: RunView, text: str) -> None:
    with pytest.raises(ConfigError, match=r"left=.*: give RUN:EVALUATION"):
        side([run], "left", text)


@pytest.mark.parametrize(
    "text", ["1:before", "0:nothing", "0:training/7", "0:training/x", "0:../before", "0:test_after"]
)
def test_a_side_that_is_not_there(run: RunView, text: str) -> None:
    with pytest.raises(LookupError) as error:
        side([run], "left", text)
    assert str(error.value).isprintable()
