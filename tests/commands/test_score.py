"""The futures of a run under several rewards: those that the twelve conversations have under each published setting."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from megatron_collab.commands.__main__ import run
from megatron_collab.config import EvaluateConfig, recorded
from megatron_collab.data.datasets import task_row, write_jsonl
from megatron_collab.launch.data_specs import recorded_data
from megatron_collab.observability import transcripts
from megatron_collab.observability.folder import append, rows_of
from megatron_collab.rollout.recorded import played_groups
from megatron_collab.settings import ConfigError
from megatron_collab.types import Group
from tests.llm.endpoint import Endpoint, in_thread, says
from tests.proxy import recording_proxy
from tests.rollout.published import GOLDEN, play, preset, verdict


def ran(folder: Path, name: str, *groups: Group, **settings: Any) -> Path:
    """The folder of a run under a published setting that has played `groups` in step 3, and others before."""
    config = preset(name)
    config.run.dir, config.data.train = str(folder), str(folder / "tasks.jsonl")
    for setting, value in settings.items():
        setattr(config.reward.judge, setting, value)
    folder.mkdir()
    write_jsonl(folder / "tasks.jsonl", [task_row(group.task) for group in groups])
    (folder / "config.json").write_text(json.dumps(recorded(config)))
    for step in (2, 3):
        transcripts.write_step(folder, step, [[*rows_of([group])] for group in groups])
    return folder


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    """A judge behind HTTP, in a thread of its own, and a proxy in the environment, which is not asked."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-nothing-at-all")

    async def judged(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        return await says(verdict(body["messages"][-1]["content"]))(request)

    with in_thread(Endpoint(judged)) as endpoint, recording_proxy() as proxy:
        for name, value in proxy.environment().items():
            monkeypatch.setenv(name, value)
        yield endpoint
        assert proxy.requests == []


@pytest.mark.processes
def test_the_same_futures_under_every_published_reward(
    judge: Endpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As they are rewarded where the setting is trained under, the turn that was cut among them."""
    groups, _ = play("paper")
    folder = ran(tmp_path / "run", "paper", *groups, api_base=f"http://127.0.0.1:{judge.port}/v1")
    options = ["--reward", "paper", "--reward", "collabllm", "--reward", "verl", "--reward", "run"]
    assert run("score", [str(folder), *options, "--out", str(tmp_path / "rewards.jsonl")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rewards.jsonl").read_text().splitlines()]
    assert [row["task"] for row in rows] == list(GOLDEN["paper"])
    for row in rows:
        for name, golden in GOLDEN.items():
            assert row[name]["reward"] == pytest.approx(golden[row["task"]][1]), (name, row["task"])
        assert row["run"] == row["paper"]
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"{folder}: step 3 of training, 4 tasks, 4 trained turns, 12 futures"
    assert shown[2].split() == ["paper", "collabllm", "verl", "run"]
    means = [sum(row[name]["reward"] for row in rows) / 4 for name in ("paper", "collabllm", "verl", "run")]
    assert shown[3].split() == ["reward", *(f"{mean:.4f}" for mean in means)]
    ends = [line.split()[3:] for line in shown if line.startswith("  95 %")]
    for mean, low, high in zip(means, *ends, strict=True):
        assert float(low) < mean < float(high)
    malformed = next(line.split() for line in shown if "of malformed turns" in line)
    assert malformed[-4:] == ["0.0000", "0.0000", "-0.2500", "0.0000"], "the parts add up to the reward"
    requests = len(judge.requests)
    assert requests == 12 + 2 * 12, "accuracy once for all, interactivity by two rubrics"
    assert run("score", [str(folder), "--reward", "paper", "--step", "2"]) == 0
    assert len(judge.requests) == requests, "answers are cached in the run"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--reward", "papper"],
            "--reward=papper: no such reward; the nearest is paper; there are run, collabllm, paper",
        ),
        (["--reward", "paper", "--step", "9"], "has no transcripts of that step; the last one is 3"),
        (["--reward", "paper", "--evaluation", "after"], "--evaluation=after: not in "),
        (["--reward", "paper", "--step", "2", "--evaluation", "after"], "give one of them"),
        (
            ["--reward", "verl", "reward.judge.model=served/j"],
            "--reward=verl: reward.judge.model=served/j: only the run",
        ),
        (["--reward", "verl", "reward.judge.model=null"], "--reward=verl: reward.weights.accuracy: needs a judge"),
        (
            ["--reward", "run", "reward.weights.information_gain=1"],
            "reward.weights.information_gain: reads log-probs of the policy's servers, and the run did not score it",
        ),
        (["--reward", "verl", "reward.jugde=1"], "reward.jugde: no such option"),
    ],
)
def test_what_cannot_be_scored_is_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups, _ = play("paper")
    folder = ran(tmp_path / "run", "paper", *groups)
    assert run("score", [str(folder), *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and message in shown.err


METRIC = """
import asyncio
from dataclasses import dataclass
from pathlib import Path
from megatron_collab.reward.metrics import Metric

class Mine(Metric):
    @dataclass(frozen=True)
    class Options:
        judge: bool = False
        verify: bool = False
        rubric: str = ""

    def __init__(self, options, judge):
        super().__init__(options, judge)
        self.session = asyncio.get_running_loop().create_future()
        with Path({made!r}).open("a") as out:
            out.write("made")

    async def score(self, task, conversation):
        return 1.0
"""


@pytest.mark.processes
def test_metrics_are_made_once_for_all_rewards_and_nothing_else_is(tmp_path: Path) -> None:
    """By the trial before the start, then by the worker, in an event loop; the run's world is not even imported."""
    groups, _ = play("paper")
    folder = ran(tmp_path / "run", "paper", *groups)
    (tmp_path / "my.py").write_text(METRIC.format(made=str(tmp_path / "made")))
    metric = [f"reward.metrics.{name}.metric={tmp_path}/my.py:Mine" for name in ("accuracy", "interactivity")]
    rewards = ["--reward", "run", "--reward", "paper", "data.world=/nowhere/world.py:World"]
    assert run("score", [str(folder), *rewards, *metric, "--out", str(tmp_path / "rewards.jsonl")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rewards.jsonl").read_text().splitlines()]
    assert all(row["run"] == row["paper"] for row in rows) and rows[0]["paper"]["accuracy"] == 1.0
    assert (tmp_path / "made").read_text() == "made" * 4, "two metrics, twice"


@pytest.mark.seconds
def test_other_data_than_the_runs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    groups, _ = play("paper")
    folder = ran(tmp_path / "run", "paper", *groups)
    write_jsonl(folder / "tasks.jsonl", [task_row(group.task) for group in groups[1:]])
    assert run("score", [str(folder), "--reward", "paper"]) == 2
    assert "task asked: no task of that id has its first messages" in capsys.readouterr().err


@pytest.mark.seconds
def test_an_evaluation_without_training_has_all_that_its_conversations_need(tmp_path: Path) -> None:
    groups, _ = play("paper")
    write_jsonl(tmp_path / "tasks.jsonl", [task_row(group.task) for group in groups])
    config = EvaluateConfig()
    config.run.dir, config.data.eval = str(tmp_path), str(tmp_path / "tasks.jsonl")
    (tmp_path / "config.json").write_text(json.dumps(recorded(config)))
    (tmp_path / "evaluations.json").write_text(json.dumps({"model": {"step": 0, "set": ""}}))
    append(tmp_path / "eval_model.jsonl", rows_of(groups))  # as an earlier version wrote it
    _, old = played_groups(tmp_path, recorded_data(tmp_path, [], "model"), None, "model")
    transcripts.write(tmp_path / "eval_model.parquet", [[*rows_of([group])] for group in groups])
    (tmp_path / "eval_model.jsonl").unlink()
    title, played = played_groups(tmp_path, recorded_data(tmp_path, [], "model"), None, "model")
    assert title == "evaluation model" and [group.task.id for group in played] == [group.task.id for group in groups]
    assert played == old
    with pytest.raises(ConfigError, match=r"has no transcripts of futures; give the folder of a run"):
        played_groups(tmp_path, recorded_data(tmp_path, [], "model"), None, None)
