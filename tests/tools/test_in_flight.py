"""The bench of conversations in flight, for seconds: nothing is lost on the real worker."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "tools" / "bench" / "in_flight.py"


def test_no_conversation_is_lost() -> None:
    options = ["--conversations", "100", "--minutes", "0.1", "--turn-seconds", "1"]
    run = subprocess.run([sys.executable, str(BENCH), *options], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["name"] == "in_flight"
    values = result["values"]
    assert values["lost"] == 0
    assert values["conversations"] >= 100 and values["in_flight_mean"] >= 50
    assert values["us_per_turn"] > 0 and values["memory_growth"] > 0
