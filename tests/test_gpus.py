"""GPU tests can be collected without a GPU and name what they lack; their ranks and their report."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tests import gpus

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("tests", "least"),
    [("tests/trainer/test_trainer.py", 8), ("tests", 25)],
)
def test_every_gpu_test_without_a_gpu_names_what_it_lacks(tmp_path: Path, tests: str, least: int) -> None:
    page = tmp_path / "report.md"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", tests]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [*command, "--gpu-report", str(page)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-2000:]
    rows = [line.split(" | ") for line in page.read_text().splitlines() if line.startswith("| `tests/")]
    assert len(rows) >= least
    assert {row[2] for row in rows} == {"skipped"}
    assert all(row[4].startswith("needs ") and " GPU" in row[4] for row in rows)


def test_the_report_lists_what_was_measured(tmp_path: Path) -> None:
    report = gpus.Report(tmp_path / "new" / "report.md")
    report.pytest_runtest_logstart("tests/a.py::test_b")
    assert "- Not ended: `tests/a.py::test_b`" in (tmp_path / "new" / "report.md").read_text()
    # The page is there after each test, without an end of the session: it may be killed.
    for when, outcome, seconds in (("setup", "passed", 1.0), ("call", "failed", 2.0), ("teardown", "passed", 0.5)):
        report.pytest_runtest_logreport(
            pytest.TestReport(
                nodeid="tests/a.py::test_b",
                location=("tests/a.py", 1, "test_b"),
                keywords={},
                outcome=outcome,  # type: ignore[arg-type]
                longrepr="tests/a.py:3: in test_b\nE   assert 1 == 2" if when == "call" else None,
                when=when,  # type: ignore[arg-type]
                user_properties=[("GiB", 2.5)] if when == "call" else [],
                duration=seconds,
            )
        )
    page = (tmp_path / "new" / "report.md").read_text()
    assert "| `tests/a.py::test_b` |  | failed | 3.5 | E   assert 1 == 2, GiB 2.5 |" in page
    assert "0 passed, 1 failed, 0 skipped" in page and "Not ended" not in page


@pytest.mark.slow
@pytest.mark.processes
def test_ranks_on_gpus_are_separate_interpreters(tmp_path: Path) -> None:
    call = tmp_path / "call"
    call.write_bytes(pickle.dumps((dict(os.environ), 2, pickle.dumps((place, (10,))))))
    subprocess.run([sys.executable, "-m", "tests.forked", "spawn", str(call)], cwd=ROOT, check=True, timeout=300)
    ended = pickle.loads(call.read_bytes())
    assert [code for code, _ in ended] == [0, 0]
    assert [result[0] for _, result in ended] == [10, 11]
    assert all(command[:-1] == [sys.executable, "-m", "tests.forked", "rank", str(call)] for _, (_, command) in ended)


def place(more: int) -> tuple[int, list[str]]:
    """As a rank: its number plus `more`, and its command line."""
    return more + int(os.environ["RANK"]), Path("/proc/self/cmdline").read_text().split("\0")[:-1]
