"""A training with user and judge behind HTTP is recorded, and repeated from the recording without them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shlex
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from megatron_collab.llm.recording import Recording
from tests.e2e.test_booking import parameters
from tests.helpers import make_model, transcript_rows
from tests.llm.endpoint import Endpoint, Reply, says
from tests.program import lines
from tests.proxy import recording_proxy

pytestmark = [pytest.mark.processes, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
KEY = "sk-proj-0123456789abcdef0123456789"
# Time and cost of a replay, and cache hits of the policy's server, which depend on the order of requests.
OTHER = ("seconds/", "idle/", "llm/", "count/cached_tokens", "count/prefill_tokens")
SETTINGS = [
    "launch.device=cpu",
    "model.dtype=float32",
    "user.name=llm",
    "user.model=openai/user",
    "reward.judge.model=openai/judge",
    "reward.weights={accuracy: 1}",
    "reward.metrics.accuracy={judge: true, verify: false}",
    "train.steps=2",
    "train.prompts_per_step=2",
    "train.rollouts_per_prompt=2",
    "rollout.futures=3",
    "rollout.max_user_turns=2",
    "rollout.turn.max_new_tokens=6",
    "rollout.future.max_new_tokens=6",
    "rollout.context_length=900",
    "rollout.server.max_total_tokens=65536",
    "reward.malformed=null",  # the random policy never ends a turn by itself
    "llm.prices={openai/user: [1, 10], openai/judge: [1, 10]}",
]


async def _trained(arguments: list[str], log: Path, endpoint: bool, **environment: str) -> int:
    """Number of requests of a training to an endpoint that never answers the same twice, or to no endpoint.

    Its environment names a proxy, which must receive no request, since all addresses are on loopback.
    """
    numbers, drawn = count(), random.Random(0)

    async def reply(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(drawn.uniform(0, 0.05))  # answers come in another order than questions
        number = next(numbers)
        values = {"current_answer": "", "thought": "", "response": f"say {number} more", "accuracy": number % 2}
        return await says(values)(request)

    with recording_proxy() as proxy:
        requests = await _requests(arguments, log, reply, endpoint, {**proxy.environment(), **environment})
        assert proxy.requests == []
    return requests


async def _requests(arguments: list[str], log: Path, reply: Reply, endpoint: bool, environment: dict[str, str]) -> int:
    async with Endpoint(reply) as server:
        base = f"http://127.0.0.1:{server.port}/v1" if endpoint else "http://127.0.0.1:9/v1"
        command = [sys.executable, "-m", "megatron_collab.train", *SETTINGS, *arguments]
        command += [f"user.api_base={base}", f"reward.judge.api_base={base}"]
        kept = {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"}
        with log.open("w") as stream:
            process = await asyncio.create_subprocess_exec(
                *command, stdout=stream, stderr=subprocess.STDOUT, env={**kept, **environment}
            )
            assert await asyncio.wait_for(process.wait(), 300) == 0, log.read_text()[-5000:]
        return len(server.requests)


def steps(run: Path) -> list[dict[str, Any]]:
    metrics = lines(run / "metrics.jsonl")
    return [{name: value for name, value in step.items() if not name.startswith(OTHER)} for step in metrics]


def test_a_recorded_run_is_trained_again_to_the_bit_without_endpoint_and_key(tmp_path: Path) -> None:
    """Other workers play and score in another order. The user opens every other conversation."""
    first_messages = [[{"role": "user", "content": f"hi {i}"}] if i % 2 else [] for i in range(4)]
    rows = [
        {"prompt": messages, "goal": "a table", "answer": "a blue one", "id": str(i)}
        for i, messages in enumerate(first_messages)
    ]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [f"data.train={tmp_path}/tasks.jsonl", f"model.path={make_model(tmp_path / 'policy', layers=1)}"]
    first, replayed, calls = tmp_path / "first", tmp_path / "again", tmp_path / "calls"
    record = [*settings, f"run.dir={first}", f"llm.record={calls}", "reward.workers=2"]
    requests = asyncio.run(_trained(record, tmp_path / "first.log", True, OPENAI_API_KEY=KEY))
    replay = [*settings, f"run.dir={replayed}", f"llm.replay={calls}", "rollout.workers=2"]
    assert asyncio.run(_trained(replay, tmp_path / "again.log", False)) == 0

    assert steps(replayed) == steps(first)
    assert transcript_rows(replayed) == transcript_rows(first)
    assert parameters(replayed) == parameters(first)
    replies = [message["content"] for row in transcript_rows(first) for message in row["messages"][2::2]]
    assert len(set(replies)) == len(replies) == 2 * 2 * 2 * 3 * 2, "no two are the same"
    assert len({row["scores"]["accuracy"] for row in transcript_rows(first)}) == 2
    took = {name: sum(step[name] for step in lines(replayed / "metrics.jsonl")) for name in ("llm/calls", "llm/usd")}
    assert took == {"llm/calls": 0, "llm/usd": 0}
    cost, after = json.loads((first / "spend.json").read_text())["usd"], lines(replayed / "metrics.jsonl")
    assert sum(step["llm/replayed"] for step in after) == len(Recording(calls)) == requests
    assert sum(step["llm/replayed_usd"] for step in after) == pytest.approx(cost) and cost > 0
    assert all(KEY.encode() not in file.read_bytes() for file in calls.iterdir())

    commands = re.findall(r"^    megatron-collab (recording .*)", (ROOT / "docs/howto/recordings.md").read_text(), re.M)
    assert len(commands) == 3
    for command in commands:
        done = [sys.executable, "-m", "megatron_collab.commands", *shlex.split(command)]
        printed = subprocess.run(done, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        assert f"{requests} calls" in printed
    assert {"merged", "public"} <= {folder.name for folder in tmp_path.iterdir()}
