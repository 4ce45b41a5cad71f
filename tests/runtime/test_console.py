"""One logger for all lines of a program: levels, streams, names of processes, flags."""

from __future__ import annotations

import ast
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from megatron_collab.runtime import console, screen
from megatron_collab.runtime.process import EXIT_BAD_INPUT

PACKAGE = Path(console.__file__).resolve().parents[1]
logger = logging.getLogger("megatron_collab.a.module")

# Commands print their answers. What else prints, and why:
PRINTS = {
    "runtime/console.py": "it is the console",
    "runtime/signals.py": "a handler, which the logger's lock could block; or no run has begun",
    "runtime/hang_detector.py": "the process hangs, maybe in the logger",
    "launch/torchrun.py": "a handler of the second SIGINT",
    "launch/slurm.py": "the answer to a script",
    "launch/program.py": "the answers of --help and --cfg",
    "environments/desk.py": "the answer of a program: what is predicted",
    "runtime/driver.py": "the answer to the process that started it",
    "inference/cpu/serve.py": "the answer to the process that started it",
    "reward/metrics/accuracy.py": "the answer to the process that started it",
    "rehearsal/servers.py": "the answer to the process that started it",
    "runtime/screen.py": "progress, which is no line of a log; and where the console's lines go",
    "reproduce/__main__.py": "the answer of --commands",
}
ANSWERS = ("commands/", "sandbox/", "user_logs/command.py", "rehearsal/command.py", "talk/")


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(console.LEVEL, "info")
    yield
    monkeypatch.setenv(console.LEVEL, "info")
    console.begin()


@pytest.mark.parametrize(
    ("level", "stdout", "stderr"),
    [
        ("debug", "d\ni\n", "megatron-collab: w\nmegatron-collab: e\n"),
        ("info", "i\n", "megatron-collab: w\nmegatron-collab: e\n"),
        ("Warning", "", "megatron-collab: w\nmegatron-collab: e\n"),
        ("error", "", "megatron-collab: e\n"),
    ],
)
def test_a_level_decides_what_is_shown(
    level: str, stdout: str, stderr: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(console.LEVEL, level)
    console.begin()
    logger.debug("d")
    logger.info("i")
    logger.warning("w")
    logger.error("e")
    assert capsys.readouterr() == (stdout, stderr)


def test_lines_of_a_worker_begin_with_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    console.begin("conversation-3")
    console.begin("conversation-3")
    logger.info("100 % done")
    logger.warning("slow")
    assert capsys.readouterr() == ("[conversation-3] 100 % done\n", "megatron-collab: [conversation-3] slow\n")


def test_keys_are_redacted(capsys: pytest.CaptureFixture[str]) -> None:
    console.begin()
    logger.info("key sk-0123456789abcdefghij")
    assert capsys.readouterr().out == "key ***\n"


def test_flags_are_passed_on_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(screen.PLAIN, "0")
    arguments = ["--quiet", "experiment=booking", "--plain", "--verbose"]
    assert console.take_flags(arguments) == ["experiment=booking"] and os.environ[console.LEVEL] == "debug"
    assert os.environ[screen.PLAIN] == "1"
    assert console.take_flags(["a=--quiet"]) == ["a=--quiet"] and os.environ[console.LEVEL] == "debug"


def test_an_unknown_level_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(console.LEVEL, "loud")
    with pytest.raises(SystemExit) as refused:
        console.begin()
    line = "megatron-collab: MEGATRON_COLLAB_LOG=loud: no such level; choose one of debug, info, warning, error\n"
    assert refused.value.code == EXIT_BAD_INPUT and capsys.readouterr().err == line


@pytest.mark.processes
def test_a_program_takes_the_flags_in_either_place() -> None:
    for arguments in (["--quiet", "no-command"], ["evaluate", "no.such=1", "--verbose"]):
        command = [sys.executable, "-m", "megatron_collab.commands", *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert result.returncode == EXIT_BAD_INPUT and result.stderr.startswith("megatron-collab: no"), result.stderr


@pytest.mark.processes
def test_a_line_is_written_in_one_piece_in_a_container_that_sets_pythonunbuffered() -> None:
    """Ranks share one stream: of lines written in pieces, the pieces mix."""
    script = "import logging, sys; from megatron_collab.runtime import console; console.begin('rank 1');"
    script += "logging.getLogger('megatron_collab').warning('first');"
    script += "print('second', 2, file=sys.stderr); raise ValueError(3)"
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # keeps what one write wrote together
    with ours, theirs:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        subprocess.run([sys.executable, "-c", script], stderr=theirs, env=environment, timeout=100)
        ours.setblocking(False)
        pieces = []
        with suppress(BlockingIOError):
            while True:
                pieces.append(ours.recv(1 << 16).decode())
    assert "".join(pieces).splitlines(keepends=True) == [piece for piece in pieces if piece]
    assert pieces[0] == "megatron-collab: [rank 1] first\n" and pieces[-1] == "ValueError: 3\n"


@pytest.mark.seconds
def test_only_answers_are_printed() -> None:
    for file in PACKAGE.rglob("*.py"):
        name = file.relative_to(PACKAGE).as_posix()
        calls = (node.func for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call))
        prints = any(isinstance(called, ast.Name) and called.id == "print" for called in calls)
        assert not prints or name in PRINTS or name.startswith(ANSWERS), f"{name} prints; use its logger"
        assert prints or name not in PRINTS, f"{name} prints nothing; remove it from PRINTS"
