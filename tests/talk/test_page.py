"""The page's talk over the real models of a run, without a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
from starlette.testclient import TestClient

from megatron_collab.runtime.process import wait_for
from megatron_collab.talk.speaker import SpeakerProcess
from megatron_collab.view.runs import RunView
from megatron_collab.view.server import application
from tests.view.test_server import TOKEN, URL
from tests.view.test_talk import act, start, wait

SECONDS = 600


pytestmark = [pytest.mark.slow, pytest.mark.processes]


def test_two_models_a_simulated_user_and_futures(run: Path) -> None:
    before = {*psutil.Process().children(recursive=True)}
    client = TestClient(application([RunView(run)], TOKEN), base_url=URL)
    client.get(f"/?token={TOKEN}")
    start(client, "before", "step_60", task="booking-eval-0-0")
    state = wait(client, seconds=SECONDS)
    assert not state["fault"] and {tasks["name"] for tasks in state["sets"]} == {"eval", "train"}
    assert roles(state) == [["user", "assistant"]] * 2
    act(client, "futures", count=2)
    for chat in wait(client)["chats"]:
        assert [row["future"] for row in chat["futures"]] == [0, 1] and "booking_right" in chat["futures"][0]["scores"]
    act(client, "user")
    assert all(after[:3] == ["user", "assistant", "user"] for after in roles(wait(client)))
    start(client, "before", "step_60", task="none")
    assert all("no task has the id none" in chat["fault"] for chat in wait(client)["chats"])
    start(client, "before", "step_60")
    assert roles(wait(client)) == [[], []]
    act(client, "say", text="please book a table .")
    assert roles(wait(client)) == [["user", "assistant"]] * 2
    act(client, "user")
    assert all("no task" in chat["fault"] for chat in wait(client)["chats"])
    assert act(client, "stop")["ended"]
    assert wait_for(lambda: {*psutil.Process().children(recursive=True)} <= before, SECONDS)


def test_models_of_two_runs_have_a_process_each(run: Path) -> None:
    before = {*psutil.Process().children(recursive=True)}
    client = TestClient(application([RunView(run), RunView(run)], TOKEN), base_url=URL)
    client.get(f"/?token={TOKEN}")
    act(client, "start", models=[[0, "before"], [1, "step_60"]], task="booking-eval-0-0")
    state = wait(client, seconds=SECONDS)
    assert not state["fault"] and roles(state) == [["user", "assistant"]] * 2
    act(client, "say", text="for 3 people on sunday at 5pm .")
    assert all(len(messages) == 4 for messages in roles(wait(client)))
    assert act(client, "stop")["ended"]
    assert wait_for(lambda: {*psutil.Process().children(recursive=True)} <= before, SECONDS)


def test_a_refused_start_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"program": "evaluate", "run": {}}')
    (update,) = SpeakerProcess(tmp_path, ["before"], 0, 1).updates()
    assert "trains no model" in update["fault"] and update["fault"].isprintable()


def roles(state: Any) -> list[list[str]]:
    return [[message["role"] for message in chat["row"]["messages"]] for chat in state["chats"]]
