"""SIGUSR1 at random times of the real program, until it is done: tools/bench/preemption.py with fewer signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

REPOSITORY = Path(__file__).resolve().parents[2]
SIGNALS = 3
WITHIN = 300  # seconds from the signal to the end: what --signal of the scripts in slurm/ leaves


def test_a_machine_that_is_wanted_back_costs_no_step_and_no_group(tmp_path: Path) -> None:
    command = [sys.executable, "tools/bench/preemption.py", f"--signals={SIGNALS}", f"--root={tmp_path}"]
    bench = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        said, _ = bench.communicate(timeout=1700)
    finally:
        if bench.poll() is None:
            os.killpg(bench.pid, signal.SIGKILL)
    logs = "".join(log.read_text()[-1500:] for log in tmp_path.glob("*.log"))
    assert bench.returncode == 0, f"{said}\n{logs}"
    values = json.loads(said.splitlines()[-1])["values"]
    assert values["saved"] == values["of"] == SIGNALS, f"{said}\n{logs}"
    assert values["in_journal"] > 0, said
    assert values["equal"] == 1 and values["played_again"] == 0, said
    assert values["slowest_s"] <= WITHIN, said
