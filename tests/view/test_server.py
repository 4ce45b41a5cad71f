"""The page's server: who gets an answer, with which headers, and that no text of a run changes on its way."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from megatron_collab.observability import tokens, transcripts
from megatron_collab.observability.transcript_index import Index
from megatron_collab.view.runs import RunView
from megatron_collab.view.server import application
from tests.observability.test_tokens import learned
from tests.observability.test_transcripts import ODD, group, old_lines, row

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "a-token-for-tests"
URL = "http://127.0.0.1:1234"


HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward": 0.5}\n{"step": 1, "reward": 0.6}\n')
    (tmp_path / "config.json").write_text('{"program": "train", "run": {"dir": "</script><script>alert(1)</script>"}}')
    return tmp_path


@pytest.fixture
def stranger(folder: Path) -> TestClient:
    """Who does not have the token."""
    return TestClient(application([RunView(folder)], TOKEN), base_url=URL)


@pytest.fixture
def client(stranger: TestClient) -> TestClient:
    assert stranger.get(f"/?token={TOKEN}").status_code == 200
    return stranger


def fault(client: TestClient, path: str, status: int) -> str:
    """The one line that refuses a request of the API."""
    answer = client.get(path)
    assert answer.status_code == status and answer.json().keys() == {"error"}
    message = answer.json()["error"]
    assert message.isprintable()
    return str(message)


def test_the_token_becomes_a_cookie_and_leaves_the_address(stranger: TestClient) -> None:
    answer = stranger.get(f"/?a=1&token={TOKEN}&b=%26%0d%0a", follow_redirects=False)
    assert answer.status_code == 303 and answer.headers["location"] == "/?a=1&b=%26%0D%0A"
    name, _, attributes = answer.headers["set-cookie"].partition(f"={TOKEN}; ")
    assert name.startswith("view-") and attributes == "HttpOnly; Path=/; SameSite=strict"
    assert stranger.get("/").status_code == 200
    assert stranger.get(f"/?token={TOKEN}", follow_redirects=False).headers["location"] == "/"


@pytest.mark.parametrize("path", ["/", "/?token=", "/?token=wrong", "/?token=\u00e9", "/static/index.html", "/none"])
def test_without_the_token_there_is_one_line(stranger: TestClient, path: str) -> None:
    answer = stranger.get(path)
    assert answer.status_code == 403 and answer.text.count("\n") == 1 and "open the address" in answer.text


@pytest.mark.parametrize("path", ["/api/runs", "/api/runs/0/settings", "/api/none", f"/api/runs?token={TOKEN}"])
def test_the_api_needs_the_cookie(stranger: TestClient, path: str) -> None:
    assert "open the address" in fault(stranger, path, 403)


def test_a_wrong_cookie_is_refused(client: TestClient) -> None:
    (name,) = client.cookies
    client.cookies.clear()
    for cookie in (f"{name}={TOKEN}x", f"{name}=", f"view={TOKEN}", f"{name}=\u00e9".encode()):
        assert client.get("/", headers={"cookie": cookie}).status_code == 403
    assert client.get("/", headers={"cookie": f"view={TOKEN}; {name}={TOKEN}"}).status_code == 200


def test_servers_of_a_machine_do_not_share_a_cookie(folder: Path) -> None:
    names = [
        TestClient(application([RunView(folder)], TOKEN), base_url=URL)
        .get(f"/?token={TOKEN}", follow_redirects=False)
        .headers["set-cookie"]
        .partition("=")[0]
        for _ in range(2)
    ]
    assert names[0] != names[1]


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "evil.example:1234", "127.0.0.1@evil", "", "10.0.0.1"]
)
def test_another_name_of_the_machine_gets_nothing(client: TestClient, host: str) -> None:
    for path in ("/api/runs", f"/?token={TOKEN}"):
        answer = client.get(path, headers={"host": host}, follow_redirects=False)
        assert answer.status_code == 403 and "set-cookie" not in answer.headers
        assert "loopback" in answer.text


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8000", "localhost:8000", "LOCALHOST", "[::1]:8000"])
def test_a_tunnel_may_have_another_port(client: TestClient, host: str) -> None:
    assert client.get(f"/?token={TOKEN}", headers={"host": host}, follow_redirects=False).status_code == 303


@pytest.mark.parametrize(
    "path", ["/", "/api/runs", "/api/none", "/static/none.js", "/api/runs/7/metrics", f"/?token={TOKEN}"]
)
def test_every_answer_has_the_headers(client: TestClient, path: str) -> None:
    for answer in (client.get(path, follow_redirects=False), client.get(path, headers={"host": "evil"})):
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS


def test_only_files_of_the_page_are_served(client: TestClient) -> None:
    assert client.get("/").headers["content-type"] == "text/html; charset=utf-8"
    assert client.get("/").content == client.get("/static/index.html").content
    for name in os.listdir(ROOT / "megatron_collab" / "view" / "static"):
        assert client.get(f"/static/{name}").headers["content-type"].partition(";")[0].startswith(("text/", "image/"))
    for path in ("/static/..%2fserver.py", "/static/%2e%2e/server.py", "/static/server.py", "/static/", "/static/none"):
        assert client.get(path).status_code == 404


def test_nothing_can_be_written(client: TestClient) -> None:
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        assert client.request(method, "/api/runs").status_code == 405


def test_runs_are_listed(client: TestClient, folder: Path) -> None:
    (listed,) = client.get("/api/runs").json()
    assert listed["run"] == 0 and listed["name"] == folder.name and listed["steps"] == 2


def test_text_of_a_run_comes_unchanged(client: TestClient, folder: Path) -> None:
    odd = "</script><script>alert(1)</script>\u202e\x1b[31m\x00\ud800 \u2028"
    (folder / "config.json").write_text(json.dumps({"run": {"dir": odd}, "big": float("nan")}))
    answer = client.get("/api/runs/0/settings")
    assert answer.headers["content-type"] == "application/json" and answer.content.isascii()
    assert answer.json() == {"run": {"dir": odd}, "big": None}


def test_metrics_of_a_run(client: TestClient) -> None:
    assert client.get("/api/runs/0/metrics?after=0").json() == {
        "rows": [{"step": 1, "reward": 0.6}],
        "finished": False,
        "start": 1,
        "records": "- - -",
    }
    assert len(client.get("/api/runs/0/metrics?after=5&start=0").json()["rows"]) == 2
    assert client.get("/api/runs/0/evaluations").json() == []
    assert client.get("/api/runs/0/events").json() == []


def test_wrong_requests_get_one_line(client: TestClient, folder: Path) -> None:
    assert fault(client, "/api/runs/1/metrics", 404) == "no run 1; there are 1"
    for after in ("x", "-2", "1e3", "9" * 30, "%E0%A5%A7", "%0a1"):
        assert "give the number of a step" in fault(client, f"/api/runs/0/metrics?after={after}", 400)
    assert fault(client, "/api/nothing", 404) == "Not Found"
    (folder / "config.json").unlink()
    assert fault(client, "/api/runs/0/settings", 404) == f"{folder}/config.json: No such file or directory"


def test_a_hostile_conversation_comes_unchanged(client: TestClient, folder: Path) -> None:
    """As JSON text: what markup, escapes or halves of characters mean is nobody's business on the way."""
    hostile = f"</script><script>alert(1)</script><img src=x onerror=alert(1)>\u202e\x1b[31m\x00\u2028{ODD}"
    rows = group("a", 1, 2, text=hostile, judgments={"right": {"reason": hostile, "answer": 10**400}})
    transcripts.write_step(folder, 3, [rows])
    answer = client.get("/api/runs/0/groups/3/0")
    assert answer.headers["content-type"] == "application/json" and answer.content.isascii()
    assert answer.json()["rows"] == [{"step": 3, **future} for future in rows]
    old_lines(folder, 0, tail=json.dumps({"step": 0, **row("x", text=hostile, scores={"a": float("nan")})}) + "\n")
    (last,) = client.get("/api/runs/0/groups/0/1").json()["rows"]
    assert last["messages"][0]["content"] == hostile and last["scores"] == {"a": None}


def test_futures_are_selected_by_the_address(client: TestClient, folder: Path) -> None:
    transcripts.write_step(folder, 3, [group("a"), group("b", text="a word & more")])
    answer = client.get("/api/runs/0/futures?task=b&words=word+more&low.right=1&sort=right&limit=2").json()
    assert answer["total"] == 6 and [future["future"] for future in answer["rows"]] == [0, 1]
    assert answer["rows"][0]["task"] == "b" and answer["columns"] == ["reward", "right", "judged"]
    assert "limit=201: give an integer" in fault(client, "/api/runs/0/futures?limit=201", 400)
    assert "sort=x: no such column" in fault(client, "/api/runs/0/futures?sort=x", 400)


def test_a_group_that_is_not_there_gets_one_line(
    client: TestClient, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transcripts.write_step(folder, 3, [group()])
    assert fault(client, "/api/runs/0/groups/3/1", 404) == "step 3 has no group 1"
    assert fault(client, f"/api/runs/0/groups/{10**30}/1", 404)
    assert fault(client, f"/api/runs/0/groups/{'9' * 5000}/0", 404) == "no such page"
    assert client.get("/api/runs/0/groups/3/0").status_code == 200
    monkeypatch.setattr(Index, "refresh", lambda index: False)  # the run resumes while the request is answered
    transcripts.forget(folder, 3)
    assert "step_000003.parquet" in fault(client, "/api/runs/0/groups/3/0", 404)


def test_the_reward_and_scores_of_groups(client: TestClient, folder: Path) -> None:
    transcripts.write_step(folder, 3, [group()])
    assert "has no reward.weights" in fault(client, "/api/runs/0/reward", 400)
    (folder / "config.json").write_text('{"reward": {"weights": {"right": 2}}}')
    assert client.get("/api/runs/0/reward").json()["weights"] == {"right": 2}
    (answer,) = client.get("/api/runs/0/scores?groups=3.0").json()
    assert answer["rows"][0]["scores"] == group()[0]["scores"] and "messages" not in answer["rows"][0]
    assert fault(client, "/api/runs/0/scores?groups=3.0,3.1", 404) == "step 3 has no group 1"
    assert "groups=x: give at most" in fault(client, "/api/runs/0/scores?groups=x", 400)


def test_a_damaged_file_is_named(client: TestClient, folder: Path) -> None:
    transcripts.write_step(folder, 3, [group()])
    transcripts.step_file(folder, 3).write_bytes(b"PAR1 no")
    assert "step_000003.parquet: cannot be read" in fault(client, "/api/runs/0/futures", 400)


def test_what_is_nested_too_deeply_gets_one_line(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    monkeypatch.setattr(RunView, "settings", lambda run: nested)
    assert "nested too deeply" in fault(client, "/api/runs/0/settings", 404)


def test_two_sides_are_compared(client: TestClient, folder: Path) -> None:
    for step, right in ((3, 0.0), (4, 1.0)):
        transcripts.write_step(folder, step, [[row("a &", scores={"right": right})]])
    assert client.get("/api/runs/0/parts").json() == ["training/3", "training/4"]
    answer = client.get("/api/comparison?left=0:training/3&right=0:training%2F4").json()
    assert answer["metrics"][0]["difference"] == {"value": 1.0, "low": None, "high": None}
    (conversation,) = client.get("/api/runs/0/conversations?part=training/4&task=a+%26").json()["rows"]
    assert conversation["step"] == 4 and conversation["scores"] == {"right": 1.0}
    assert "left=: give RUN:EVALUATION" in fault(client, "/api/comparison", 400)
    assert fault(client, "/api/comparison?left=0:training/3&right=1:x", 404) == "no run 1; there are 1"
    assert "no conversations of after" in fault(client, "/api/runs/0/conversations?part=after&task=a", 404)
    assert "no conversation about task b" in fault(client, "/api/runs/0/conversations?part=training/4&task=b", 404)


def test_evaluations_and_tokens_are_asked_for_by_address(client: TestClient, folder: Path) -> None:
    transcripts.write(folder / "eval_before.parquet", [group("evaluated", 1, 2)])
    transcripts.write_step(folder, 3, [group()])
    tokens.write(folder, 3, [learned(0, 1)])
    assert client.get("/api/runs/0/futures?evaluation=before&task=evaluated").json()["total"] == 2
    assert client.get("/api/runs/0/groups/0/0?evaluation=before").json()["task"] == "evaluated"
    assert client.get("/api/runs/0/scores?groups=0.0&evaluation=before").json()[0]["rows"][1]["future"] == 1
    for path in ("futures?", "groups/0/0?", "scores?groups=0.0&"):
        assert "has no conversations of x y" in fault(client, f"/api/runs/0/{path}evaluation=x%0ay", 404)
    (turn,) = client.get("/api/runs/0/tokens/3/0/1").json()
    assert (turn["log_prob"], turn["advantage"], turn["trained"]) == ([-0.5, None], [-1.0, None], [True, False])
    for place in ("3/0/0", "4/0/1", f"3/{10**30}/1", f"{10**30}/0/1"):
        assert "has no tokens" in fault(client, f"/api/runs/0/tokens/{place}", 404)
    transcripts.step_file(folder, 3, transcripts.TOKENS).write_bytes(b"PAR1 no")
    assert "tokens/step_000003.parquet: cannot be read" in fault(client, "/api/runs/0/tokens/3/0/1", 400)
