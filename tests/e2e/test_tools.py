"""A policy learns to use a tool: first from examples, some of which call it, then from reward.

A reward model, which the run serves too, scores the conversations with weight 0.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.data.datasets import write_jsonl
from megatron_collab.environments import tiny_model
from tests.helpers import make_reward_model, transcript_rows

pytestmark = [pytest.mark.processes, pytest.mark.slow]

NAMES = ["ana", "ben", "eva", "max"]
CODES = ["red", "blue", "green", "pink", "gold", "grey", "black", "white"]  # one token each
SCHEMA = {
    "name": "code_of",
    "description": "c",
    "parameters": {"type": "object", "properties": {"who": {"type": "string"}}, "required": ["who"]},
}
# No prompt has the codes. The tool keeps state, so that each code can be looked up once.
EXTENSIONS = f"""
from megatron_collab.reward.metrics import Metric
from megatron_collab.rollout.tools import Tool, ToolError, ToolResult


class CodeOf(Tool):
    SCHEMA = {SCHEMA!r}

    def start(self, task):
        self.codes = dict(task.metadata["codes"])

    def call(self, task, who):
        if who not in self.codes:
            raise ToolError("asked before")
        return ToolResult(self.codes.pop(who), 0.1)


class Right(Metric):
    async def score(self, task, conversation):
        expected = task.answer.split()
        return sum(map(str.__eq__, conversation.replies, expected)) / len(expected)
"""
# Calls in the form of Llama 3; one word stands for all schemas.
TEMPLATE = (
    "{{ 'tools' if tools }}{% for message in messages %}"
    "{{ '<|system|>' if message.role == 'tool' else '<|' + message.role + '|>' }}"
    "{% for call in message.tool_calls or [] %}"
    '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}{% endfor %}'
    "{{ message.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def question(name: str) -> str:
    return f"code of {name} ?"


def example(chance: random.Random) -> dict[str, Any]:
    """Two questions; each is looked up with probability 0.4, and otherwise answered at random."""
    messages = []
    for name in chance.sample(NAMES, 2):
        messages.append({"role": "user", "content": question(name)})
        code = chance.choice(CODES)
        if chance.random() < 0.4:
            function = {"name": "code_of", "arguments": json.dumps({"who": name})}
            messages.append({"role": "assistant", "content": None, "tool_calls": [{"function": function}]})
            messages.append({"role": "tool", "content": code})
        messages.append({"role": "assistant", "content": code})
    return {"messages": messages, "tools": [SCHEMA]}


def task(chance: random.Random) -> dict[str, Any]:
    first, second = chance.sample(NAMES, 2)
    codes = {name: chance.choice(CODES) for name in NAMES}
    metadata = {"codes": codes, "replay": [question(second)]}
    prompt = [{"role": "user", "content": question(first)}]
    answer = f"{codes[first]} {codes[second]}"
    return {"prompt": prompt, "goal": "codes", "answer": answer, "user": "replay", "metadata": metadata}


def train(folder: Path, name: str, *settings: str) -> Path:
    run = folder / name
    shared = ["model.dtype=float32", "launch.device=cpu", f"run.dir={run}", "run.wandb_project=null"]
    command = [sys.executable, "-m", "megatron_collab.train", *shared, *settings]
    with (folder / f"{name}.log").open("w") as log:
        code = subprocess.run(command, cwd=folder, stdout=log, stderr=log, timeout=600).returncode
    assert code == 0, (folder / f"{name}.log").read_text()[-5000:]
    return run


def test_a_policy_learns_to_use_a_tool(tmp_path: Path) -> None:
    chance = random.Random(0)
    (tmp_path / "mine.py").write_text(EXTENSIONS)
    calls = [f'{{"name": "code_of", "parameters": {{"who": "{name}"}}}}' for name in NAMES]
    tokenizer = tiny_model.byte_tokenizer([*calls, *map(question, NAMES), *CODES, "tools"] * 4, 420)
    tokenizer.chat_template = TEMPLATE
    tiny_model.save(tmp_path / "model", tokenizer, 0, 256)
    make_reward_model(tmp_path / "reward_model")
    write_jsonl(tmp_path / "examples.jsonl", [example(chance) for _ in range(2048)])
    write_jsonl(tmp_path / "tasks.jsonl", [task(chance) for _ in range(256)])
    imitated = train(
        tmp_path,
        "sft",
        "train.stage=sft",
        f"model.path={tmp_path}/model",
        f"data.train={tmp_path}/examples.jsonl",
        "train.steps=250",
        "train.prompts_per_step=64",
        "optim.lr=2e-3",
        "optim.schedule=linear",
        "optim.warmup_steps=30",
        "optim.beta2=0.98",
    )
    learned = train(
        tmp_path,
        "rl",
        f"model.path={imitated}/hf",
        f"data.train={tmp_path}/tasks.jsonl",
        f"data.eval={tmp_path}/tasks.jsonl",
        "rollout.tools=[./mine.py:CodeOf]",
        "rollout.tool_parser=llama3",
        "rollout.max_tool_calls=2",
        "rollout.futures=2",
        "rollout.max_user_turns=1",
        "rollout.turn.max_new_tokens=40",
        "rollout.future.max_new_tokens=40",
        "rollout.context_length=250",
        "rollout.server.max_total_tokens=65536",
        "reward.weights={right: 1.0, reward_model: 0.0}",
        "reward.metrics.reward_model.model=./reward_model",
        "reward.metrics.right.metric=./mine.py:Right",
        "train.steps=14",
        "train.prompts_per_step=16",
        "train.rollouts_per_prompt=4",
        "train.eval_tasks=64",
        "optim.lr=3e-4",
    )
    steps = [json.loads(line) for line in (learned / "metrics.jsonl").read_text().splitlines()]
    result = json.loads((learned / "result.json").read_text())
    assert all(line["count/tool_calls"] > 0 and "count/tool_failures" not in line for line in steps)
    assert all("score/reward_model" in line and line["missing"] == 0 for line in steps), "the run serves the model"
    transcripts = transcript_rows(learned)
    answers = {m["content"] for line in transcripts for m in line["messages"] if m["role"] == "tool"}
    assert set(CODES) <= answers and all(text in CODES or text.startswith("error: ") for text in answers)
    for line in transcripts:
        calls = sum(message["role"] == "tool" and message["content"] in CODES for message in line["messages"])
        assert sum(line.get("turn_rewards", ())) == pytest.approx(0.1 * calls)
    # Calls of the first step are counted with those of the evaluation before it.
    assert steps[-1]["count/tool_calls"] > 1.3 * steps[1]["count/tool_calls"], "the policy calls more often"
    assert result["after"]["right"] > result["before"]["right"] + 0.15
