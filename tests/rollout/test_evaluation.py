"""Evaluations between the steps of a run: when they are due, what stays in flight meanwhile, and how they resume."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_collab.rollout.scheduler import Slot
from megatron_collab.runtime import rank0
from megatron_collab.runtime.process import Preempted, RunStopped
from megatron_collab.types import Group, Message, Missing, Task
from tests.rollout.simulated import DIFFERENT, World, rollout

STEPS = 4
Maker = Callable[..., World]


def make(world: Maker, ahead: int = 0, every: int = 0, **options: Any) -> World:
    run = world(lambda task: DIFFERENT, max_staleness=ahead, **options)
    run.config.train.steps = run.evaluations.steps = STEPS
    run.config.train.eval_every = every
    return run


def train(run: World, start: int = 0) -> None:
    """The loop of train_rl."""
    for step in range(start, STEPS):
        run.version = step
        if run.manager.evaluation_due(step):
            run.manager.evaluate(step)
        run.next(step)
    run.version = STEPS
    if run.manager.evaluation_due(STEPS):
        run.manager.evaluate(STEPS)


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (0, {"before": 0, "after": 4}),
        (2, {"before": 0, "step_2": 2, "after": 4}),
        (3, {"before": 0, "step_3": 3, "after": 4}),
    ],
)
def test_evaluations_are_due_before_between_and_after(world: Maker, every: int, expected: dict[str, int]) -> None:
    run = make(world, every=every)
    train(run)
    assert {name: record["step"] for name, record in run.evaluations.records.items()} == expected
    for name, step in expected.items():
        assert {run.begun[f"eval-{name}-{index}"] for index in range(4)} == {step}  # with these weights


def test_groups_in_flight_stay_in_flight(world: Maker) -> None:
    """An evaluation neither uses nor repeats groups that are sampled ahead, and does not change what is trained."""
    results = []
    for every in (1, 0):
        run = make(world, ahead=1, every=every)
        run.slow = {"train-1-1"}
        trained = []
        for step in range(STEPS):
            run.version = step
            if every:
                run.manager.evaluate(step)
            trained.append(run.trained(run.next(step)))
            run.slow.clear()
        results.append((trained, {name: n for name, n in run.calls.items() if name.startswith("train")}))
    assert results[0] == results[1]
    assert set(results[0][1].values()) == {1}


def test_an_outage_in_an_evaluation_replays_broken_training_groups_too(world: Maker) -> None:
    run = make(world, ahead=1, every=1)
    run.broken = {"train-1-2", "eval-step_1-0"}
    run.next(0)
    run.version = 1
    run.evaluations.records["before"] = {"step": 0, "set": ""}
    run.outage = run.looks + 1
    run.manager.evaluate(1)
    run.next(1)
    assert run.revived == 1
    assert {name for name, calls in run.calls.items() if calls == 2} == run.broken


def test_eval_sets_are_played_in_order_under_their_own_names(world: Maker) -> None:
    source = make(world).config.data.train
    sets = [{"source": source, "name": "all"}, {"source": source, "name": "few", "tasks": 2}]
    run = make(world, every=2, sets=sets)
    train(run)
    steps = {"before": 0, "step_2": 2, "after": 4}
    assert {name: record["step"] for name, record in run.evaluations.records.items()} == {
        f"{set_name}/{name}": step for name, step in steps.items() for set_name in ("all", "few")
    }
    streams = Counter(name.rpartition("-")[0] for name in run.calls if name.startswith("eval"))
    assert streams == Counter(
        {f"eval-{set_name}-{name}": n for name in steps for set_name, n in (("all", 4), ("few", 2))}
    )
    assert run.sets["eval-few-step_2-1"].name == "few" and run.sets["train-0-0"] is None


@pytest.mark.parametrize("ahead", [0, 1])
def test_an_interrupted_evaluation_between_steps_resumes_from_the_journal(
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
        assert not {
            name for name in after.played if name.startswith("train-2-")
        }  # they were finished during the evaluation


@pytest.mark.parametrize(
    ("changed", "replayed"),
    [({}, set()), ({"tasks": 5}, {4}), ({"temperature": 0.5}, {0, 1, 2, 3}), ({"samples": 2}, {0, 1, 2, 3})],
)
def test_finished_groups_are_played_again_if_settings_of_their_set_change(
    world: Maker, changed: dict[str, Any], replayed: set[int]
) -> None:
    """The groups were finished before the run stopped, in an evaluation that was not recorded."""
    source = make(world).config.data.train
    before = make(world, sets=[{"source": source, "name": "one"}])
    before.manager.evaluate(0)
    after = make(world, sets=[{"source": source, "name": "one", **changed}], journal=True)
    after.manager.evaluate(0)
    assert after.played.keys() == {f"eval-one-before-{index}" for index in replayed}
    assert [group.task for group in after.evaluated[:4]] == [group.task for group in before.evaluated]


def test_an_evaluation_that_lacks_too_many_scores_is_not_recorded_and_repeats_only_those(world: Maker) -> None:
    source = make(world).config.data.train
    before = make(world, sets=[{"source": source, "name": "one"}])
    before.unscored = {f"eval-one-before-{index}" for index in range(3)}  # of four
    with pytest.raises(RunStopped, match=r"lack a score, more than reward.max_missing=0.5 allows.*no server of"):
        before.manager.evaluate(0)
    assert not before.evaluations.records and set(before.calls.values()) == {1}
    after = make(world, sets=[{"source": source, "name": "one"}], journal=True)
    after.manager.evaluate(0)
    assert after.played.keys() == before.unscored
    assert after.evaluations.records["one/before"]["incomplete"] == 0


def test_conversations_that_lack_a_score_are_played_once_more_before_an_evaluation_is_recorded(world: Maker) -> None:
    """Whether they ended with an error or only lack a score; the others are not played again."""
    run = make(world, every=2)
    run.broken, run.unscored = {"eval-step_2-0"}, {"eval-step_2-3"}
    train(run)
    assert run.evaluations.records["step_2"]["incomplete"] == 0
    evaluated = {name: calls for name, calls in run.calls.items() if name.startswith("eval")}
    assert {name for name, calls in evaluated.items() if calls == 2} == run.broken | run.unscored
    assert [group.task.id for group in run.evaluated[4:8]] == ["0", "1", "2", "3"]


def test_of_two_plays_the_one_with_fewer_failures_counts(world: Maker) -> None:
    run = make(world, sets=[{"source": make(world).config.data.train, "name": "one"}])
    evaluator = run.manager._evaluator
    slot, task = Slot(0, 0, 0), Task("0", (Message("user", "hi"),), "g", "", "")

    def group(missing: int) -> Group:
        return Group(task, tuple(rollout(Missing("down") if n < missing else 1.0, 0) for n in range(4)))

    for missing in (1, 4, 0):
        evaluator._flight = SimpleNamespace(take=partial(dict, [(slot, group(missing))]))  # type: ignore[assignment]
        evaluator._take("before")
        assert sum(bool(r.failures) for r in evaluator._played[slot].rollouts) == min(missing, 1)


def test_an_evaluation_that_lacks_scores_is_repeated_by_a_run_that_resumes_at_its_step(world: Maker) -> None:
    """With the same weights, so only these are played."""
    before = make(world, every=2)
    before.unscored, before.unscored_calls = {"eval-step_2-1"}, 2
    before.manager.evaluate(0)
    for step in range(2):
        before.next(step)
    state = before.manager.state()
    before.version = 2
    before.manager.evaluate(2)
    assert {name: record["incomplete"] for name, record in before.evaluations.records.items()} == {
        "before": 0,
        "step_2": 3,  # all conversations of the group
    }
    after = make(world, every=2, state=state, journal=True)
    after.evaluations.records |= before.evaluations.records
    after.version = 2
    assert after.manager.evaluation_due(2)
    after.manager.evaluate(2)
    assert after.played.keys() == before.unscored
    assert after.evaluations.records["step_2"]["incomplete"] == 0
    assert not after.manager.evaluation_due(2)
