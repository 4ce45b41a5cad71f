"""A training whose user and judge are a model that the run serves itself, colocated with the trainer.

On a GPU its weights are offloaded to the host while the trainer uses the device, and loaded back.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers import make_model, transcript_rows
from tests.proxy import recording_proxy

# On a GPU the run is in bfloat16.
pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.server,
    pytest.mark.timeout(2400),
]

# Sizes of heads that GPU kernels support.
SIZES = {"cpu": {}, "cuda": {"hidden": 512, "ffn": 1024, "heads": 8, "kv_heads": 4, "head_dim": 64}}
ON = {
    "cpu": ["launch.device=cpu", "model.dtype=float32"],
    "cuda": ["launch.device=cuda", "model.dtype=bfloat16", "rollout.server.max_total_tokens=32768"],
}
SECONDS = {"cpu": 550, "cuda": 1800}  # kernels are compiled at a first start
LOGIT = 5.0  # of a quote; the other 511 tokens have 0, so that texts end after about three tokens


def make_talker(folder: Path, **sizes: int) -> Path:
    """A model that samples all tokens alike for any prompt, except the quote more often, so that its JSON ends."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make_model(folder, layers=1, **sizes)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    (quote,) = tokenizer('"', add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
                weight.zero_()
        model.model.embed_tokens.weight.fill_(1.0)
        last = model.model.norm.weight
        model.lm_head.weight[quote] = LOGIT * last / last.square().sum()
    model.save_pretrained(folder)
    return folder


def test_a_model_of_the_runs_own_is_user_and_judge(tmp_path: Path, device_type: str) -> None:
    sizes = SIZES[device_type]
    rows = [
        {"prompt": [{"role": "user", "content": f"hi {i}"}], "goal": "a table", "answer": "a blue one", "id": str(i)}
        for i in range(4)
    ]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = tmp_path / "run"
    settings = [
        f"run.dir={run}",
        f"data.train={tmp_path}/tasks.jsonl",
        f"model.path={make_model(tmp_path / 'policy', **sizes)}",
        *ON[device_type],
        f"servers={{helper: {{model: {make_talker(tmp_path / 'talker', **sizes)}, colocated: true, "
        "max_total_tokens: 32768, args: {constrained-json-disable-any-whitespace: true}}}",
        "user.name=llm",
        "user.model=served/helper",
        "user.max_tokens=120",
        "user.attempts=6",
        "reward.judge.model=served/helper",
        "reward.judge.temperature=1",
        "reward.judge.max_tokens=120",
        "reward.weights={accuracy: 1}",
        "reward.metrics.accuracy.judge=true",
        "train.steps=2",
        "train.prompts_per_step=2",
        "train.rollouts_per_prompt=2",
        "rollout.futures=1",
        "rollout.max_user_turns=1",
        "rollout.turn.max_new_tokens=8",
        "rollout.future.max_new_tokens=8",
        "rollout.context_length=900",
        "reward.malformed=null",  # the random policy never ends a turn by itself
        "llm.requests_per_minute=1",  # applies only to models of others
    ]
    command = [sys.executable, "-m", "megatron_collab.train", *settings]
    with (tmp_path / "console.log").open("w") as log, recording_proxy() as proxy:
        environment, seconds = {**os.environ, **proxy.environment()}, SECONDS[device_type]
        code = subprocess.run(
            command, cwd=tmp_path, stdout=log, stderr=log, env=environment, timeout=seconds
        ).returncode
    assert code == 0, (tmp_path / "console.log").read_text()[-5000:]
    assert proxy.requests == [], "all that is asked is on loopback"

    transcripts = transcript_rows(run)
    assert len(transcripts) == 2 * 2 * 2
    assert {row["scores"]["accuracy"] for row in transcripts} <= {0, 1}
    texts = {row["messages"][2]["content"] for row in transcripts}
    assert len(texts) > 4 and all(texts), "the user's sample is in its seed"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["servers/helper_lost"] for line in metrics] == [0, 0]
    assert (run / "sglang-helper-0.log").exists()


def test_a_served_model_describes_the_users_of_a_log(tmp_path: Path) -> None:
    """Its answers have the requested form, since the server allows no other."""
    texts = [f"I want table {number} at the window of room {3 * number}" for number in range(12)]
    log = [
        {"user_id": f"u{number}", "messages": [{"role": "user", "content": text}]} for number, text in enumerate(texts)
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
    settings = [
        *ON["cpu"],
        f"servers={{helper: {{model: {make_talker(tmp_path / 'talker')}, max_total_tokens: 32768, "
        "args: {constrained-json-disable-any-whitespace: true}}}",
        "reward.judge.model=served/helper",
        "reward.judge.temperature=1",
        "reward.judge.max_tokens=240",
    ]
    command = [
        sys.executable,
        "-m",
        "megatron_collab.commands",
        "users-from-logs",
        "log.jsonl",
        "--out",
        "out",
        *settings,
    ]
    with (tmp_path / "console.log").open("w") as console:
        code = subprocess.run(command, cwd=tmp_path, stdout=console, stderr=console, timeout=300).returncode
    assert code == 0, (tmp_path / "console.log").read_text()[-5000:]
    assert {file.name for file in (tmp_path / "out").iterdir()} <= {"train.jsonl", "eval.jsonl", "README.md"}
    rows = [json.loads(line) for line in (tmp_path / "out/train.jsonl").read_text().splitlines()]
    assert rows and {row["metadata"]["reached"] for row in rows} <= {"yes", "partly", "no"}
