"""Ranks of tests are forks of one process, with the environment and the output of the test."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_collab.runtime.process import wait_for
from tests import ranks
from tests.fork_server import SET_BY_PATCHES, end_fork_servers
from tests.ranks import run_ranks

pytestmark = pytest.mark.processes


def place(word: str) -> tuple[int, int, str, bool]:
    """As a rank: its fork server, its number, a variable of the test, whether libraries are patched."""
    os.write(2, f"{word} of rank {os.environ['RANK']}\n".encode())  # print may write the line in two pieces
    (server,) = [parent.pid for parent in psutil.Process().parents() if "tests.forked" in parent.cmdline()][-1:]
    changed = "megatron.core" in sys.modules and SET_BY_PATCHES in os.environ
    return server, int(os.environ["RANK"]), os.environ["OF_THE_TEST"], changed


@pytest.mark.slow
def test_calls_share_a_process(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    end_fork_servers()
    monkeypatch.setenv(SET_BY_PATCHES, "True")  # as if the process of the tests had imported LiteLLM before
    run_ranks(len, 1, "start")
    monkeypatch.delenv(SET_BY_PATCHES)
    places = []
    for number in range(2):
        monkeypatch.setenv("OF_THE_TEST", str(number))
        places += run_ranks(place, 2, f"call {number}")
    (server,) = {server for server, *_ in places}
    assert places == [(server, rank, call, True) for call in ("0", "1") for rank in range(2)]
    lines = sorted(capfd.readouterr().err.splitlines())
    assert lines == [f"call {call} of rank {rank}" for call in (0, 1) for rank in (0, 1)]


def wait(seconds: float, file: Path) -> None:
    file.write_text(str(os.getpid()))
    time.sleep(seconds)


@pytest.mark.slow
def test_a_call_that_takes_too_long_is_ended_and_the_next_one_succeeds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = [tmp_path / name for name in ("first", "late", "next")]
    run_ranks(wait, 1, 0.0, files[0])
    monkeypatch.setattr(ranks, "TIMEOUT", 5)
    with pytest.raises(TimeoutError):
        run_ranks(wait, 1, 600.0, files[1])
    monkeypatch.undo()
    run_ranks(wait, 1, 0.0, files[2])
    assert wait_for(lambda: not psutil.pid_exists(int(files[1].read_text())), 60)
