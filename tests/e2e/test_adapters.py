"""Servers keep adapters beside the base model: a run samples with what it trains, also after parts of it are killed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.test_booking import RANDOM, kill, parameters
from tests.program import Program, lines, steps_done

pytestmark = [pytest.mark.processes, pytest.mark.slow]

RL = ["experiment=booking", "train.steps=3", "train.checkpoint_every=1", "train.prompts_per_step=4"]
RL += ["train.rollouts_per_prompt=4", "rollout.futures=2", "train.eval_tasks=0", "optim.lr=1e-2", *RANDOM]
RL += ["model.lora.rank=8", "model.lora.serve=adapters", "publish.verify=1"]
SAME = ("reward", "turn_tokens", "loss", "grad_norm", "mismatch/max_abs")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Program]]:
    programs: list[Program] = []

    def starter(name: str) -> Program:
        paths = [f"run.dir={tmp_path}/{name}", f"data.dir={tmp_path}/world", f"model.path={tmp_path}/world/model"]
        programs.append(Program([*RL, *paths], tmp_path / f"{name}{len(programs)}.log"))
        return programs[-1]

    yield starter
    for program in programs:
        program.end()


def test_a_run_samples_with_the_adapters_that_it_trains(tmp_path: Path, start: Callable[[str], Program]) -> None:
    """If its server and then the whole run are killed, it resumes with new servers of the base and ends the same."""
    start("whole").finish()
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    program = start("killed")
    program.when(lambda: steps_done(killed) == 1)
    (server,) = (p for p in program.processes() if "--weight-version" in p.cmdline() and os.getsid(p.pid) == p.pid)
    server.kill()
    program.when(lambda: steps_done(killed) == 2)
    assert [line["servers/back"] for line in lines(killed / "metrics.jsonl")] == [0, 1]
    kill(program)
    start("killed").finish()
    metrics = lines(whole / "metrics.jsonl")
    assert all(line["mismatch/max_abs"] <= 1e-4 for line in metrics) and len(metrics) == 3
    assert metrics[-1]["kl"] > 1e-6, "two updates have moved the policy"
    for row, other in zip(metrics, lines(killed / "metrics.jsonl"), strict=True):
        assert {name: row[name] for name in SAME} == {name: other[name] for name in SAME}
    assert parameters(killed) == parameters(whole)
