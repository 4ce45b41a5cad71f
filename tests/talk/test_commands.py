"""`megatron-collab chat` and `serve` as processes with real servers, and what both refuse before they start any."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from megatron_collab.commands.__main__ import run as run_command
from megatron_collab.config import Config
from megatron_collab.inference.server import UNPUBLISHED
from megatron_collab.talk.serve import KEY_VARIABLE
from tests.helpers import listening
from tests.talk.conftest import write_run

SECONDS = 300  # until a command has started or ended
# In tests that run in the background of a shell, SIGINT is ignored, which processes inherit.
MAIN = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from megatron_collab.commands.__main__ import main; sys.exit(main())"
)


@contextmanager
def command(*arguments: object, cache: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    words = ["env", f"XDG_CACHE_HOME={cache}", *(f"{name}={value}" for name, value in environment.items())]
    words += [sys.executable, "-c", MAIN, *map(str, arguments)]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            descendants = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            for descendant in descendants:
                with suppress(psutil.NoSuchProcess):
                    descendant.kill()
            process.kill()


def words_of(process: psutil.Process) -> list[str]:
    """Its command line, which is empty if it has ended."""
    with suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []


def content(folder: Path) -> dict[str, int]:
    """The files of a folder, with the times of their last changes."""
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


@pytest.mark.processes
@pytest.mark.slow
def test_a_person_and_the_simulated_user_talk_with_two_models_side_by_side(run: Path, tmp_path: Path) -> None:
    """The trained model answers in the words of the booking world, the one that it began with at random."""
    before, saved = content(run), tmp_path / "saved.jsonl"
    lines = ["/undo", "/futures 3", "/futures 99", "for 3 people on sunday at 5pm .", "/undo", "/user"]
    lines += [f"/save {saved}", "/begin", "/reset"]
    options = ["--beside", "before", "--index", "3", "reward.weights.needless_questions=0"]
    with command("chat", run, *options, cache=tmp_path) as process:
        printed, errors = process.communicate("\n".join(lines), timeout=SECONDS)
    assert process.returncode == 0, errors
    assert printed.startswith("step_60: converting") and "step_60, before: ready after" in printed
    rows = {row["model"]: row for row in map(json.loads, saved.read_text().splitlines())}
    assert [*rows] == ["step_60", "before"] and all(row["user"] == "scripted/booking" for row in rows.values())
    trained, first = (row["messages"] for row in rows.values())
    assert trained[0] == first[0] and trained[2]["role"] == "user", "the simulated user has answered"
    begins = re.compile(r"\s*(done :|how many|which day|what time)")  # within a reply such words may be chance
    assert begins.match(trained[1]["content"]) and not begins.match(first[1]["content"])
    scored = [row for row in rows.values() if row["ending"]]
    assert all(row["scores"]["booking_right"] in (0, 1) for row in scored)

    shown = printed.partition("ready after")[2]
    for name in ("step_60", "before"):
        futures = [line for line in shown.splitlines() if line.startswith(f"--- {name}, future")]
        assert len(futures) == 3 and all("booking_right" in line and "reward over all" in line for line in futures)
        assert f"--- {name}: back to message 2" in shown
    assert "no message to undo" in shown and "99 futures: give a number from 1 to 16" in shown
    assert shown.count("/user, /futures N") == 1, "of a line that is no command"
    first_message = f"user: {trained[0]['content']}"
    assert shown.count(first_message) == 4, "of two chats, which were begun twice"
    assert "user: for 3 people" not in shown, "the terminal has it already"
    assert content(run) == before and not errors


@pytest.mark.processes
def test_a_served_model_is_for_those_who_have_the_key(run: Path, tmp_path: Path) -> None:
    before = content(run)
    with command("serve", run, "--step", "before", cache=tmp_path) as process:
        assert process.stdout
        shown = [process.stdout.readline() for _ in range(3)]
        address = re.fullmatch(r"before: model rl at (http://127\.0\.0\.1:\d+)/v1\n", shown[1])
        assert address, [*shown, process.communicate(timeout=SECONDS)[1]]
        key = shown[2].removeprefix("key: ").strip()
        with httpx.Client(base_url=address[1], trust_env=False, timeout=60) as client:
            assert client.get("/v1/models").status_code == 401
            client.headers["Authorization"] = f"Bearer {key}"
            assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["rl"]
            request = {"model": "rl", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
            (choice,) = client.post("/v1/chat/completions", json=request).json()["choices"]
            assert choice["message"]["role"] == "assistant"
            assert client.get("/model_info").json()["weight_version"] == "0" != str(UNPUBLISHED)
            managing = ["/server_info", "/get_server_info", "/flush_cache"]
            assert [client.get(path).status_code for path in managing] == [401, 401, 401]
        server = psutil.Process(process.pid).children(recursive=True)
        assert {host for places in listening(server).values() for host, _ in places} == {"127.0.0.1"}
        assert not any(key in word for child in server for word in words_of(child))
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0 and not printed and not errors
    assert not psutil.wait_procs(server, timeout=60)[1], "the server ends with the command"
    assert content(run) == before


@pytest.mark.processes
@pytest.mark.slow
def test_a_server_that_cannot_start_shows_why_but_no_key(run: Path, tmp_path: Path) -> None:
    broken, key = tmp_path / "broken", "-my-own-key-123"
    settings = json.loads((run / "config.json").read_text())
    shutil.copytree(settings["model"]["path"], broken)
    (broken / "model.safetensors").write_bytes(b"torn")
    folder = tmp_path / "run"
    settings["model"]["path"] = str(broken)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    with command("serve", folder, "--step=before", cache=tmp_path, **{KEY_VARIABLE: key}) as process:
        printed, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 3 and "it ended with code" in errors and "Error" in errors
    assert key not in printed + errors


def refusal(capsys: pytest.CaptureFixture[str], name: str, arguments: Sequence[object]) -> str:
    """The line that the command prints."""
    assert run_command(name, [*map(str, arguments)]) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert not printed.out
    return line


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of supervised training without a checkpoint."""
    config = Config()
    config.run.dir, config.model.path, config.train.stage = str(tmp_path / "run"), str(tmp_path / "model"), "sft"
    config.data.train = str(tmp_path / "rows.jsonl")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return write_run(tmp_path / "run", config)


@pytest.mark.seconds
@pytest.mark.parametrize("name", ["chat", "serve"])
def test_bad_input_is_refused_in_one_line(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = [folder, "--step=before"]
    for arguments, reason in [
        ([folder.parent], "holds no run; give the folder of a training run"),
        ([folder], "has no checkpoint yet; take before, or wait for train.checkpoint_every"),
        ([folder, "--step=20"], "has no model 20; it has before"),
        ([*before, "model.path=x"], "model.path: the model of the run and this command decide it; remove it"),
        ([*before, "rollout.tempreature=1"], "rollout.tempreature"),
        ([*before, "launch.device=tpu"], "launch.device=tpu"),
    ]:
        assert reason in refusal(capsys, name, arguments)


def test_bad_tasks_are_refused_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = [folder, "--step=before"]
    for arguments, reason in [
        ([*before, "--task=a", "--index=1"], "--task and --index: give one of them"),
        ([*before, "--user=a"], "--user: plays a task; give --task ID or --index N too"),
        ([*before, "--index=0"], "its training played no conversations, so there are no tasks"),
    ]:
        assert reason in refusal(capsys, "chat", arguments)


@pytest.mark.seconds
def test_a_task_must_be_in_the_data_of_the_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = json.loads((folder / "config.json").read_text())
    settings["train"]["stage"], settings["reward"]["weights"] = "rl", {"token_amount": -0.001}
    settings["user"]["name"] = "reveal"
    (folder / "config.json").write_text(json.dumps(settings))
    before = [folder, "--step=before"]
    assert "rows.jsonl" in refusal(capsys, "chat", [*before, "--index=0"])
    rows = [{"id": "one", "prompt": [{"role": "user", "content": "hi"}], "goal": "g", "answer": "a"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for arguments, reason in [
        (["--index=1"], "data.train: has no task number 1, but 0 to 0"),
        (["--task=two"], "no task has the id two; its data may have changed"),
        (["--index=0", "--set=other"], "has no tasks other; it has rows"),
        (["--task=one", "--user=nobody"], "user=nobody: no such name"),
    ]:
        assert reason in refusal(capsys, "chat", [*before, *arguments])


@pytest.mark.seconds
def test_an_address_that_cannot_be_used_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [folder, "--step=before"]
    assert "--host=localhost: " in refusal(capsys, "serve", [*before, "--host=localhost"])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert f"--port={port}: address already in use" in refusal(capsys, "serve", [*before, f"--port={port}"])
    for key in ("short", "schl\u00fcssel", "my own key", "my-own-key\n"):
        monkeypatch.setenv(KEY_VARIABLE, key)
        assert f"{KEY_VARIABLE}: give at least 8 characters, printable" in refusal(capsys, "serve", before)
