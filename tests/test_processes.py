"""Processes that a test leaves behind are ended if it failed, and reported at the end of the session otherwise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests import processes

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[1]
LEAVES = """
import subprocess

from tests import processes

processes.END_SECONDS = 2.0


def test_that_fails():
    subprocess.run(["setsid", "--fork", "tail", "--follow", __file__])
    raise AssertionError


def test_that_passes():
    subprocess.run(["setsid", "--fork", "tail", "-f", __file__])
"""


def test_a_process_is_known_by_the_test_that_started_it() -> None:
    """Even if its parent was another program that has ended since."""
    orphan = subprocess.run(["setsid", "--fork", "sleep", "600"], check=False)
    with subprocess.Popen(["sleep", "601"]) as child:
        started = {}
        while not {("sleep", "600"), ("sleep", "601")} <= started.keys():  # until both have become their programs
            started = {tuple(process.cmdline()): (process, test) for process, test in processes.alive().items()}
        child.kill()
    grandchild, test = started["sleep", "600"]
    grandchild.kill()
    grandchild.wait(60)
    assert orphan.returncode == 0 and started["sleep", "601"][1] == test
    assert test.startswith("tests/test_processes.py::test_a_process_is_known_by_the_test_that_started_it")
    assert grandchild not in processes.alive()


def test_a_session_ends_what_a_failed_test_leaves_and_fails_for_what_others_leave(tmp_path: Path) -> None:
    file = tmp_path / "test_leaves.py"
    file.write_text(LEAVES)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", str(file)]
    session = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    (leftover,) = (
        process for process in psutil.process_iter(["cmdline"]) if (process.info["cmdline"] or [])[2:] == [str(file)]
    )
    leftover.kill()
    assert leftover.info["cmdline"][1] == "-f", "of the test that passed"
    assert "1 failed, 1 passed, 1 error" in session.stdout, session.stdout
    assert f"test_leaves.py::test_that_passes (call) left {leftover.pid}: " in session.stdout
    assert "test_that_fails (" not in session.stdout
