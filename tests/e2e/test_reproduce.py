"""Whole studies at small size: the booking world's with scripted users, the paper's with a made model and endpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_collab.data.datasets import write_jsonl
from megatron_collab.reproduce.study import STUDIES, read
from tests.e2e.test_booking import start
from tests.e2e.test_experiments import SMALL, SMALL_RL, Answers, endpoint, published
from tests.helpers import make_model
from tests.hub import serving
from tests.program import Program
from tools.bench import evidence

__all__ = ["endpoint", "start"]  # fixtures
pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(2400)]  # many programs, on a busy machine
MODULE = "megatron_collab.reproduce"


ARMS = ("base", "sft", "offline_dpo")  # the paper below has rows for RL; reproduce/test_plan.py has all arms


def small_booking(folder: Path) -> Path:
    """The shipped study with fewer problems and steps."""
    study: dict[str, Any] = yaml.safe_load((STUDIES / "booking.yaml").read_text())
    study["tasks"]["booking"]["eval_tasks"] = 8
    study["build"] += ["train.eval_tasks=12"]
    study["settings"] += ["train.rollouts_per_prompt=8", "rollout.futures=2"]
    for name, arm in study["arms"].items():
        if "train" in arm:
            arm["train"] += [f"train.steps={150 if name == 'base' else 2}", "train.eval_tasks=0"]
            arm["train"] += ["optim.warmup_steps=10"] if name == "base" else ["train.prompts_per_step=8"]
    (folder / "booking.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
    return folder / "booking.yaml"


def test_the_booking_study_resumes_after_a_kill(tmp_path: Path, start: Callable[..., Program]) -> None:
    out = tmp_path / "out"
    command = [str(small_booking(tmp_path)), "--out", str(out), "--seeds", "2", "--train-seeds", "1"]
    command += ["--arms", ",".join(ARMS)]
    killed = start(command, module=MODULE)
    folder = out / "booking" / "seed0"
    killed.when(lambda: any(file.stat().st_size for file in folder.glob("build/journal/*.groups")))
    killed.process.kill()
    killed.process.wait()
    assert killed.gone() == [], "the program that it runs ends with it"
    base = (folder / "base" / "result.json").stat().st_mtime_ns
    resumed = start(command, module=MODULE)
    resumed.finish(1200)
    assert (folder / "base" / "result.json").stat().st_mtime_ns == base, "finished work stays"
    assert "forecast of all: 0 USD\n" in resumed.log.read_text(), "nobody is paid"
    table = (out / "page.md").read_text()
    arms = read("booking").arms
    for name in ARMS:
        interval = r"\d+\.\d+( \[-?\d+\.\d+, \d+\.\d+\])?"
        assert re.search(rf"^\| {arms[name].title} (\| {interval} ){{2}}\| ", table, re.MULTILINE), table
    assert re.search(rf"^\| {arms['sft'].title} \| {arms['base'].title} \| [+-]", table, re.MULTILINE), "its gain"
    repeated = start(command, module=MODULE)
    assert repeated.wait() == 0 and re.search(r"(\d+)/\1 .*/offline_dpo_eval: done", repeated.log.read_text())


def test_the_demo_gives_the_committed_result(tmp_path: Path, start: Callable[..., Program]) -> None:
    start([str(tmp_path), "--smoke"], module="tools.demo").finish(1800)
    out = tmp_path / "study"
    assert re.search(r"^\| optimal, predicted \| 0\.\d+ \| 0\.\d+ \| ", (out / "page.md").read_text(), re.MULTILINE)
    ((chain, content),) = evidence.results(out, read(str(tmp_path / "desk.yaml")))
    assert (chain.task, chain.title) == ("cost_0.10", "cost_0.10/seed1")
    trainings = evidence.Trainings({"seed1": content})
    assert trainings.arms == ["sft", "window_3"]
    committed = evidence.Trainings({"seed1": json.loads((evidence.FOLDER / "smoke.json").read_text())}).utility("sft")
    assert 0 < committed.low <= trainings.utility("sft").value <= committed.high, "the smoke cell of docs/evidence"
    page = (tmp_path / "page.md").read_text()
    (row,) = re.findall(r"^\| GRPO-MR, window 3 \(1\) \| .*", page, re.M)
    tokens = trainings.effort("window_3", "sampled_tokens")
    assert tokens > 0 and row.endswith(f"| 2 | {tokens:,.0f} |")
    for shown in ("| regret |", "| asks open | asks guessable |", "](tokens.svg)", "| user turns of a future |"):
        assert shown in page
    assert (tmp_path / "tokens.svg").is_file()


def small_paper(folder: Path) -> Path:
    """The shipped study, but GRPO begins with the base model."""
    study: dict[str, Any] = yaml.safe_load((STUDIES / "collabllm.yaml").read_text())
    del study["arms"]["grpo"]["from"]
    (folder / "collabllm.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
    return folder / "collabllm.yaml"


def test_the_paper_is_recorded_and_replayed_without_key_or_network(
    tmp_path: Path,
    start: Callable[..., Program],
    endpoint: str,
) -> None:
    study = read("collabllm")
    make_model(tmp_path / "model", family="llama")
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "train.jsonl", [published(number) for number in range(24)])
    settings = [
        *SMALL,
        *SMALL_RL,
        "launch.nproc_per_node=2",
        "rollout.max_user_turns=1",
        "rollout.max_assistant_turns=2",
    ]
    paid = [f"user.api_base={endpoint}", f"reward.judge.api_base={endpoint}"]
    paid += ["llm.prices={openai/gpt-4o-mini: [1, 2], openai/judge: [1, 2]}", "reward.judge.model=openai/judge"]
    command = [str(small_paper(tmp_path)), "--tasks", "math", "--arms", "base,grpo", "--seeds", "1", "--pilot", "2"]
    with serving() as hub:
        hub.add("model", study.model, tmp_path / "model")
        hub.add("dataset", study.tasks["math"].source, tmp_path / "data")
        environment = {
            **hub.environment(tmp_path / "home"),
            "HF_HUB_OFFLINE": "0",
            "OPENAI_API_KEY": "a-key-of-the-test",
        }
        first, calls = tmp_path / "first", ["--record", str(tmp_path / "calls")]
        short = start(
            [*command, "--out", str(first), *calls, "--budget", "1e-4", *settings, *paid], module=MODULE, **environment
        )
        assert short.wait(600) == 3
        assert re.search(r"--budget=0.0001(: .* USD spent, about .* still needed| is used up)", short.log.read_text())
        recorded = start([*command, "--out", str(first), *calls, *settings, *paid], module=MODULE, **environment)
        recorded.finish(1200)
        prompt_count = len(Answers.prompts)
        del environment["OPENAI_API_KEY"]
        second = tmp_path / "second"
        nowhere = ["user.api_base=http://127.0.0.1:9/v1", "reward.judge.api_base=http://127.0.0.1:9/v1", *paid[2:]]
        replay = ["--replay", str(tmp_path / "calls")]
        start([*command, "--out", str(second), *replay, *settings, *nowhere], module=MODULE, **environment).finish(1200)
    assert re.search(r"forecast of all: (?!0 )\S+ USD", recorded.log.read_text())
    assert len(Answers.prompts) == prompt_count
    assert (first / "results.json").read_text() == (second / "results.json").read_text()
    for run in ("base_eval", "grpo_eval"):
        files = [out / "math" / run / "eval_seed0_model.parquet" for out in (first, second)]
        assert files[0].read_bytes() == files[1].read_bytes()
    results = {(row["arm"], row["column"]): row for row in json.loads((first / "results.json").read_text())}
    itr = results["base", "ITR"]
    grade = json.loads((first / "math" / "base_eval" / "result.json").read_text())["eval/seed0/interactivity"]
    assert grade in (0, 1), "by what the model said, which differs between kinds of CPU"
    assert (itr["value"], itr["scale"]) == (pytest.approx(grade), "own"), "by our rubric, not rescaled"
    assert results["grpo", "ITR"]["sampled_tokens"] > 0 < results["grpo", "ITR"]["optimizer_steps"]
    assert "| Base | " in (first / "page.md").read_text()
