"""What the page may ask of models, and what becomes of them: over a scripted speaker, and over real processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from megatron_collab.runtime.process import wait_for
from megatron_collab.view import talk
from megatron_collab.view.runs import RunView
from megatron_collab.view.server import application
from tests.view.scripted_speaker import WAIT, ScriptedSpeaker, write_models
from tests.view.test_server import TOKEN, URL

ORIGIN = {"origin": URL}
SECONDS = 60


@pytest.fixture
def run(tmp_path: Path) -> RunView:
    (tmp_path / "config.json").write_text('{"program": "train", "run": {}, "train": {"steps": 6}}')
    write_models(tmp_path, 6)
    return RunView(tmp_path)


@pytest.fixture
def started() -> list[ScriptedSpeaker]:
    return []


@pytest.fixture
def client(run: RunView, started: list[ScriptedSpeaker]) -> TestClient:
    def start(folder: Path, models: Sequence[str], part: int, parts: int) -> ScriptedSpeaker:
        started.append(ScriptedSpeaker(folder, models, part, parts))
        return started[-1]

    client = TestClient(application([run, run], TOKEN, start), base_url=URL)
    client.get(f"/?token={TOKEN}")
    return client


def act(client: TestClient, action: str, status: int = 200, **values: Any) -> Any:
    """The state, or the line that refuses the action."""
    answer = client.post("/api/talk", json={"action": action, **values}, headers=ORIGIN)
    assert answer.status_code == status, answer.json()
    return answer.json() if status == 200 else answer.json()["error"]


def start(client: TestClient, *models: str, task: str = "", status: int = 200) -> Any:
    return act(client, "start", status, models=[[0, model] for model in models], task=task)


def wait(
    client: TestClient, holds: Callable[[Any], bool] = lambda state: not state["doing"], seconds: float = SECONDS
) -> Any:
    """The state once `holds` of it."""
    assert wait_for(lambda: holds(client.get("/api/talk").json()), seconds)
    return client.get("/api/talk").json()


def test_a_conversation(client: TestClient, started: list[ScriptedSpeaker]) -> None:
    assert client.get("/api/talk").json() is None and not started
    assert [model["name"] for model in client.get("/api/runs/0/models").json()] == ["before", "step_6"]
    assert not started
    assert start(client, "before", "step_6", task="booking-0")["models"] == [[0, "before"], [0, "step_6"]]
    state = wait(client)
    assert not state["ended"] and state["chats"][1]["prompt"] == 2
    assert state["sets"][0]["total"] == 50
    act(client, "say", text="hello")
    state = wait(client)
    assert [chat["row"]["messages"][-1]["content"] for chat in state["chats"]] == [
        "before heard: hello",
        "step_6 heard: hello",
    ]
    act(client, "futures", count=2)
    assert [len(chat["futures"]) for chat in wait(client)["chats"]] == [2, 2]
    start(client, "before", "step_6")
    assert wait(client)["chats"][0]["row"]["messages"] == [] and len(started) == 1, "served models are kept"
    ScriptedSpeaker.go_on.clear()
    act(client, "say", text=WAIT)
    wait(client, lambda state: all(chat["busy"] for chat in state["chats"]))
    stopped = act(client, "stop")
    assert stopped["ended"] and not any(chat["busy"] for chat in stopped["chats"])
    assert "no longer served" in act(client, "say", 400, text="hello")


def test_only_the_page_itself_acts(client: TestClient, started: list[ScriptedSpeaker]) -> None:
    body = json.dumps({"action": "start", "models": [[0, "before"]], "task": ""})
    for headers in ({}, {"origin": "http://evil.example"}, ORIGIN | {"content-type": "text/plain"}):
        assert client.post("/api/talk", content=body, headers=headers).status_code in (403, 415)
    client.cookies.clear()
    assert (
        client.post("/api/talk", content=body, headers=ORIGIN | {"content-type": "application/json"}).status_code == 403
    )
    assert not started


@pytest.mark.parametrize(
    ("action", "values", "reason"),
    [
        ("", {}, "action: give one of start, say"),
        ("say", {}, "say has text and nothing else"),
        ("say", {"text": 1}, "say has text and nothing else"),
        ("user", {"text": ""}, "user has no values and nothing else"),
        ("say", {"text": ""}, "text: give 1 to 20000 characters"),
        ("say", {"text": "x" * 20_001}, "text: give 1 to 20000 characters"),
        ("futures", {"count": 9}, "count: give 1 to 8"),
        ("futures", {"count": True}, "futures has count and nothing else"),
        ("start", {"models": [[0, "before"]] * 3, "task": ""}, "models: give at most 2, each as the number of a run"),
        ("start", {"models": [], "task": ""}, "models: give at most 2, each as the number of a run"),
        ("start", {"models": ["before"], "task": ""}, "models: give at most 2, each as the number of a run"),
        ("start", {"models": [[True, "before"]], "task": ""}, "models: give at most 2, each as the number of a run"),
        ("start", {"models": [[0, "before"], [1, "step_7"]], "task": ""}, "step_7"),
    ],
)
def test_what_is_no_action_is_refused(client: TestClient, action: str, values: dict[str, Any], reason: str) -> None:
    start(client, "before")
    state = wait(client)
    assert reason in act(client, action, 400, **values)
    assert client.get("/api/talk").json() == state


def test_one_action_at_a_time_and_two_models_at_most(
    client: TestClient, started: list[ScriptedSpeaker], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert act(client, "say", 400, text="x") == "no model is served; start one"
    assert act(client, "start", 404, models=[[2, "before"]], task="") == "no run 2; there are 2"
    start(client, "before")
    wait(client)
    ScriptedSpeaker.go_on.clear()
    act(client, "say", text=WAIT)
    assert "wait until the last action has finished" in act(client, "user", 400)
    start(client, "step_6")  # ends the other one first, in spite of what it does
    assert wait(client)["models"] == [[0, "step_6"]] and len(started) == 2
    monkeypatch.setattr(talk, "MOST_MESSAGES", 2)
    act(client, "say", text="hello")
    wait(client)
    assert "a conversation has 2 messages" in act(client, "say", 400, text="more")
    act(client, "undo")
    assert wait(client)["chats"][0]["row"]["messages"] == []


def test_two_runs_have_a_speaker_each(client: TestClient, started: list[ScriptedSpeaker]) -> None:
    sides = [[1, "step_6"], [0, "before"]]
    act(client, "start", models=sides, task="booking-1")
    state = wait(client)
    assert state["models"] == sides and [speaker.share for speaker in started] == [(0, 2), (1, 2)]
    act(client, "say", text="hello")
    messages = [chat["row"]["messages"] for chat in wait(client)["chats"]]
    assert [of_chat[-1]["content"] for of_chat in messages] == ["step_6 heard: hello", "before heard: hello"]
    started[1].end()  # as if its process were lost
    state = wait(client, lambda state: state["ended"])
    assert not state["doing"] and "no longer served" in act(client, "say", 400, text="hello")


def test_unused_models_end(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(talk, "IDLE_SECONDS", 0)
    start(client, "before")
    assert wait(client, lambda state: state["ended"])["fault"] == "ended: unused for 0 minutes"


def test_the_longest_message_fits_in_a_request(client: TestClient) -> None:
    start(client, "before")
    wait(client)
    text = "\U0001f600" * talk.LONGEST_MESSAGE
    act(client, "say", text=text)
    assert wait(client)["chats"][0]["row"]["messages"][0]["content"] == text


def test_an_update_that_cannot_be_read_ends_the_session(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def updates(speaker: ScriptedSpeaker) -> Iterator[Any]:
        yield {"progress": "a server starts"}
        raise ValueError("two\nlines")

    monkeypatch.setattr(ScriptedSpeaker, "updates", updates)
    start(client, "before")
    state = wait(client, lambda state: state["ended"])
    assert state["fault"].startswith("ValueError: two") and state["fault"].isprintable()
