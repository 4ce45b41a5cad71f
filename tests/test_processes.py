"""Processes that a test leaves are noticed at the end of the session."""

from __future__ import annotations

import subprocess

import pytest

from tests import processes


@pytest.mark.processes
def test_a_process_is_known_by_the_test_that_started_it() -> None:
    """Also one that a program has started, which has ended since."""
    orphan = subprocess.run(["setsid", "--fork", "sleep", "600"], check=False)
    with subprocess.Popen(["sleep", "601"]) as child:
        found = {tuple(process.cmdline()): (process, test) for process, test in processes.alive().items()}
        child.kill()
    grandchild, test = found["sleep", "600"]
    grandchild.kill()
    grandchild.wait(10)
    assert orphan.returncode == 0 and found["sleep", "601"][1] == test
    assert test.startswith("tests/test_processes.py::test_a_process_is_known_by_the_test_that_started_it")
    assert grandchild not in processes.alive()
