"""Evaluations between the steps of a run: when they are due, what stays in flight meanwhile, and how they go on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from megatron_collab.runtime import rank0
from megatron_collab.runtime.process import Preempted
from tests.rollout.simulated import DIFFERENT, World

STEPS = 4
Maker = Callable[..., World]


def make(world: Maker, ahead: int = 0, every: int = 0, **options: Any) -> World:
    made = world(lambda task: DIFFERENT, max_staleness=ahead, **options)
    made.config.train.steps = made.evaluations.steps = STEPS
    made.config.train.eval_every = every
    return made


def train(made: World, start: int = 0) -> None:
    """As train_rl does."""
    for step in range(start, STEPS):
        made.version = step
        if made.manager.evaluation_due(step):
            made.manager.evaluate(step)
        made.next(step)
    made.version = STEPS
    if made.manager.evaluation_due(STEPS):
        made.manager.evaluate(STEPS)


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (0, {"before": 0, "after": 4}),
        (2, {"before": 0, "step_2": 2, "after": 4}),
        (3, {"before": 0, "step_3": 3, "after": 4}),
    ],
)
def test_evaluations_are_due_before_between_and_after(world: Maker, every: int, expected: dict[str, int]) -> None:
    made = make(world, every=every)
    train(made)
    assert {name: record["step"] for name, record in made.evaluations.records.items()} == expected
    for name, step in expected.items():
        assert {made.begun[f"eval-{name}-{index}"] for index in range(4)} == {step}  # with these weights


def test_groups_in_flight_stay_in_flight(world: Maker) -> None:
    """An evaluation neither takes nor repeats what is sampled ahead, and the same is trained with and without it."""
    found = []
    for every in (1, 0):
        made = make(world, ahead=1, every=every)
        made.slow = {"train-1-1"}
        trained = []
        for step in range(STEPS):
            made.version = step
            if every:
                made.manager.evaluate(step)
            trained.append(made.trained(made.next(step)))
            made.slow.clear()
        found.append((trained, {name: n for name, n in made.calls.items() if name.startswith("train")}))
    assert found[0] == found[1]
    assert set(found[0][1].values()) == {1}


def test_an_outage_in_an_evaluation_disturbs_what_is_in_flight_too(world: Maker) -> None:
    made = make(world, ahead=1, every=1)
    made.broken = {"train-1-2", "eval-step_1-0"}
    made.next(0)
    made.version = 1
    made.evaluations.records["before"] = {"step": 0, "set": ""}
    made.outage = made.looks + 1
    made.manager.evaluate(1)
    made.next(1)
    assert made.revived == 1
    assert {name for name, calls in made.calls.items() if calls == 2} == made.broken


def test_sets_are_played_one_after_the_other_each_under_its_own_name(world: Maker) -> None:
    source = make(world).config.data.train
    sets = [{"source": source, "name": "all"}, {"source": source, "name": "few", "tasks": 2}]
    made = make(world, every=2, sets=sets)
    train(made)
    steps = {"before": 0, "step_2": 2, "after": 4}
    assert {name: record["step"] for name, record in made.evaluations.records.items()} == {
        f"{one}/{name}": step for name, step in steps.items() for one in ("all", "few")
    }
    streams = Counter(name.rpartition("-")[0] for name in made.calls if name.startswith("eval"))
    assert streams == Counter({f"eval-{one}-{name}": n for name in steps for one, n in (("all", 4), ("few", 2))})
    assert made.sets["eval-few-step_2-1"].name == "few" and made.sets["train-0-0"] is None


@pytest.mark.parametrize("ahead", [0, 1])
def test_an_interrupted_evaluation_between_steps_goes_on_from_the_journal(
    world: Maker, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = make(world, ahead, every=2)
    train(undisturbed)

    before = make(world, ahead, every=2)
    before.slow = {"eval-step_2-1"}
    look, notice = rank0.raise_if_preempted, lambda: "eval-step_2-3" in before.played

    def preempt() -> None:
        if notice():
            raise Preempted
        look()

    monkeypatch.setattr(rank0, "raise_if_preempted", preempt)
    with pytest.raises(Preempted), before.manager:
        train(before)
    monkeypatch.setattr(rank0, "raise_if_preempted", look)
    after = make(world, ahead, every=2, state=before.manager.state(), journal=True)
    after.evaluations.records |= before.evaluations.records
    train(after, start=2)
    assert list(after.evaluations.records) == ["before", "step_2", "after"]
    evaluated = {name for name in after.played if name.startswith("eval")}
    assert evaluated == {"eval-step_2-1"} | {f"eval-after-{index}" for index in range(4)}
    assert before.evaluated + after.evaluated == undisturbed.evaluated
    if ahead:
        assert not {name for name in after.played if name.startswith("train-2-")}  # they were finished beside it


@pytest.mark.parametrize(
    ("changed", "again"),
    [({}, set()), ({"tasks": 5}, {4}), ({"temperature": 0.5}, {0, 1, 2, 3}), ({"samples": 2}, {0, 1, 2, 3})],
)
def test_groups_of_before_are_not_mixed_with_those_of_other_settings(
    world: Maker, changed: dict[str, Any], again: set[int]
) -> None:
    """Finished before the run was stopped, in an evaluation that is not recorded."""
    source = make(world).config.data.train
    before = make(world, sets=[{"source": source, "name": "one"}])
    before.manager.evaluate(0)
    after = make(world, sets=[{"source": source, "name": "one", **changed}], journal=True)
    after.manager.evaluate(0)
    assert after.played.keys() == {f"eval-one-before-{index}" for index in again}
    assert [group.task for group in after.evaluated[:4]] == [group.task for group in before.evaluated]
