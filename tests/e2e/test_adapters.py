"""Adapters that servers hold beside the base: a run samples with what it trains, also after parts of it were killed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.test_booking import RANDOM, Program, kill, lines, parameters, steps_done

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
    """One whose server and then all of it are killed goes on with servers of the base alone, and ends the same."""
    start("whole").finish()
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    program = start("killed")
    program.when(lambda: steps_done(killed) == 1)
    (server,) = (p for p in program.left() if "--weight-version" in p.cmdline() and os.getsid(p.pid) == p.pid)
    server.kill()
    program.when(lambda: steps_done(killed) == 2)
    assert [line["servers/back"] for line in lines(killed / "metrics.jsonl")] == [0, 1]
    kill(program)
    start("killed").finish()
    found = lines(whole / "metrics.jsonl")
    assert all(line["mismatch/max_abs"] <= 1e-4 for line in found) and len(found) == 3
    assert found[-1]["kl"] > 1e-6, "two updates have moved the policy"
    for one, other in zip(found, lines(killed / "metrics.jsonl"), strict=True):
        assert {name: one[name] for name in SAME} == {name: other[name] for name in SAME}
    assert parameters(killed) == parameters(whole)
