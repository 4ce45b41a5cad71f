"""Both stages of experiment=desk_costs at small size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SMALL = ["launch.nproc_per_node=1", "parallel.tp=1", "train.prompts_per_step=2", "optim.warmup_steps=0"]
SFT = ["experiment=desk_costs_sft", "train.steps=2"]
RL = [
    "experiment=desk_costs",
    "train.steps=1",
    "train.rollouts_per_prompt=2",
    "rollout.futures=2",
    "reward.malformed=null",
    "train.eval_tasks=2",
]


def test_both_stages_start_and_end_with_an_evaluation_at_each_cost(tmp_path: Path) -> None:
    folders = {stage: f"{tmp_path}/{stage}" for stage in ("sft", "rl")}
    settings = {"sft": SFT, "rl": [*RL, f"model.path={folders['sft']}/hf"]}
    for stage, overrides in settings.items():
        command = [sys.executable, "-m", "megatron_collab.train", *overrides, *SMALL]
        command += [f"data.dir={tmp_path}/world", f"run.dir={folders[stage]}"]
        with (tmp_path / "console.log").open("w") as log:
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=800).returncode
        assert code == 0, (tmp_path / "console.log").read_text()[-3000:]
    (step,) = [json.loads(line) for line in (tmp_path / "rl" / "metrics.jsonl").read_text().splitlines()]
    assert {"reward", "equal_rewards", "score/desk_utility"} <= step.keys()
    after = json.loads((tmp_path / "rl" / "result.json").read_text())["after"]
    for name in ("goals", "goals_0.02", "goals_0.2", "goals_0.4", "goals_0.8"):
        assert {f"{name}/{metric}" for metric in ("desk_utility", "desk_questions", "token_amount")} <= after.keys()
