"""`megatron-collab view` as a process: what it prints, where it listens, how it ends, what it refuses."""

from __future__ import annotations

import errno
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from megatron_collab.commands.__main__ import run
from megatron_collab.view import command
from tests.helpers import listening

ROOT = Path(__file__).resolve().parents[2]
# In tests that run in the background of a shell, SIGINT is ignored, which processes inherit.
MAIN = (
    "import signal, sys, threading; signal.signal(signal.SIGINT, signal.default_int_handler)\n{setup}\n"
    "from megatron_collab.commands.__main__ import main; sys.exit(main())"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward": 0.5}\n')
    return tmp_path


@contextmanager
def viewing(*arguments: object, cwd: Path, setup: str = "") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process of the command in the folder `cwd`, and the line that it prints."""
    words = [sys.executable, "-c", MAIN.format(setup=setup), "view", *map(str, arguments)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=cwd, **pipes) as process:
        try:
            assert process.stdout
            yield process, process.stdout.readline()
        finally:
            process.kill()


def client() -> httpx.Client:
    return httpx.Client(follow_redirects=True, trust_env=False)


def end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What it prints until it has ended, after Ctrl-C."""
    process.send_signal(signal.SIGINT)
    printed = process.communicate(timeout=60)
    assert process.returncode == 0
    return printed


def commands() -> list[list[str]]:
    """The arguments of every `megatron-collab view` of the page about it."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "docs/howto/view.md").read_text(), re.DOTALL)
    words = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    return [line[2:] for line in words if line[:2] == ["megatron-collab", "view"]]


@pytest.mark.processes
@pytest.mark.parametrize(
    "arguments", [pytest.param(words, marks=[pytest.mark.slow] * (at > 0)) for at, words in enumerate(commands())]
)
def test_it_answers_at_the_address_that_it_prints_until_ctrl_c(tmp_path: Path, arguments: list[str]) -> None:
    """As the page about it says, with another port: tests run beside each other."""
    port = ["--port", "0"] if "--port" in arguments else []
    folders = arguments[: arguments.index("--port")] if port else arguments
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "metrics.jsonl").write_text('{"step": 0, "reward": 0.5}\n')
    with viewing(*folders, *port, cwd=tmp_path) as (process, line), client() as browser:
        address, _, token = line.rstrip("\n").partition("?token=")
        assert line.endswith("\n") and len(token) >= 40
        assert {host for host, _ in listening([psutil.Process(process.pid)])[psutil.Process(process.pid)]} == {
            urlsplit(address).hostname
        }
        assert browser.get(f"{address}api/runs").status_code == 403
        assert "<!doctype html>" in browser.get(line.strip()).text
        assert [entry["folder"] for entry in browser.get(f"{address}api/runs").json()] == folders
        upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"}
        assert browser.get(f"{address}api/runs?token={token}", headers=upgrade).status_code == 200
        assert end(process) == ("", ""), "nothing is logged, whatever is requested"


@pytest.mark.processes
def test_ctrl_c_ends_it_while_a_run_is_being_read(folder: Path) -> None:
    setup = (
        "from concurrent.futures import ThreadPoolExecutor; from megatron_collab.view.runs import RunView\n"
        "def events(run):\n"
        "    with ThreadPoolExecutor(1) as pool:\n"  # as the index over transcripts reads
        "        print('reading', flush=True)\n"
        "        pool.submit(threading.Event().wait).result()\n"
        "RunView.events = events"
    )
    with viewing(folder, cwd=folder, setup=setup) as (process, line), client() as browser:
        browser.get(line.strip())
        request = browser.build_request(
            "GET", f"{line.partition('?')[0]}api/runs/0/events", timeout=httpx.Timeout(60, read=0.1)
        )
        with pytest.raises(httpx.ReadTimeout):
            browser.send(request)
        assert process.stdout and process.stdout.readline() == "reading\n"
        assert end(process) == ("", "")


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert run("view", [*map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_bad_input_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "empty").mkdir()
    nowhere = refusal(capsys, folder, folder / "none")
    assert nowhere == f"megatron-collab: {folder}/none: no such folder; give the folder of a run\n"
    assert refusal(capsys, folder / "empty").startswith(f"megatron-collab: {folder}/empty: has no metrics.jsonl")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        refused = refusal(capsys, folder, "--port", port)
    assert refused.startswith(f"megatron-collab: --port={port}: 127.0.0.1 cannot listen there: Address already in use")
    assert refused.count("\n") == 1 and refused.endswith("; choose another\n")


@pytest.mark.parametrize("port", ["65536", "-1", "x"])
def test_a_port_is_a_port(folder: Path, port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        run("view", [str(folder), f"--port={port}"])
    assert error.value.code == 2 and "argument --port: invalid" in capsys.readouterr().err


class Ipv6Socket:
    def getsockname(self) -> tuple[str, int, int, int]:
        return "::1", 8000, 0, 0


def test_without_ipv4_it_listens_at_the_loopback_address_of_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    available = {"::1": Ipv6Socket()}

    def create_server(address: tuple[str, int], family: int) -> Any:
        if address[0] in available:
            return available[address[0]]
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    monkeypatch.setattr(command.socket, "create_server", create_server)
    assert command.address(command.listening(0)) == "http://[::1]:8000/"
    available.clear()
    with pytest.raises(command.ConfigError, match="no loopback address"):
        command.listening(0)


def test_a_folder_that_is_named_twice_is_shown_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = folder / "link"
    link.symlink_to(folder)
    shown: list[Path] = []
    monkeypatch.setattr(command, "application", lambda runs, token: shown.extend(run.folder for run in runs))
    monkeypatch.setattr(command, "serve", lambda server, server_socket: 0)
    assert run("view", [str(folder / "."), str(link), f"{folder}/../{folder.name}"]) == 0
    assert shown == [folder]
