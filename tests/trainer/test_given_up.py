"""Two ranks in step: an update that is given up leaves no trace on any, and servers take memory that all have left."""

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
from megatron_collab.runtime import rank0
from megatron_collab.runtime.process import Preempted, RunStopped
from megatron_collab.trainer.megatron import parallel
from megatron_collab.trainer.trainer import PolicyTrainer
from megatron_collab.types import Batch
from tests.ranks import learn, make_config, make_model, make_samples, run_ranks

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SMALL: dict[str, object] = {"train.tokens_per_micro_batch": 30, "algo.mini_batches": 2}
CASES: dict[str, dict[str, object]] = {
    "pp2": SMALL | {"parallel.pp": 2},
    "dp2 gae": SMALL | {"algo.advantage": "gae", "algo.kl_in": "reward", "algo.kl": "k1", "algo.critic_lr": 1e-3},
    "dp2 sft": SMALL | {"train.stage": "sft"},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(give_up, 2, make_model(tmp_path_factory.mktemp("given_up") / "model"))


def test_an_update_can_be_given_up_at_every_look(found: list[dict[str, Any]]) -> None:
    """Looks: before every pass, without pipeline stages before each of its micro-batches, and before the step."""
    looks = found[0]["looks"]
    assert looks["pp2"] == 4  # log-probs of policy and reference, the gradient, the step
    assert looks["dp2 gae"] > 5 and looks["dp2 sft"] > 2  # values too; several micro-batches a pass


def test_other_ranks_leave_a_run_that_is_stopped_after_rank_0(found: list[dict[str, Any]]) -> None:
    assert [own["put away first"] for own in found] == [True, True]


def test_servers_take_memory_when_every_rank_has_left_it(found: list[dict[str, Any]]) -> None:
    first, second = found
    assert first["servers may begin"] >= second["left"] > first["left"] + 0.5


def give_up(folder: Path) -> dict[str, Any]:
    """As one of two ranks."""
    looks, rank0.raise_if_preempted = {}, (told := Told())
    for case, settings in CASES.items():
        config = make_config(folder, settings)
        with parallel.init_parallel(config):
            looks[case] = given_up(config, told)
    with parallel.init_parallel(config):
        times = leave(config)
    return {"looks": looks, "put away first": put_away_first(folder)} | times


class Told:
    """The signal comes just before look number `at` of rank 0, counted from the last setting of it."""

    def __init__(self) -> None:
        self.at: int | None = None
        self.looks = 0

    def __call__(self) -> None:
        self.looks += 1
        if self.looks == self.at:
            raise Preempted("told to end")


def make(config: Config) -> PolicyTrainer:
    return PolicyTrainer(config)


def state(actor: PolicyTrainer) -> list[torch.Tensor]:
    """Everything that an update changes."""
    found = [torch.get_rng_state(), torch.tensor(actor.step)]
    for trained in actor.trainables.values():
        found += [parameter for chunk in trained.chunks for parameter in chunk.parameters()]
        for part in trained.optimizer.chained_optimizers:
            inner = part.optimizer
            found += [tensor for group in inner.param_groups for tensor in group["params"]]
            found += [value for of in inner.state.values() for value in of.values() if torch.is_tensor(value)]
    return [tensor.detach().clone() for tensor in found]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def given_up(config: Config, told: Told) -> int:
    """At how many looks an update was given up, each time without a trace; then it is made as if never."""
    first, second = (Batch(make_samples(11, seed)) for seed in (1, 2))
    disturbed, undisturbed = make(config), make(config)
    for actor in (disturbed, undisturbed):
        learn(actor, first)
    for at in count(1):
        before = state(disturbed)
        told.at, told.looks = at, 0
        try:
            metrics = learn(disturbed, second)
        except Preempted:
            assert same(state(disturbed), before), f"given up at look {at}, it left something behind"
            continue
        told.at = None
        assert metrics == learn(undisturbed, second)
        assert same(state(disturbed), state(undisturbed))
        return at - 1
    raise AssertionError


def leave(config: Config) -> dict[str, float]:
    """When this rank has left the device, rank 1 a second late, and when the block of `offloaded` begins."""
    actor, left = make(config), 0.0

    @contextmanager
    def leaving() -> Iterator[None]:
        nonlocal left
        time.sleep(int(os.environ["RANK"]))
        left = time.monotonic()
        yield

    actor.policy.offloaded = leaving  # type: ignore[method-assign]
    with actor.offloaded():
        return {"left": left, "servers may begin": time.monotonic()}


def put_away_first(folder: Path) -> bool:
    """Whether a run that is stopped has been put away by rank 0 by the time this rank is out of it."""
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
