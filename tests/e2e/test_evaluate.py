"""Evaluation without training, by the real program: a checkpoint, a Hugging Face folder, a model behind LiteLLM."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from aiohttp import web

from megatron_collab import evaluate
from megatron_collab.data.examples import load_tasks
from megatron_collab.data.sources import Source
from megatron_collab.environments import booking
from megatron_collab.runtime.process import EXIT_BAD_INPUT, EXIT_STOPPED
from megatron_collab.synthesis import build_dataset
from tests.e2e.test_booking import kill, start
from tests.helpers import evaluation_rows, make_reward_model
from tests.hub import StandInHub, serving
from tests.llm.endpoint import Endpoint, fails, says
from tests.program import Program, Supervised, lines
from tests.proxy import RecordingProxy, recording_proxy

pytestmark = pytest.mark.processes
__all__ = ["start"]  # a fixture

SETS = (
    "data.eval=[{source: WORLD/eval.jsonl, name: greedy, temperature: 0, tasks: 6}, "
    "{source: WORLD/eval.jsonl, name: sampled, samples: 2, tasks: 6, max_user_turns: 1, max_assistant_turns: 2}]"
)


@pytest.fixture(scope="module")
def root(supervised: Supervised) -> Path:
    """The folder of the supervised run, with more tasks."""
    root = supervised.root
    # Openings that leave something out, so that conversations have several turns.
    rows = [row | {"prompt": []} for row in lines(root / "world" / "eval.jsonl") if not says_everything(row["goal"])]
    (root / "world" / "unopened.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def says_everything(goal: str) -> bool:
    """Whether a user with this goal opens with all of it."""
    return {"for", "on", "at"} <= {*booking.reply(goal, []).split()}


def arguments(root: Path, name: str, *more: str) -> list[str]:
    sets = SETS.replace("WORLD", f"{root}/world")
    return ["experiment=booking", f"run.dir={root}/{name}", f"data.dir={root}/world", sets, *more]


def scores(rows: list[dict[str, Any]]) -> list[tuple[str, int, dict, list]]:
    return [(row["task"], row["rollout"], row["scores"], row["messages"]) for row in rows]


def opened(root: Path, name: str, model: str) -> list[str]:
    """The user opens the conversations of one set."""
    sets = SETS.replace("eval.jsonl, name: sampled", "unopened.jsonl, name: sampled").replace("WORLD", f"{root}/world")
    return arguments(root, name, f"model.path={root}/{model}", sets)


def refuses_other_data(
    command: list[str], main: Callable[[list[str]], int], file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also after its last conversation."""
    before = file.read_text()
    file.write_text("".join(sorted(before.splitlines(keepends=True))))
    try:
        assert file.read_text() != before and main(command) == EXIT_BAD_INPUT
    finally:
        file.write_text(before)  # other tests read it, too
    (line,) = capsys.readouterr().err.splitlines()
    assert f"data.eval={file}: {file.name} has changed since the run began; restore it" in line


def test_a_checkpoint_is_evaluated(
    root: Path, start: Callable[..., Program], capsys: pytest.CaptureFixture[str]
) -> None:
    run, of_checkpoint = root / "checkpoint", opened(root, "checkpoint", "sft@60")
    start(of_checkpoint, module="megatron_collab.evaluate").finish()
    assert len(evaluation_rows(run, "greedy/model")) == 6 and len(evaluation_rows(run, "sampled/model")) == 12
    sampled = evaluation_rows(run, "sampled/model")
    pairs = list(zip(sampled[::2], sampled[1::2], strict=True))
    assert any(a["messages"] != b["messages"] for a, b in pairs)
    assert all(a["messages"][0] == b["messages"][0] and a["played"] == b["played"] == 1 for a, b in pairs)
    assert all(a["messages"][0]["content"].startswith(booking.REQUEST) for a, _ in pairs)

    result = json.loads((run / "result.json").read_text())
    assert result["step"] == 60
    right = [row["scores"]["booking_right"] for row in evaluation_rows(run, "greedy/model")]
    assert result["eval/greedy/booking_right"] == pytest.approx(sum(right) / 6)
    assert {"eval/sampled/booking_right_low", "eval/sampled/booking_right_high"} <= result.keys()
    assert not (run / "hf").exists() and not list((run / "journal").iterdir())
    assert "Evaluation sampled" in (run / "report.html").read_text()
    assert evaluate.main(of_checkpoint) == 0 and "all evaluations of" in capsys.readouterr().out
    refuses_other_data(of_checkpoint, evaluate.main, root / "world" / "eval.jsonl", capsys)


@pytest.mark.slow
def test_a_killed_evaluation_of_a_checkpoint_resumes(root: Path, start: Callable[..., Program]) -> None:
    """Its conversations equal those of the same weights in a Hugging Face folder, to the letter."""
    run, of_checkpoint = root / "killed", opened(root, "killed", "sft@60")
    killed = start(of_checkpoint, module="megatron_collab.evaluate")
    killed.when(lambda: (run / "evaluations.json").exists())
    kill(killed)
    (first,) = json.loads((run / "evaluations.json").read_text())
    written = (run / f"eval_{first.replace('/', '_')}.parquet").stat().st_mtime_ns
    start(of_checkpoint, module="megatron_collab.evaluate").finish()
    assert (run / f"eval_{first.replace('/', '_')}.parquet").stat().st_mtime_ns == written, "recorded evaluations stay"

    start(opened(root, "folder", "sft/hf"), module="megatron_collab.evaluate").finish()
    for set_name, conversations in (("greedy", 6), ("sampled", 12)):
        rows = evaluation_rows(run, f"{set_name}/model")
        assert len(rows) == conversations
        assert scores(rows) == scores(evaluation_rows(root / "folder", f"{set_name}/model"))
    assert json.loads((root / "folder" / "result.json").read_text())["step"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True], ids=["whole", "killed"])
def test_conversations_are_built_turn_by_turn(
    root: Path, start: Callable[..., Program], capsys: pytest.CaptureFixture[str], killed: bool
) -> None:
    """Also if the first start is killed."""
    run, tasks = root / f"built-{killed}", f"data.eval={root}/world/unopened.jsonl"
    more = (tasks, "train.eval_tasks=6", "build.candidates=3", "rollout.futures=2", "rollout.max_messages=6")
    command = arguments(root, run.name, f"model.path={root}/sft/hf", *more)
    if killed:
        first = start(command, module="megatron_collab.synthesis.build_dataset")
        first.when(lambda: any(file.stat().st_size for file in run.glob("journal/*.groups")))
        kill(first)
    resumed = start(command, module="megatron_collab.synthesis.build_dataset")
    resumed.finish()
    # 6 tasks, 3 turns, 3 candidates, 2 futures with 2, 1 and 0 messages of the user.
    bound = "6 conversations: at most 162 replies, 114 user messages, 0 judgments"
    assert bound in resumed.log.read_text()
    rows = lines(run / "built" / "train.jsonl")
    by_turn: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_turn[row["conv_id"], row["turn_id"]].append(row)
    assert len({name for name, _ in by_turn}) == 6 and max(turn for _, turn in by_turn) >= 1
    for (name, turn), candidates in by_turn.items():
        assert len({json.dumps(row["prompt"]) for row in candidates}) == 1 and len(candidates) <= 3
        prompt = candidates[0]["prompt"]
        assert len(prompt) == 2 * turn + 1 <= 5 and prompt[0]["content"].startswith(booking.REQUEST)
        if turn:
            before = by_turn[name, turn - 1]
            best = max(before, key=lambda row: row["score"])
            assert prompt[:-2] == best["prompt"] and prompt[-2]["content"] == best["completion"]
    assert f"{len(rows)} candidates" in (run / "built" / "README.md").read_text()
    assert len(load_tasks(Source(source=str(run / "built")))) == len(rows)
    assert build_dataset.main(command) == 0 and "all conversations are built" in capsys.readouterr().out
    refuses_other_data(command, build_dataset.main, root / "world" / "unopened.jsonl", capsys)
    assert build_dataset.main([*command[:-1], f"run.dir={root}/none"]) == EXIT_BAD_INPUT
    assert "rollout.max_messages: not set" in capsys.readouterr().err


@pytest.mark.slow
def test_conversations_are_built_by_several_assistants_and_uploaded(root: Path) -> None:
    """The policy on its server and an endpoint; the first upload fails, and the same command repeats only that."""
    run = root / "cast"
    more = (f"data.eval={root}/world/eval.jsonl", "train.eval_tasks=3", "build.candidates=3", "rollout.futures=1")
    more = (*more, "rollout.max_messages=6", "build.parquet=true", "build.push_to_hub=me/bookings")

    async def build(hub: StandInHub, proxy: RecordingProxy, token: str) -> tuple[int, str, list[dict[str, Any]]]:
        async with Endpoint(says("a table for 2 people on monday at 6pm .")) as endpoint:
            url = f"http://127.0.0.1:{endpoint.port}/v1"
            other = f"{{model: openai/m, temperature: 0.3, api_base: '{url}', max_tokens: 30}}"
            prices = "llm.prices={openai/m: [10, 100]}"
            assistants = [
                "build.assistants={policy: policy, other: " + other + "}",
                prices,
                f"model.path={root}/sft/hf",
            ]
            command = [
                sys.executable,
                "-m",
                "megatron_collab.synthesis.build_dataset",
                *arguments(root, "cast", *more, *assistants),
            ]
            environment = hub.environment(root / "home", OPENAI_API_KEY="sk-test", HF_TOKEN=token)
            environment |= proxy.environment()
            log = root / "cast.log"
            with log.open("w") as stream:
                process = await asyncio.create_subprocess_exec(
                    *command, stdout=stream, stderr=subprocess.STDOUT, env=environment
                )
                code = await asyncio.wait_for(process.wait(), 300)
            return code, log.read_text(), endpoint.requests

    with serving() as hub, recording_proxy() as proxy:
        code, log, requests = asyncio.run(build(hub, proxy, "hf_NobodysToken123"))
        assert code == EXIT_STOPPED, log[-5000:]
        assert f"{run}/built: not uploaded to me/bookings (HfHubHTTPError: " in log and "NobodysToken" not in log
        assert "3 conversations: at most 54 replies, 30 user messages, 0 judgments; at most " in log
        assert f"done; {len(requests)} calls, {len(requests) * 0.003:.4g} USD" in log
        table = pq.read_table(run / "built" / "train.parquet").to_pylist()
        assert not list((run / "built").glob("*.jsonl"))
        assert len(load_tasks(Source(source=str(run / "built")))) == len(table)
        by = {name: [row for row in table if row["assistant"] == name] for name in ("policy", "other")}
        assert sum(map(len, by.values())) == len(table) and all(by.values())
        assert {row["completion"] for row in by["other"]} == {"a table for 2 people on monday at 6pm ."}
        policy_texts = {
            message["content"] for row in by["policy"] for session in row["sessions"] for message in session
        }
        assert not policy_texts & {row["completion"] for row in by["other"]}, "its futures are its own"
        assert {(request["temperature"], request["max_tokens"]) for request in requests} == {(0.3, 30)}
        card = (run / "built" / "README.md").read_text()
        assert "| other (openai/m): " in card and "; policy (hf): " in card and "path: train.parquet" in card
        settings = json.loads((run / "config.json").read_text())["build"]["assistants"]
        assert [*settings] == ["policy", "other"]

        code, log, requests = asyncio.run(build(hub, proxy, hub.token))
        assert (code, requests) == (0, []) and "uploaded to me/bookings at " in log, log[-5000:]
        (files,) = hub.repos["dataset", "me/bookings"].commits.values()
        assert files == {file.name: file.read_bytes() for file in (run / "built").iterdir()}
        code, log, _ = asyncio.run(build(hub, proxy, hub.token))
        assert code == 0 and "all conversations are built" in log
        assert proxy.requests == [], "all that is asked is on loopback"


async def _evaluated(
    arguments: list[str], log: Path, at_request: tuple[int, Callable[[], object]] | None = None
) -> list[dict[str, Any]]:
    """The requests to an endpoint of the test, which asks once and then always answers with the same booking.

    `at_request`: a function that is called once, at the request of that number.
    """
    pending = [at_request] if at_request else []

    async def reply(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if pending and len(endpoint.requests) >= pending[0][0]:
            pending.pop()[1]()
        replies = sum(message["role"] == "assistant" for message in body["messages"])
        text = booking.ask(["people", "day", "time"]) if not replies else "a table for 2 people on monday at 6pm ."
        return await says(text)(request)

    endpoint = Endpoint(reply)
    with recording_proxy() as proxy:
        environment = {**os.environ, **proxy.environment(), "OPENAI_API_KEY": "sk-test"}
        requests = await _requests(arguments, log, endpoint, environment)
        assert proxy.requests == [], "all that is asked is on loopback"
    return requests


async def _requests(
    arguments: list[str], log: Path, endpoint: Endpoint, environment: dict[str, str]
) -> list[dict[str, Any]]:
    async with endpoint:
        model = ["assistant.model=openai/m", f"assistant.api_base=http://127.0.0.1:{endpoint.port}/v1"]
        command = [sys.executable, "-m", "megatron_collab.evaluate", *arguments, *model]
        with log.open("w") as stream:
            process = await asyncio.create_subprocess_exec(
                *command, stdout=stream, stderr=subprocess.STDOUT, env=environment
            )
            assert await asyncio.wait_for(process.wait(), 300) == 0, log.read_text()[-5000:]
        return endpoint.requests


@pytest.mark.slow
def test_a_model_behind_litellm_is_the_assistant(root: Path) -> None:
    """It receives messages; no server is started and no model read."""
    requests = asyncio.run(_evaluated(arguments(root, "api", "assistant.temperature=0.5"), root / "api.log"))
    run = root / "api"
    greedy, sampled = evaluation_rows(run, "greedy/model"), evaluation_rows(run, "sampled/model")
    assert (len(greedy), len(sampled)) == (6, 12)
    for row in [*greedy, *sampled]:
        roles = [message["role"] for message in row["messages"]]
        assert roles[:4] == ["user", "assistant", "user", "assistant"]
        assert row["messages"][1]["content"] == booking.ask(["people", "day", "time"])
        assert row["scores"]["token_amount"] == 20 * roles.count("assistant")  # as the endpoint counts them
    assert {request["temperature"] for request in requests} == {0, 0.5}
    assert {request["max_tokens"] for request in requests} == {2048}
    assert all(request["messages"][0]["role"] == "user" and request["model"] == "m" for request in requests)
    assert not list(run.glob("sglang-*.log"))
    assert json.loads((run / "result.json").read_text())["model"] == "openai/m"


@pytest.mark.slow
def test_what_failed_is_evaluated_again_by_the_same_command(root: Path) -> None:
    """The endpoint refuses the key for one task; where it does for all: tests/rollout/test_evaluation.py."""
    command = arguments(root, "refused", f"data.eval={root}/world/eval.jsonl", "train.eval_tasks=6")
    environment = {**os.environ, "OPENAI_API_KEY": "sk-test"}
    right, run = says("a table for 2 people on monday at 6pm ."), root / "refused"

    def evaluated(refused: set[str]) -> tuple[set[str], str]:
        """The first messages of the tasks that the endpoint was asked about, and the console.

        Of an empty `refused`, the first one that comes is added.
        """

        async def reply(request: web.Request) -> web.StreamResponse:
            first = (await request.json())["messages"][0]["content"]
            if not refused:
                refused.add(first)
            return await (fails(401, "wrong key") if first in refused else right)(request)

        log = root / "refused.log"
        requests = asyncio.run(_requests(command, log, Endpoint(reply), environment))
        return {request["messages"][0]["content"] for request in requests}, log.read_text()

    refused: set[str] = set()
    tasks, console = evaluated(refused)
    assert len(tasks) == 6 and "wrong key" in console
    assert json.loads((run / "result.json").read_text())["eval/incomplete"] == 1
    assert "(1 missing)" in (run / "report.html").read_text()
    repeated, console = evaluated({"no task"})
    assert repeated == refused and " missing)" not in console
    assert json.loads((run / "result.json").read_text())["eval/incomplete"] == 0
    assert len(evaluation_rows(run, "model")) == 6


@pytest.mark.slow
def test_killing_a_reward_models_server_loses_no_score(tmp_path: Path) -> None:
    """It is restarted, the run waits for it, and groups that it could not score are played again."""
    model = make_reward_model(tmp_path / "model", positions=256)

    def kill() -> None:
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                command = (process / "cmdline").read_text()
                if "inference.cpu.serve" in command and str(model) in command:
                    os.killpg(os.getpgid(int(process.name)), signal.SIGKILL)

    scored = ["reward.weights.reward_model=1", f"reward.metrics.reward_model.model={model}"]
    log = tmp_path / "log"
    asyncio.run(_evaluated(arguments(tmp_path, "scored", *scored), log, (5, kill)))
    rows = [
        row for set_name in ("greedy", "sampled") for row in evaluation_rows(tmp_path / "scored", f"{set_name}/model")
    ]
    assert len(rows) == 18 and "SGLang server 0 of reward_model is taken out of use and restarted" in log.read_text()
    assert all(isinstance(row["scores"]["reward_model"], float) for row in rows)
