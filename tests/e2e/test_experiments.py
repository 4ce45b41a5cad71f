"""Every experiment for GPUs: its memory plan fits, and its settings train a tiny model on this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from megatron_collab import patches
from megatron_collab.config import compose, groups
from megatron_collab.config.load import CONF
from megatron_collab.data.datasets import write_jsonl
from megatron_collab.observability import transcripts
from tests.helpers import make_model
from tests.hub import serving

patches.apply("megatron")
from megatron_collab.planning import memory  # noqa: E402 (Megatron is imported with it)

COLLABLLM = [f"collabllm_{task}{stage}" for task in ("math", "medium", "code") for stage in ("_sft", "")]
PAPER = [f"collabllm_paper_{task}" for task in ("math", "medium", "code")]
# What a rehearsal changes: the sizes, the device, and where model, data and endpoints are.
SMALL = [
    "launch.device=cpu",
    "model.dtype=float32",
    "run.wandb_project=null",
    "train.steps=2",
    "optim.warmup_steps=0",
    "train.prompts_per_step=2",
    "train.tokens_per_micro_batch=2048",
    "train.eval_tasks=1",
]
SMALL_RL = [
    "train.rollouts_per_prompt=2",
    "rollout.turn.max_new_tokens=8",
    "rollout.future.max_new_tokens=8",
    "rollout.context_length=2048",
    "rollout.workers=1",
    "rollout.server.replicas=1",
    "rollout.server.max_total_tokens=32768",
    "reward.workers=1",
    "reward.malformed=null",  # the random model never ends a turn by itself
]
TEST = "def check(candidate):\n    assert candidate(2) == 4\n"


def published(number: int) -> dict[str, Any]:
    """A row with the columns of the published datasets: one of two candidates for the second turn of a conversation."""
    messages = [("user", f"help me with {number // 2}"), ("assistant", "which part?"), ("user", "all of it")]
    return {
        "prompt": [{"role": role, "content": text} for role, text in messages],
        "completion": f"the answer is {number}",
        "conv_id": number // 2,
        "score": float(number % 2),
        "single_turn_prompt": f"problem {number // 2}",
        "single_turn_completion": str(number // 2),
        "single_turn_metadata": {"test": TEST, "entry_point": "double"},
        "turn_id": len(messages),
        "sessions": [],
        "rewards": {"accuracy": [1.0]},
    }


class Answers(BaseHTTPRequestHandler):
    """A language model that fills in the JSON object that a prompt requests; its grades are all 0 or all 1."""

    prompts: list[str] = []  # noqa: RUF012 (all of them; shared by the handlers of the test)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = "\n".join(str(message["content"]) for message in body["messages"])
        self.prompts.append(prompt)
        fields = re.findall(r'^ +"(\w+)": (string|.)', prompt, re.MULTILINE)
        grade = zlib.crc32(prompt.encode()) & 1  # differs within a group, for algorithms that need better and worse
        reply: dict[str, Any] = {name: f"some {name}" if kind == "string" else grade for name, kind in fields}
        if '{"answer": "yes"}' in prompt:  # of doctor --llm
            reply = {"answer": "yes"}
        elif "You play the user" in prompt:
            reply = {"current_answer": "", "thought": "not yet", "response": "please go on"}
        choice = {"index": 0, "message": {"role": "assistant", "content": json.dumps(reply)}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 20, "completion_tokens": 20, "total_tokens": 40}
        answer = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        data = json.dumps({**answer, "usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "gib"), [*((name, 80) for name in (*COLLABLLM, *PAPER, "gsm8k_feedback")), ("qwen3_0_6b", 24)]
)
def test_the_plan_fits_with_room_for_uncounted_memory(name: str, gib: int) -> None:
    assert name in groups()["experiment"]
    config, shape = memory.read_run([f"experiment={name}"])
    peak = max(map(memory.peak, memory.plan_memory(config, shape))) / memory.GIB
    assert 0.25 * gib < peak < 0.7 * gib
    assert config.launch.nproc_per_node == (1 if name == "qwen3_0_6b" else 8)


@pytest.mark.seconds
def test_the_supervised_experiments_differ_only_in_their_data() -> None:
    """So one of them represents all of them in the tests below."""
    configs = []
    for task in ("math", "medium", "code"):
        config = compose([f"experiment=collabllm_{task}_sft"])
        folder = f"data/collabllm_{task}/sft"
        assert (config.data.train, config.data.eval) == (f"{folder}/train.jsonl", f"{folder}/eval.jsonl")
        assert config.run.dir == f"runs/collabllm_{task}/sft"
        config.run.dir = config.data.train = config.data.eval = ""
        configs.append(config)
    assert configs[0] == configs[1] == configs[2]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in COLLABLLM if name == "collabllm_math_sft" or "sft" not in name])
def test_an_experiment_trains_a_tiny_model(name: str, endpoint: str, tmp_path: Path) -> None:
    """On rows with the published columns from a stand-in of the Hub, prepared and split by the command in its file."""
    config = compose([f"experiment={name}"])
    text = (CONF / "experiment" / f"{name}.yaml").read_text().replace(" \\\n#", "")
    ((source, arguments),) = re.findall(r"^# +megatron-collab prepare-data (\S+) (.*)$", text, re.MULTILINE)
    make_model(tmp_path / "model", family="qwen2")
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "train.jsonl", [published(number) for number in range(24)])
    settings = [*SMALL, "launch.nproc_per_node=2"]
    if config.train.stage == "rl":
        settings += [*SMALL_RL, f"user.api_base={endpoint}", f"reward.judge.api_base={endpoint}"]
    with serving() as hub:
        hub.add("model", config.model.path, tmp_path / "model")
        hub.add("dataset", source, tmp_path / "data")
        environment = hub.environment(tmp_path / "home")
        prepare = [sys.executable, "-m", "megatron_collab.commands", "prepare-data", source, *arguments.split()]
        subprocess.run(prepare, cwd=tmp_path, env=environment, check=True, timeout=200)
        run = train(tmp_path, name, *settings, environment=environment)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1] and all(line["loss"] == line["loss"] for line in lines)
    assert (run / "hf" / "config.json").is_file()
    assert json.loads((run / "evaluations.json").read_text())
    if config.train.stage == "rl":
        weights = json.loads((run / "config.json").read_text())["reward"]["weights"]
        scored = {metric for metric in weights if all(f"score/{metric}" in line for line in lines)}
        assert scored == set(weights) and all(line["missing"] == 0 and line["futures"] == 3 for line in lines)


@pytest.mark.processes
@pytest.mark.slow
def test_the_first_evening_trains_a_tiny_model(tmp_path: Path) -> None:
    """The world makes the data from problems in the form of GSM8K."""
    problem = {"question": "Ana has 2 pens. Ben has 3 pens. How many pens are there?", "answer": "2+3=5\n#### 5"}
    for file in ("train.jsonl", "test.jsonl"):
        write_jsonl(tmp_path / file, [problem] * 4)
    make_model(tmp_path / "model")
    settings = [
        *SMALL,
        *SMALL_RL,
        f"model.path={tmp_path}/model",
        f"data.path={tmp_path}",
        f"data.dir={tmp_path}/world",
        # This tokenizer has no tokens for thoughts; that of test_thinking.py does.
        *("rollout.strip_thoughts=false", "rollout.turn.thinking_budget=null", "rollout.future.thinking_budget=null"),
    ]
    run = train(tmp_path, "qwen3_0_6b", *settings)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["futures"] for line in lines] == [2, 2]
    assert all({"score/accuracy", "score/asks"} <= set(line) and line["missing"] == 0 for line in lines)


@pytest.mark.processes
@pytest.mark.slow
def test_a_user_who_says_what_is_wrong_trains_a_tiny_model(tmp_path: Path) -> None:
    """The experiment for GPUs at the sizes of the one for a CPU: one answer of the user, and a second try."""
    problem = {"question": "Ana has 2 pens. Ben has 3 pens. How many pens are there?", "answer": "2+3=5\n#### 5"}
    for file in ("train.jsonl", "test.jsonl"):
        write_jsonl(tmp_path / file, [problem] * 4)
    run = train(
        tmp_path, "gsm8k_feedback_small", f"data.path={tmp_path}", f"data.dir={tmp_path}/world", "train.steps=1"
    )
    conversation = next(transcripts.run_rows(run))
    roles = [message["role"] for message in conversation["messages"]]
    assert roles == ["user", "assistant", "user", "assistant"] and conversation["ending"] == "turn_limit"
    assert conversation["messages"][2]["content"] == "That is not right. Please think again."


def train(folder: Path, name: str, *settings: str, environment: Mapping[str, str] = os.environ) -> Path:
    command = [sys.executable, "-m", "megatron_collab.train", f"experiment={name}", f"run.dir={folder}/run", *settings]
    environment = {**environment, "OPENAI_API_KEY": "a-key-of-the-test"}
    with (folder / "console.log").open("w") as log:
        code = subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=log, timeout=400).returncode
    assert code == 0, (folder / "console.log").read_text()[-4000:]
    return folder / "run"
