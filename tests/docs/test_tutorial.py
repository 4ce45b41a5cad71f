"""The tutorials: every command on their pages runs, in order, on smaller settings."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from megatron_collab.data.datasets import write_jsonl
from tests.e2e.test_experiments import endpoint, published
from tests.helpers import make_model
from tests.hub import serving

ROOT = Path(__file__).resolve().parents[2]
# For every training of a page. A model that has hardly learned never ends its turns, which scores nothing.
SMALL = (
    "train.steps=2 train.prompts_per_step=2 train.rollouts_per_prompt=2 train.eval_tasks=4 optim.warmup_steps=1 "
    "rollout.futures=2 reward.malformed=null"
)
ONE_RANK = "launch.nproc_per_node=1 parallel.tp=1"  # the booking world's experiments have two
# And for a model of the Hub on this machine, in training and in evaluation.
ON_CPU = (
    "launch.device=cpu model.dtype=float32 run.wandb_project=null rollout.context_length=512 "
    "rollout.turn.max_new_tokens=8 rollout.future.max_new_tokens=8 rollout.server.max_total_tokens=32768"
)

# Each page has several trainings, each with its own servers.
pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(1800)]
__all__ = ["endpoint"]  # a fixture


def blocks(page: str) -> list[str]:
    """The commands of a page of docs/, as it groups them."""
    return re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)


def follow(block: str, folder: Path, environment: Mapping[str, str] = os.environ) -> str:
    """What the commands print, typed in `folder`; each must succeed."""
    program = folder / "bin" / "megatron-collab"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m megatron_collab.commands "$@"\n')
    program.chmod(0o755)
    environment = {**environment, "PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-euc", block], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"{block}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_first_run_and_a_metric_of_ones_own(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "tutorial.md").read_text()
    name, source = re.findall(r"Save this as `(\S+)`:\n\n```python\n(.*?)```", text, re.DOTALL)[0]
    (tmp_path / name).write_text(source)
    install, *commands = blocks("tutorial.md")
    assert install == "make setup\n. .venv/bin/activate\n"  # which tests/test_setup.py runs
    assert len(commands) == 5
    for block in commands:
        trains = block.startswith(("megatron-collab quickstart", "megatron-collab train")) and "--cfg" not in block
        follow(f"{block.rstrip()} {SMALL} {ONE_RANK}" if trains else block, tmp_path)

    brief = rows(tmp_path / "runs/brief/metrics.jsonl")
    assert [step["step"] for step in brief] == [0, 1]
    assert all(0 <= step["score/brevity"] <= 1 for step in brief)
    assert "brevity" in (tmp_path / "runs/brief/report.html").read_text()


def test_from_a_data_set_of_the_hub_to_a_trained_model(endpoint: str, tmp_path: Path) -> None:
    """The names are those of the page: the Hub and OpenAI are stand-ins on loopback, the model is tiny and random."""
    (tmp_path / "hub" / "data").mkdir(parents=True)
    write_jsonl(tmp_path / "hub" / "data" / "train.jsonl", [published(number) for number in range(48)])
    small = f"{SMALL} {ON_CPU} train.eval_every=1 train.checkpoint_every=1"
    commands = blocks("tutorial-hub.md")
    assert len(commands) == 8
    with serving() as hub:
        hub.add("dataset", "collabllm/collabllm-multiturn-math-hard", tmp_path / "hub" / "data")
        model = make_model(tmp_path / "hub" / "model", family="qwen2", tied=True)
        hub.add("model", "Qwen/Qwen2.5-0.5B-Instruct", model)
        openai = {"OPENAI_API_BASE": endpoint, "OPENAI_API_KEY": "a-key-of-the-test"}
        environment = hub.environment(tmp_path / "home", **openai)
        smaller = [
            re.sub(r"(megatron-collab (?:train|evaluate) (?:.*\\\n)*.*)", rf"\1 {small}", command)
            for command in commands
        ]
        looked, _, planned, _, called, _, compared, exported = (
            follow(command, tmp_path, environment) for command in smaller
        )

    assert "read as collabllm" in looked and "48 rows, 24 tasks" in looked
    sides = {to: [rows(tmp_path / f"data/{to}/{side}.jsonl") for side in ("train", "eval")] for to in ("sft", "rl")}
    held_out = [{row["messages"][1]["content"] for row in sides["sft"][1]}, {row["goal"] for row in sides["rl"][1]}]
    assert held_out[0] and {text.split()[-1] for text in held_out[0]} == {text.split()[-1] for text in held_out[1]}

    assert "Fits a GPU of 24 GiB" in planned
    runs = tmp_path / "runs" / "math"
    losses = evaluations(runs / "sft", "score/loss")
    assert len(losses) == 3 and losses[2] < losses[0]
    assert called.count("openai/gpt-4o-mini") == 2 and "failed" not in called
    trained = rows(runs / "rl" / "metrics.jsonl")
    assert [step["step"] for step in trained] == [0, 1] and all(step["missing"] == 0 for step in trained)
    accuracies = evaluations(runs / "rl", "score/accuracy")
    best = json.loads((runs / "rl" / "best.json").read_text())
    assert len(accuracies) == 3 and best["value"] == max(accuracies[1:])
    results = [json.loads((runs / name / "result.json").read_text()) for name in ("trained", "before")]
    assert [result["step"] for result in results] == [best["step"], 0]
    assert compared.count("eval/accuracy_low") == 2
    assert "models/math: written from" in exported and (tmp_path / "models/math/tokenizer.json").is_file()
    assert "eval/accuracy" in (runs / "rl" / "report.html").read_text()


def evaluations(run: Path, score: str) -> list[float]:
    """The scores of the evaluations of a run, in their order."""
    return [record[score] for record in json.loads((run / "evaluations.json").read_text()).values()]
