"""A run whose model and data are names on a stand-in of the Hub; it resumes after the branches have moved."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_collab.data.datasets import write_jsonl
from tests.helpers import make_model
from tests.hub import serving

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]

WORDS = ("friday", "sunday", "seven", "eight", "two people", "five people")
ROWS = [
    {"conversations": [{"from": "human", "value": f"A table, {word}."}, {"from": "gpt", "value": f"Noted: {word}."}]}
    for word in WORDS
]


def test_a_resumed_run_uses_the_commits_it_began_with(tmp_path: Path) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    write_jsonl(data / "train.jsonl", ROWS)
    arguments = ["train.stage=sft", "model.path=some/model", "data.train=some/chats", f"run.dir={run}"]
    arguments += ["launch.device=cpu", "launch.nproc_per_node=2", "model.dtype=float32", "train.prompts_per_step=2"]
    with serving() as hub:
        first = hub.add("model", "some/model", make_model(tmp_path / "model"))
        chats = hub.add("dataset", "some/chats", data)

        def train(steps: int) -> str:
            command = [sys.executable, "-m", "megatron_collab.train", *arguments, f"train.steps={steps}"]
            environment = hub.environment(tmp_path / "home")
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
            return done.stdout

        printed = train(2)
        assert f"data.train=some/chats@{chats}: 6 rows, read as sharegpt (it has conversations)" in printed
        fetched = [
            call for call in hub.requests if call.startswith("GET") and call.endswith((".safetensors", ".jsonl"))
        ]
        assert len(fetched) == 2  # the launcher downloads each once
        hub.add("model", "some/model", make_model(tmp_path / "other", seed=1, layers=2))
        write_jsonl(data / "train.jsonl", ROWS[:1])
        hub.add("dataset", "some/chats", data)
        hub.requests.clear()
        assert "6 rows" in train(4)
        assert hub.requests == []
        command = [sys.executable, "-m", "megatron_collab.commands", "convert", f"{run}@4", f"{tmp_path}/converted"]
        command += ["--model", f"some/model@{first}"]
        subprocess.run(command, env=hub.environment(tmp_path / "home"), check=True, timeout=300)
        assert hub.requests == []
    settings = json.loads((run / "config.json").read_text())
    assert settings["model"]["path"] == f"some/model@{first}" and settings["data"]["train"] == f"some/chats@{chats}"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [0, 1, 2, 3]
    for file in ("tokenizer.json", "model.safetensors"):
        assert (tmp_path / "converted" / file).read_bytes() == (run / "hf" / file).read_bytes()
