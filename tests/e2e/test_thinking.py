"""A policy that thinks, trained on real servers: turns have budgets for thoughts, futures do not think, and later turns
see no earlier thoughts. The policy has experts, and the trainer uses those that the servers selected."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_collab.data.datasets import write_jsonl
from megatron_collab.environments import tiny_model
from megatron_collab.rollout.thinking import CLOSED
from tests.helpers import transcript_rows

pytestmark = [pytest.mark.processes, pytest.mark.slow]

WORDS = [*"abcdefghijklmnop", "which", "day", "?"]
# Like Qwen3.5's template: it opens the thought, adds an empty one if thinking is off, and drops earlier thoughts.
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1].lstrip() }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>"
    "{{ ' </think>' if enable_thinking is defined and not enable_thinking }}{% endif %}"
)


def give_experts(folder: Path) -> None:
    """Replace the Qwen3 in `folder` by a random Qwen3-MoE of the same sizes."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = json.loads((folder / "config.json").read_text())
    fields = {name: size for name, size in sizes.items() if name not in ("architectures", "model_type")}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**fields, **experts)).save_pretrained(folder)


def test_a_policy_that_thinks_is_trained_on_what_it_saw(tmp_path: Path) -> None:
    tokenizer = tiny_model.word_tokenizer(WORDS)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = TEMPLATE
    tiny_model.save(tmp_path / "model", tokenizer, 0, 256)
    give_experts(tmp_path / "model")
    task = {"prompt": [{"role": "user", "content": "which day ?"}], "goal": "g", "answer": "a", "user": "replay"}
    write_jsonl(tmp_path / "tasks.jsonl", [{**task, "metadata": {"replay": ["a b ?", "c d ?"]}}] * 8)
    run = tmp_path / "run"
    settings = [
        *("model.dtype=float32", "launch.device=cpu", f"run.dir={run}", "run.wandb_project=null"),
        *(f"model.path={tmp_path}/model", f"data.train={tmp_path}/tasks.jsonl"),
        *("rollout.strip_thoughts=true", "rollout.turn.thinking_budget=12", "rollout.turn.max_new_tokens=12"),
        *("rollout.future.enable_thinking=false", "rollout.future.max_new_tokens=12"),
        *("rollout.futures=2", "rollout.train_turns=all", "rollout.context_length=250", "rollout.routing_replay=true"),
        *("rollout.server.max_total_tokens=65536", "reward.weights={token_amount: -0.1}", "reward.malformed=null"),
        *("train.steps=2", "train.prompts_per_step=4", "train.rollouts_per_prompt=4", "optim.lr=1e-3"),
    ]
    with (tmp_path / "log").open("w") as log:
        command = [sys.executable, "-m", "megatron_collab.train", *settings]
        code = subprocess.run(command, cwd=tmp_path, stdout=log, stderr=log, timeout=600).returncode
    assert code == 0, (tmp_path / "log").read_text()[-5000:]
    rows = transcript_rows(run)
    assert {CLOSED in row["turns"][0] for row in rows} == {True, False}, "some were closed, some ended"
    assert not any(CLOSED in turn for row in rows for turn in row["turns"][1:])
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        assert line["grad_norm"] > 0
        assert line["mismatch/max_abs"] < 1e-4, "the trainer's log-probs are those of the server, turn by turn"
