"""Dynamic sampling: groups that teach nothing are replaced, by the same ones whenever a step is repeated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from megatron_collab.runtime.process import RunStopped
from megatron_collab.types import Missing, Score
from tests.rollout.simulated import DIFFERENT, EQUAL, LOST, PROMPTS, World


def by_task(task: int) -> Sequence[Score]:
    """Odd tasks teach something; of the even ones, every third has too few rewards."""
    return DIFFERENT if task % 2 else (LOST if task % 3 == 0 else EQUAL)


def tasks_of(world: World, prefix: str) -> list[int]:
    return [task for stream, task in world.played.items() if stream.startswith(prefix)]


def test_without_it_groups_of_equal_rewards_stay(world: Callable[..., World]) -> None:
    run = world(by_task, 0)
    batch = run.next(4)
    assert list(run.played) == [f"train-4-{i}" for i in range(PROMPTS)]
    teaching = [task for task in run.played.values() if by_task(task) is not LOST]
    assert len(batch.samples) == 3 * len(teaching)
    assert not [name for name in batch.metrics if name.startswith("dynamic/")]


def test_groups_that_teach_nothing_are_replaced(world: Callable[..., World]) -> None:
    run = world(by_task, 8)
    batch = run.next(4)
    first = tasks_of(run, "train-4-")
    assert len(first) == PROMPTS and {by_task(task) is DIFFERENT for task in first} == {True, False}
    kept = [task for task in run.played.values() if by_task(task) is DIFFERENT]
    assert len(kept) == PROMPTS
    assert [len(values) for values in grouped(batch.samples).values()] == [3] * PROMPTS
    assert all(values == {0.0, 1.0} for values in map(set, grouped(batch.samples).values()))
    refills = {stream.split("-")[1] for stream in run.played} - {"4"}
    assert batch.metrics["dynamic/kept"] == PROMPTS
    assert batch.metrics["dynamic/dropped"] == len(run.played) - PROMPTS > 0
    assert batch.metrics["dynamic/refills"] == len(refills) > 0
    # Each refill plays only as many groups as were lacking before it.
    assert refills == {f"4.{number + 1}" for number in range(len(refills))}
    lacking = PROMPTS
    for name in ("4", *sorted(refills)):
        played = tasks_of(run, f"train-{name}-")
        assert len(played) == lacking
        lacking -= sum(by_task(task) is DIFFERENT for task in played)


def grouped(samples: Sequence[Any]) -> dict[str, list[float]]:
    rewards: dict[str, list[float]] = {}
    for sample in samples:
        (credit,) = sample.credits
        rewards.setdefault(credit.peers, []).append(credit.value)
    return rewards


def test_everything_played_is_written_and_counted(world: Callable[..., World]) -> None:
    run = world(by_task, 8)
    batch = run.next(4)
    assert [int(group.task.id) for group in run.written] == list(run.played.values())
    scores = [score for task in run.played.values() for score in by_task(task) if not isinstance(score, Missing)]
    assert batch.metrics["reward"] == pytest.approx(np.mean(scores))
    assert batch.metrics["count/asked"] == 1.0


def test_metrics_show_how_many_groups_are_kept_after_the_last_refill(world: Callable[..., World]) -> None:
    run = world(lambda task: DIFFERENT if task == first_task(run, 0) else EQUAL, 2)
    batch = run.next(0)
    assert len(run.played) == PROMPTS + 2 * (PROMPTS - 1)
    assert len(batch.samples) == 3
    metrics = [batch.metrics[f"dynamic/{name}"] for name in ("kept", "dropped", "refills")]
    assert metrics == [1, PROMPTS + 2 * (PROMPTS - 1) - 1, 2]


def first_task(run: World, step: int) -> int:
    return run.played[f"train-{step}-0"]


def test_a_repeated_step_plays_the_same_tasks(world: Callable[..., World]) -> None:
    undisturbed = world(by_task, 8)
    for step in range(3):
        undisturbed.next(step)
    resumed = world(by_task, 8)
    resumed.next(2)
    assert resumed.played and resumed.played.items() <= undisturbed.played.items()


def test_refills_do_not_depend_on_what_was_dropped(world: Callable[..., World]) -> None:
    """Seed, step and number of a refill decide its tasks, but not how many of them are played."""
    few = world(by_task, 2)
    few.next(1)
    many = world(lambda task: DIFFERENT if task == first_task(many, 1) else EQUAL, 2)
    many.next(1)
    for number in (1, 2):
        short, long = (tasks_of(run, f"train-1.{number}-") for run in (few, many))
        assert 0 < len(short) < len(long) and long[: len(short)] == short
    assert tasks_of(many, "train-1.1-") != tasks_of(many, "train-1.2-")


def test_a_step_in_which_nothing_differs_stops_the_run(world: Callable[..., World]) -> None:
    run = world(lambda task: EQUAL, 2)
    with pytest.raises(RunStopped, match=r"^step 0: no group has enough different rewards; nothing can"):
        run.next(0)
    assert len(run.written) == 3 * PROMPTS


def test_an_outage_is_not_refilled(world: Callable[..., World]) -> None:
    run = world(lambda task: LOST, 8)
    with pytest.raises(RunStopped, match=r"12 of 18 rollouts have no reward"):
        run.next(0)
    assert len(run.played) == PROMPTS


def test_groups_without_a_pair_are_not_in_a_dpo_batch(world: Callable[..., World]) -> None:
    run = world(lambda task: EQUAL, 0)
    run.config.algo.objective = "dpo"
    with pytest.raises(RunStopped, match="no group has enough different rewards"):
        run.next(4)
