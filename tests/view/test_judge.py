"""The judge check: ratings and labels beside the scores of the conversations that they are about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scipy import stats
from starlette.testclient import TestClient

from megatron_collab.commands.__main__ import run as run_command
from megatron_collab.observability import evaluations, transcripts
from megatron_collab.observability.ratings import FIRST, SECOND, TIE
from megatron_collab.settings import ConfigError
from megatron_collab.view import command, server
from megatron_collab.view.judge import judge_check
from megatron_collab.view.labels import Label
from megatron_collab.view.runs import RunView
from tests.view import judged_runs
from tests.view.judged_runs import NEW, OLD, ROLLOUTS, TASKS
from tests.view.test_server import TOKEN, URL


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    judged_runs.write_run(tmp_path / "run")
    return tmp_path / "run"


def figures(answer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {figure["name"]: figure for figure in answer["figures"]}


def test_ratings_of_a_blind_test_are_compared_with_the_judge(folder: Path) -> None:
    answer = judge_check([RunView(folder)], 0, "", "")
    assert (answer["source"], answer["metric"], answer["sources"]) == (
        "ratings",
        "polite",
        {"ratings": 23, "labels": 0},
    )
    assert answer["metrics"] == [{"name": "polite", "judged": True}, {"name": "tokens", "judged": False}]
    first, second = (judged_runs.groups(seed) for seed in range(2))
    verdicts = [(FIRST, SECOND, TIE)[at % 3] for at in range(TASKS - 1)]
    agreed = 0
    for at, verdict in enumerate(verdicts):
        a, b = (side[at][0]["scores"]["polite"] for side in (first, second))
        agreed += verdict == (FIRST if a > b else SECOND if b > a else TIE)
    shown = figures(answer)
    assert shown["agreement"]["value"] == pytest.approx(agreed / 23) and shown["agreement"]["count"] == 23
    chosen = [(verdict, (FIRST, SECOND)[at % 2]) for at, verdict in enumerate(verdicts) if verdict != TIE]
    assert shown["raters' choice of the left"]["value"] == pytest.approx(
        sum(verdict == shown_left for verdict, shown_left in chosen) / len(chosen)
    )
    assert sorted(answer["versions"]) == [(OLD, 24), (NEW, 22)] and answer["omitted"] == {}
    worst, *lesser = answer["disagreements"]
    assert worst["sides"] == ["0:after", "0:before"] and worst["gap"] >= max(of["gap"] for of in lesser)
    assert worst["people"] != (FIRST if worst["scores"][0] > worst["scores"][1] else SECOND)
    assert answer["calibration"]["bins"] == []


def test_ratings_that_cannot_be_compared_are_counted(folder: Path) -> None:
    rows = [side[-1][0] for side in (judged_runs.groups(0), judged_runs.groups(1))]
    judged_runs.write_rating(folder, rows, FIRST, FIRST, path="../elsewhere")
    judged_runs.write_rating(folder, rows[::-1], FIRST, FIRST, rater="Bo")  # of other messages
    judged_runs.write_rating(folder, [judged_runs.groups(side)[0][0] for side in range(2)], "skip", FIRST)
    file = evaluations.file_of(folder, "after")
    unscored = [dict(row) for row in transcripts.rows_of_file(file) if row]
    unscored[0]["scores"] = {"polite": {"missing": "no answer"}}
    transcripts.write(file, [unscored[at : at + ROLLOUTS] for at in range(0, len(unscored), ROLLOUTS)])
    answer = judge_check([RunView(folder)], 0, "ratings", "polite")
    assert answer["omitted"] == {
        "of a run that is not shown here": 1,
        "of conversations that have been replaced": 1,
        "without a score of the metric": 1,
    }
    assert figures(answer)["agreement"]["count"] == 22


def test_labels_of_a_file_are_compared_with_the_judge(folder: Path) -> None:
    of_people = [*judged_runs.labels()]
    unknown = [
        Label("training/3", "t0", 7, 0, 1.0, "", ""),
        Label("training/9", "t0", 0, 0, 1.0, "", ""),
        Label("no\0where/..", "t0", 0, 0, 1.0, "", ""),
        Label("training/3", "t0", 0, 0, 1.0, "", "tokens"),
    ]
    answer = judge_check([RunView(folder, [*of_people, *unknown])], 0, "labels", "")
    assert answer["omitted"] == {
        "of conversations that the run does not have": 3,
        "about another metric": 1,
    }
    shown = figures(answer)
    rows = [row for group in judged_runs.groups(2) for row in group]
    scores = [row["scores"]["polite"] for row in rows]
    yes = [score for score, label in zip(scores, of_people, strict=True) if label.label]
    no = [score for score, label in zip(scores, of_people, strict=True) if not label.label]
    area = stats.mannwhitneyu(yes, no).statistic / (len(yes) * len(no))
    assert shown["area under the ROC curve"]["value"] == pytest.approx(area)
    assert shown["bias by length"]["low"] > 0.5, "people call the short ones good, the judge the long ones"
    assert sum(of_bin["labels"] for of_bin in answer["calibration"]["bins"]) == TASKS * ROLLOUTS
    worst = answer["disagreements"][0]
    row = judged_runs.groups(2)[worst["position"]][worst["number"]]
    assert (row["task"], row["rollout"], worst["step"]) == (worst["task"], worst["rollout"], 3)
    assert worst["scores"] == [row["scores"]["polite"]] and worst["gap"] == abs(worst["people"] - worst["scores"][0])
    about_tokens = [of._replace(metric="tokens") for of in of_people]
    assert judge_check([RunView(folder, about_tokens)], 0, "labels", "")["metric"] == "tokens"
    numbers = judge_check([RunView(folder, [*judged_runs.labels(yes_or_no=False)])], 0, "labels", "tokens")
    assert figures(numbers)["Spearman's correlation"]["value"] == pytest.approx(1.0)
    assert numbers["calibration"]["bins"] == [] and numbers["disagreements"] == []


def test_labels_of_an_evaluation_are_found_in_its_conversations(folder: Path) -> None:
    labels = [Label("after", "t5", 1, 0, 0.0, "", ""), Label("after", "t6", 0, 0, 0.0, "", "")]
    answer = judge_check([RunView(folder, labels)], 0, "labels", "polite")
    places = [{name: of.get(name) for name in ("part", "task", "number", "step")} for of in answer["disagreements"]]
    assert sorted(places, key=str) == [
        {"part": "after", "task": "t5", "number": 1, "step": None},
        {"part": "after", "task": "t6", "number": 0, "step": None},
    ]


def test_the_page_gets_it_and_no_labels_are_an_answer(folder: Path, tmp_path: Path) -> None:
    (folder / "ratings.jsonl").unlink()
    client = TestClient(server.application([RunView(folder)], TOKEN), base_url=URL)
    client.get(f"/?token={TOKEN}")
    answer = client.get("/api/runs/0/judge").json()
    assert answer["figures"] == answer["disagreements"] == answer["metrics"] == []
    assert answer["sources"] == {"ratings": 0, "labels": 0} and answer["calibration"] == {"error": None, "bins": []}
    assert client.get("/api/runs/0/judge?source=none").status_code == 400
    assert client.get("/api/runs/7/judge").status_code == 404
    with pytest.raises(ConfigError, match="source=none: give one of ratings, labels"):
        judge_check([RunView(folder)], 0, "none", "")


def test_hostile_rows_are_no_conversations_of_a_label(folder: Path) -> None:
    rows = judged_runs.groups(2)
    rows[0][0] |= {"rollout": [], "judgments": 3}
    rows[1][0]["messages"].append({"role": "assistant", "content": None})
    rows[2][0]["judgments"]["polite"] = {"versions": 7, "answer": []}
    transcripts.write_step(folder, 3, rows)
    answer = judge_check([RunView(folder, [*judged_runs.labels()])], 0, "labels", "polite")
    assert answer["omitted"] == {"of conversations that the run does not have": 1}


def test_the_command_reads_labels_of_one_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[RunView] = []
    monkeypatch.setattr(command, "application", lambda runs, token: shown.extend(runs))
    monkeypatch.setattr(command, "serve", lambda server, server_socket: 0)
    file = tmp_path / "people.jsonl"
    file.write_text(json.dumps({"step": 3, "task": "t0", "label": "yes"}))
    assert run_command("view", [str(folder), "--labels", str(file)]) == 0
    assert [*shown[0].labels] == [Label("training/3", "t0", 0, 0, 1.0, "", "")]
    file.write_text('{"step": 3}\n' * 30)
    capsys.readouterr()
    assert run_command("view", [str(folder), "--labels", str(file)]) == 2
    *lines, last = capsys.readouterr().err.splitlines()
    assert len(lines) == 20 and all(f"row {at}: give task and label" in line for at, line in enumerate(lines, 1))
    assert last == f"megatron-collab: --labels={file}: 30 rows are faulty; correct the file"
    judged_runs.write_run(tmp_path / "other")
    assert run_command("view", [str(folder), str(tmp_path / "other"), "--labels", str(file)]) == 2
    assert "of one run; view 2 runs without it" in capsys.readouterr().err
