"""Every bench with --smoke runs to its end and gives its values; the figures themselves need the whole bench."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "tools" / "bench"


@pytest.mark.parametrize(
    ("name", "values"),
    [("futures", ["makespan_over_bound", "serial_over_ours"]), ("reward_loop", ["time_over_ideal"])],
)
def test_a_bench_runs(name: str, values: list[str]) -> None:
    command = [sys.executable, str(BENCH / f"{name}.py"), "--smoke"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["name"] == name
    assert list(result["values"]) == values
    # No order beats the bounds that the benches divide by, and the published order is a slower one.
    assert all(math.isfinite(value) and value >= 1 for value in result["values"].values())
