"""Programs of users that end or cancel what called them."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_collab.config import Config
from megatron_collab.launch import program
from megatron_collab.reward.multiturn import _custom_reward
from megatron_collab.reward.workers import Job, RewardWorker
from megatron_collab.rollout.users import UserError, reporting_errors
from megatron_collab.runtime.process import EXIT_BAD_INPUT
from megatron_collab.settings import ConfigError
from megatron_collab.settings.extension import resolve
from megatron_collab.types import Missing, Task


def ends() -> None:
    sys.exit(0)


def cancels() -> None:
    raise asyncio.CancelledError


@pytest.fixture
def extension(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "my.py").write_text("import sys\nsys.exit(0)\n")
    yield tmp_path / "my.py"


def test_an_extension_that_exits_at_its_import_is_refused(extension: Path) -> None:
    with pytest.raises(ConfigError, match=r"importing .* failed: SystemExit: 0"):
        resolve(f"{extension}:Mine", "algo.loss", object)


def test_a_function_that_exits_does_not_end_a_run_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.run("a.module", "", Config, [], lambda *_: ends()) == EXIT_BAD_INPUT  # type: ignore[func-returns-value]
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and __file__ in err and "ends the run by SystemExit(0)" in err


@pytest.mark.parametrize("fails", [ends, cancels])
def test_an_extension_that_exits_or_cancels_has_failed(fails: Callable[[], None]) -> None:
    task = Task("t", (), "", "", "")
    users: Any = SimpleNamespace(counters=Counter(), directory=SimpleNamespace(name_of=lambda _: ""))
    worker: Any = RewardWorker.__new__(RewardWorker)
    metric = SimpleNamespace(counters=Counter(), score=lambda *_: fails())
    worker.metrics, worker.timeout, worker._judged = {"mine": metric}, 10.0, set()

    async def play() -> None:
        worker._places = {"mine": asyncio.Semaphore(1)}
        score = await worker._apply("mine", Job(("mine",), task, None))  # type: ignore[arg-type]
        assert isinstance(score, Missing) and "metric mine: " in score.why and metric.counters["failed"] == 1
        with pytest.raises(UserError), reporting_errors(task, users):
            fails()
        reward = _custom_reward("m", lambda *_: fails(), (), {})  # type: ignore[arg-type, return-value]
        assert isinstance(reward.value, Missing)

    asyncio.run(play())


def test_a_cancellation_from_outside_goes_on() -> None:
    users: Any = SimpleNamespace(counters=Counter(), directory=SimpleNamespace(name_of=lambda _: ""))

    async def wait() -> None:
        with reporting_errors(Task("t", (), "", "", ""), users):
            await asyncio.Event().wait()

    async def cancel() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wait(), 0.01)

    asyncio.run(cancel())
    assert not users.counters
