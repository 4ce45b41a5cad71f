"""The blind test: what is written, what is refused, and what the ratings say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from megatron_collab.observability import evaluations, ratings, transcripts
from megatron_collab.statistics import share_at_any_time
from megatron_collab.view import server
from megatron_collab.view.blind import result
from megatron_collab.view.comparison import Side
from megatron_collab.view.runs import RunView
from tests.view.test_comparison import run_with
from tests.view.test_server import TOKEN, URL

ORIGIN = {"origin": URL}
TASKS = 8


@pytest.fixture
def run(tmp_path: Path) -> RunView:
    """The side at the right has a higher score in even tasks; both conversations differ."""

    def groups(side: int) -> list[list[dict[str, Any]]]:
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": f"reply {side}"}]
        return [
            [{"task": f"t{at}", "messages": messages, "scores": {"judge": float(side * (at % 2 == 0))}}]
            for at in range(TASKS)
        ]

    return run_with(tmp_path / "run", before=groups(0), after=groups(1))


@pytest.fixture
def client(run: RunView) -> TestClient:
    client = TestClient(server.application([run], TOKEN), base_url=URL)
    client.get(f"/?token={TOKEN}")
    return client


def rating(task: str = "t0", verdict: str = "right", rater: str = "Ada", **changed: Any) -> dict[str, Any]:
    sides = {"left": "0:before", "right": "0:after", "shown_left": "right"}
    return sides | {"task": task, "rater": rater, "verdict": verdict} | changed


def lines(run: RunView) -> list[dict[str, Any]]:
    file = run.folder / ratings.FILE
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_rating_is_written_to_the_run_at_the_right(client: TestClient, run: RunView) -> None:
    answer = client.post("/api/ratings", json=rating(rater=" Ada "), headers=ORIGIN)
    assert answer.status_code == 200 and answer.headers["cache-control"] == "no-store"
    (line,) = lines(run)
    assert line.pop("time").startswith("20")
    assert {name: line[name] for name in ("rater", "task", "shown_left", "verdict")} == {
        "rater": "Ada",
        "task": "t0",
        "shown_left": "right",
        "verdict": "right",
    }
    assert [line[side]["part"] for side in ("left", "right")] == ["before", "after"]
    assert line["left"]["run"] == "." and line["left"]["digest"] != line["right"]["digest"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 403),
        ({"origin": "http://127.0.0.1:1"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://[::1"}, 403),
        ({"origin": URL.replace("http:", "https:")}, 403),
        ({"origin": "http://evil.example"}, 403),
        (ORIGIN | {"sec-fetch-site": "same-site"}, 403),
        (ORIGIN | {"sec-fetch-site": "cross-site"}, 403),
        (ORIGIN | {"content-type": "text/plain"}, 415),
        (ORIGIN | {"cookie": "none=1"}, 403),
        (ORIGIN | {"sec-fetch-site": "same-origin"}, 200),
    ],
)
def test_only_the_page_itself_writes(client: TestClient, run: RunView, headers: dict[str, str], status: int) -> None:
    """A page elsewhere may send a form with the browser's cookie, and can set none of these headers."""
    if "cookie" in headers:
        client.cookies.clear()
    answer = client.post("/api/ratings", json=rating(), headers=headers)
    assert answer.status_code == status and len(lines(run)) == (status == 200)
    assert status == 200 or answer.json()["error"].isprintable()


@pytest.mark.parametrize(
    ("row", "status", "reason"),
    [
        ([], 400, "a rating has left, right"),
        (rating() | {"more": ""}, 400, "and nothing else"),
        (rating(verdict=1), 400, "all of a rating are texts"),  # type: ignore[arg-type]
        (rating(verdict="better"), 400, "verdict: give one of left, right, tie, skip"),
        (rating(shown_left="tie"), 400, "shown_left: give left or right"),
        (rating(rater=" "), 400, "rater: give a name"),
        (rating(rater="a\n"), 200, ""),
        (rating(rater="a\u202eb"), 400, "rater: give a name"),
        (rating(rater="a" * 81), 400, "rater: give a name"),
        (rating(right="0:../x"), 404, "no conversations of"),
        (rating(right="7:after"), 404, "no run 7"),
        (rating(task="none"), 404, "no conversation about task none"),
        (rating(task="t" * (1 << 17)), 413, "more than 131072 bytes"),
    ],
)
def test_what_is_no_rating_is_refused(client: TestClient, run: RunView, row: Any, status: int, reason: str) -> None:
    answer = client.post("/api/ratings", json=row, headers=ORIGIN)
    assert answer.status_code == status and len(lines(run)) == (status == 200)
    assert status == 200 or (reason in answer.json()["error"] and answer.json()["error"].isprintable())


def test_a_folder_that_cannot_be_written_gets_one_line(
    client: TestClient, run: RunView, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Path.open

    def open_read_only(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if "a" in mode:
            raise OSError(30, "Read-only file system", str(path))
        return opened(path, mode, *arguments, **options)

    monkeypatch.setattr(Path, "open", open_read_only)
    answer = client.post("/api/ratings", json=rating(), headers=ORIGIN)
    assert answer.status_code == 400 and "ratings.jsonl" in answer.json()["error"]
    assert "Read-only file system" in answer.json()["error"] and answer.json()["error"].isprintable()


def test_what_the_ratings_say(client: TestClient, run: RunView) -> None:
    verdicts = [("t0", "right"), ("t1", "tie"), ("t2", "right"), ("t3", "left"), ("t4", "skip"), ("t0", "left")]
    for task, verdict in verdicts:
        client.post("/api/ratings", json=rating(task, verdict), headers=ORIGIN)
    client.post("/api/ratings", json=rating("t0", "right", "Bo"), headers=ORIGIN)
    mirrored = rating("t3", "tie", "Bo", left="0:after", right="0:before")
    client.post("/api/ratings", json=mirrored, headers=ORIGIN)
    answer = client.get("/api/ratings?left=0:before&right=0:after").json()
    assert (answer["wins"], answer["ties"], answer["losses"], answer["skipped"]) == (2, 1, 1, 1)
    assert answer["share"]["low"] == share_at_any_time(2, 1).low and not answer["decided"]
    assert answer["rated"][0] == {"rater": "Ada", "task": "t0"} and len(answer["rated"]) == 8
    assert answer["agreement"] == [
        {"name": "Ada and Bo", "kappa": pytest.approx(1 / 3), "tasks": 2},
        {"name": "verdicts and judge", "kappa": pytest.approx(0.6), "tasks": 4},
    ]
    other = client.get("/api/ratings?left=0:after&right=0:before").json()
    assert (other["wins"], other["losses"]) == (1, 2)


def test_ratings_of_replaced_conversations_are_left_out(client: TestClient, run: RunView) -> None:
    for task in ("t0", "t1"):
        client.post("/api/ratings", json=rating(task), headers=ORIGIN)
    file = evaluations.file_of(run.folder, "after")
    rows = [dict(row) for row in transcripts.rows_of_file(file) if row]
    rows[0]["messages"] = [{"role": "assistant", "content": "another"}]
    transcripts.write(file, [[row] for row in rows])
    answer = client.get("/api/ratings?left=0:before&right=0:after").json()
    assert (answer["wins"], answer["outdated"]) == (1, 1) and answer["rated"] == [{"rater": "Ada", "task": "t1"}]


def test_runs_with_the_same_folder_name_are_told_apart(tmp_path: Path) -> None:
    """Three of a sweep: a rating of the first and the last says nothing of the second."""
    runs = list[RunView]()
    for at in range(3):
        (tmp_path / f"seed{at}").mkdir()
        row = {"task": "t0", "messages": [{"role": "assistant", "content": f"reply {at}"}], "scores": {}}
        runs.append(run_with(tmp_path / f"seed{at}" / "run", after=[[row]]))
    client = TestClient(server.application(runs, TOKEN), base_url=URL)
    client.get(f"/?token={TOKEN}")
    client.post("/api/ratings", json=rating(left="0:after", right="2:after"), headers=ORIGIN)
    (line,) = lines(runs[2])
    assert (line["left"]["run"], line["right"]["run"]) == ("../../seed0/run", ".")
    answers = {}
    for sides in ("02", "20", "12", "01"):
        answer = client.get(f"/api/ratings?left={sides[0]}:after&right={sides[1]}:after").json()
        answers[sides] = [answer[name] for name in ("wins", "losses", "outdated")]
    assert answers == {"02": [1, 0, 0], "20": [0, 1, 0], "12": [0, 0, 0], "01": [0, 0, 0]}
    assert {view.summary()["name"] for view in runs} == {"run"}


def test_no_ratings_are_an_answer(run: RunView) -> None:
    answer = result(Side(run, "before"), Side(run, "after"))
    assert answer["wins"] == 0 and answer["agreement"] == [] and answer["share"]["value"] is None
    assert evaluations.file_of(run.folder, "after").exists() and not lines(run)
