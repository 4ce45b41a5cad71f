"""Real problems with a random model, which solves none of them: all metrics and transcripts are written."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import transcript_rows

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def test_two_steps_with_every_metric_and_every_transcript(tmp_path: Path, dataset: Callable[[str], Path]) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "megatron_collab.train", "experiment=gsm8k", f"data.path={dataset('gsm8k')}"]
    command += [f"run.dir={run}", f"data.dir={tmp_path}/world", "train.steps=2", "train.eval_tasks=4"]
    with (tmp_path / "console.log").open("w") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=400).returncode
    assert code == 0, (tmp_path / "console.log").read_text()[-3000:]

    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [0, 1]
    for line in metrics:
        assert {"reward", "reward_se", "score/accuracy", "score/token_amount", "score/asks", "kl", "loss"} <= set(line)
        assert line["missing"] == 0

    config = json.loads((run / "config.json").read_text())
    conversations = config["train"]["prompts_per_step"] * config["train"]["rollouts_per_prompt"]
    transcripts = transcript_rows(run)
    assert {line["step"] for line in transcripts} == {0, 1}
    assert len(transcripts) == 2 * conversations  # whole conversations, one per rollout
    assert max(len(line["messages"]) for line in transcripts) > 2
    for line in transcripts:
        assert line["messages"][-1]["content"] is not None
        assert set(line["scores"]) >= {"accuracy", "token_amount", "asks"}
