"""Two ranks: an aborted update changes no rank, and servers allocate memory only after all ranks have freed it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_collab.config import Config
from megatron_collab.launch.trainer_specs import trainer_spec
from megatron_collab.runtime import rank0
from megatron_collab.runtime.process import Preempted, RunStopped
from megatron_collab.trainer.megatron import parallel
from megatron_collab.trainer.trainer import PolicyTrainer
from megatron_collab.types import Batch
from tests.ranks import init_parallel, learn, make_config, make_model, make_samples, run_ranks

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SMALL: dict[str, object] = {"train.tokens_per_micro_batch": 30, "algo.mini_batches": 2}
CASES: dict[str, dict[str, object]] = {
    "pp2": SMALL | {"parallel.pp": 2},
    "dp2 gae": SMALL | {"algo.advantage": "gae", "algo.kl_in": "reward", "algo.kl": "k1", "algo.critic_lr": 1e-3},
    "dp2 sft": SMALL | {"train.stage": "sft"},
}


@pytest.fixture(scope="module")
def rank_results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(give_up, 2, make_model(tmp_path_factory.mktemp("given_up") / "model"))


def test_an_update_can_be_aborted_at_every_check(rank_results: list[dict[str, Any]]) -> None:
    """Checks: before every pass, without pipeline stages also before each micro-batch, and before the step."""
    checks = rank_results[0]["checks"]
    assert checks["pp2"] == 4  # log-probs of policy and reference, the gradient, the step
    assert checks["dp2 gae"] > 5 and checks["dp2 sft"] > 2  # values too; several micro-batches per pass


def test_other_ranks_leave_a_stopped_run_after_rank_0(rank_results: list[dict[str, Any]]) -> None:
    assert [rank["put away first"] for rank in rank_results] == [True, True]


def test_servers_allocate_memory_after_every_rank_has_freed_it(rank_results: list[dict[str, Any]]) -> None:
    first, second = rank_results
    assert first["servers may begin"] >= second["left"] > first["left"] + 0.5


def give_up(folder: Path) -> dict[str, Any]:
    """As one of two ranks."""
    checks, rank0.raise_if_preempted = {}, (signal := PreemptionSignal())
    for case, settings in CASES.items():
        config = make_config(folder, settings)
        with init_parallel(config):
            checks[case] = given_up(config, signal)
    with init_parallel(config):
        times = leave(config)
    return {"checks": checks, "put away first": put_away_first(folder)} | times


class PreemptionSignal:
    """Raises Preempted at check number `at` of this rank, counted since `checks` was reset."""

    def __init__(self) -> None:
        self.at: int | None = None
        self.checks = 0

    def __call__(self) -> None:
        self.checks += 1
        if self.checks == self.at:
            raise Preempted("told to end")


def make(config: Config) -> PolicyTrainer:
    return PolicyTrainer(trainer_spec(config))


def state(actor: PolicyTrainer) -> list[torch.Tensor]:
    """Everything that an update changes."""
    tensors = [torch.get_rng_state(), torch.tensor(actor.step)]
    for trained in actor.trainables.values():
        tensors += [parameter for chunk in trained.chunks for parameter in chunk.parameters()]
        for part in trained.optimizer.chained_optimizers:
            inner = part.optimizer
            tensors += [tensor for group in inner.param_groups for tensor in group["params"]]
            tensors += [value for of in inner.state.values() for value in of.values() if torch.is_tensor(value)]
    return [tensor.detach().clone() for tensor in tensors]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def given_up(config: Config, signal: PreemptionSignal) -> int:
    """At how many checks an update was aborted, each time without changes; the final one equals an undisturbed one."""
    first, second = (Batch(make_samples(11, seed)) for seed in (1, 2))
    interrupted, uninterrupted = make(config), make(config)
    for actor in (interrupted, uninterrupted):
        learn(actor, first)
    for at in count(1):
        before = state(interrupted)
        signal.at, signal.checks = at, 0
        try:
            metrics = learn(interrupted, second)
        except Preempted:
            assert same(state(interrupted), before), f"aborted at check {at}, it changed the trainer"
            continue
        signal.at = None
        assert metrics == learn(uninterrupted, second)
        after = state(interrupted)
        assert same(after, state(uninterrupted))
        signal.at, signal.checks = 1, 0
        interrupted.log_probs(interrupted.chunks, second, interruptible=False)  # as for train.record_tokens
        assert signal.checks == 0 and same(after, state(interrupted)), "an update that is made stays as it is"
        signal.at = None
        return at - 1
    raise AssertionError


def leave(config: Config) -> dict[str, float]:
    """When this rank has freed the device (rank 1 a second late), and when the block of `offloaded` begins."""
    actor, departure = make(config), 0.0

    @contextmanager
    def leaving() -> Iterator[None]:
        nonlocal departure
        time.sleep(int(os.environ["RANK"]))
        departure = time.monotonic()
        yield

    actor.policy.offloaded = leaving  # type: ignore[method-assign]
    with actor.offloaded():
        return {"left": departure, "servers may begin": time.monotonic()}


def put_away_first(folder: Path) -> bool:
    """Whether rank 0 has cleaned up a stopped run by the time this rank leaves it."""
    mark = folder / "put away"

    def put_away() -> None:
        time.sleep(0.5)
        mark.touch()

    try:
        with parallel.leader_ends_first(60.0, print), ExitStack() as stack:
            if os.environ["RANK"] == "0":
                stack.callback(put_away)
            raise RunStopped("told to end")
    except RunStopped:
        return mark.exists()
