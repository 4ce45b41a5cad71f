"""The tutorial: every command on its page runs, in order, on smaller settings."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tutorial.md"
# For every training of the page. A model that has hardly learned never ends its turns, which scores nothing.
SMALL = (
    "train.steps=2 train.prompts_per_step=2 train.rollouts_per_prompt=2 train.eval_tasks=4 optim.warmup_steps=1 "
    "rollout.futures=2 reward.malformed=null"
)

# Three trainings, each with its own servers.
pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_every_command_runs(tmp_path: Path) -> None:
    text = PAGE.read_text()
    name, source = re.findall(r"Save this as `(\S+)`:\n\n```python\n(.*?)```", text, re.DOTALL)[0]
    (tmp_path / name).write_text(source)
    program = tmp_path / "bin" / "megatron-collab"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m megatron_collab.commands "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

    install, *blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    assert install == "make setup\n. .venv/bin/activate\n"  # which tests/test_setup.py runs
    assert len(blocks) == 5
    for block in blocks:
        trains = block.startswith(("megatron-collab quickstart", "megatron-collab train")) and "--cfg" not in block
        small = f"{block.rstrip()} {SMALL}" if trains else block
        done = subprocess.run(
            ["bash", "-euc", small], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, f"{small}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"

    steps = [json.loads(line) for line in (tmp_path / "runs/brief/metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [0, 1]
    assert all(0 <= step["score/brevity"] <= 1 for step in steps)
    assert "brevity" in (tmp_path / "runs/brief/report.html").read_text()
