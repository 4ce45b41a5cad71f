"""How a run ends that cannot continue."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch.distributed as dist

from megatron_collab import train
from megatron_collab.config import Config
from megatron_collab.data.spec import DataSpec
from megatron_collab.launch import prepare
from megatron_collab.launch.session import Session
from megatron_collab.launch.spec import run_spec
from megatron_collab.llm.limiter import BudgetSpent
from megatron_collab.runtime import signals
from megatron_collab.runtime.process import Hung, RunStopped
from megatron_collab.runtime.rank0 import from_leader
from megatron_collab.trainer.megatron import parallel


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def refuse(error: Exception) -> NoReturn:
    raise error


def test_a_budget_that_is_used_up_stops_the_run(alone: None) -> None:
    with pytest.raises(RunStopped, match=r"llm\.budget_usd=5 is used up"):
        from_leader(lambda: refuse(BudgetSpent("llm.budget_usd=5 is used up")))


def test_other_failures_are_raised_unchanged(alone: None) -> None:
    with pytest.raises(KeyError):
        from_leader(lambda: refuse(KeyError("bug")))
    with pytest.raises(Hung):
        from_leader(lambda: refuse(Hung("no answer")))
    assert from_leader(lambda: 7) == 7


def test_a_stopped_run_prints_its_reason_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Before the other ranks learn that rank 0 has finished: torchrun ends all ranks once one of them exits."""
    messages: list[str] = []
    store = SimpleNamespace(set=lambda *_: messages.append(capsys.readouterr().err))
    monkeypatch.setattr(parallel, "run_store", lambda: (store, 0, 1))

    def stopped(config: Config, data: DataSpec) -> None:
        with parallel.leader_ends_first(1.0, Session(config).explain):
            raise RunStopped("llm.budget_usd=5 is used up")

    monkeypatch.setattr(train, "train_supervised", stopped)
    monkeypatch.setattr(train.process, "die_with_parent", lambda parent: None)
    monkeypatch.setattr(signals, "keep_notices", lambda rank, grace: None)
    monkeypatch.setattr(prepare, "prepare", lambda config: (config, run_spec(config)))
    monkeypatch.setattr(train.process, "under_torchrun", lambda: True)
    monkeypatch.setattr(train.program, "_check_ranks", lambda nodes, ranks: None)
    code = train.main(["experiment=booking_sft", f"run.dir={tmp_path}/run", f"data.dir={tmp_path}/world"])
    assert code == train.process.EXIT_STOPPED == 3
    assert messages == ["megatron-collab: llm.budget_usd=5 is used up\n"]
    assert capsys.readouterr().err == ""
    assert "RANK" not in os.environ
