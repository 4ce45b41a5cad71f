"""Finished groups are not played again: the files of the journal, and runs that stop anywhere and resume."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_collab import types
from megatron_collab.observability.folder import rows_of
from megatron_collab.rollout.journal import Journal, WeightDigests, conversations, entries, failed, scored
from megatron_collab.runtime import signals
from megatron_collab.runtime.process import Preempted
from megatron_collab.types import Batch, Ending, Finish, Future, Group, Message, Missing, Rollout, Score, Task, Turn
from tests.rollout.simulated import DIFFERENT, EQUAL, PROMPTS, World, rollout

TASK = Task("7", (Message("user", "hi"),), "goal", "answer", "scripted/booking", {"day": "friday"})
GROUP = Group(TASK, (rollout(0.1, 2), rollout(1.0, 3)))
Maker = Callable[..., World]


def digests(*losses: float) -> WeightDigests:
    """The digests of a run that began at version 2 and made one update for each loss."""
    weights = WeightDigests(keep=8)
    weights.begin(2)
    for loss in losses:
        weights.learned({"loss": loss})
    return weights


def opened(folder: Path, *losses: float) -> Journal:
    return Journal(folder, digests(*losses or (0.1, 0.2)))


def test_a_group_comes_back_to_the_last_bit(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "journal"  # which the journal creates
    opened(folder).write(3, {"train-3-0": GROUP})
    assert opened(folder).find("train-3-0", TASK) == GROUP
    assert opened(folder).find("train-3-1", TASK) is None
    unopened = replace(TASK, messages=())
    begun = replace(GROUP, task=unopened.play_on(*TASK.messages))  # by the user
    opened(tmp_path).write(3, {"train-3-2": begun})
    assert opened(tmp_path).find("train-3-2", unopened) == begun and opened(tmp_path).find("train-3-2", TASK) is None


def test_a_group_that_an_earlier_version_wrote_is_found(tmp_path: Path) -> None:
    """Its records lack the attributes that have been added since."""
    base = rollout(0.5, 3)
    future = Future(base.start, {"right": 1.0})
    group = Group(replace(TASK, messages=(Message("user", "hi"),)), (replace(base, futures=(future,)),))
    for record, name in ((future, "judgments"), (group, "user"), (group.task.messages[0], "private")):
        del record.__dict__[name]
    opened(tmp_path).write(3, {"train-3-0": group})
    restored = opened(tmp_path).find("train-3-0", TASK)
    assert restored is not None and restored.user == "" and "user" not in vars(restored)
    (row,) = rows_of([restored])
    assert row["user"] == TASK.user and not row.keys() & {"judgments", "private"}


def test_a_turn_comes_back_with_its_experts(tmp_path: Path) -> None:
    """Experts are ignored when turns are compared."""
    original, experts = rollout(0.1, 2), np.arange(8, dtype=np.uint8).reshape(4, 2)
    routed = replace(
        original, start=replace(original.start, turns=(replace(original.start.turns[0], routing=experts),))
    )
    opened(tmp_path).write(3, {"train-3-0": Group(TASK, (routed,))})
    group = opened(tmp_path).find("train-3-0", TASK)
    assert group is not None and group.rollouts == (original,)
    assert group.rollouts[0].start.turns[0].routing.dtype == np.uint8
    assert group.rollouts[0].start.turns[0].routing.tolist() == experts.tolist()


def test_a_group_is_found_only_for_its_task_and_weights_of_the_run(tmp_path: Path) -> None:
    """GROUP was sampled by versions 2 and 3."""
    opened(tmp_path).write(2, {"train-2-0": GROUP})
    assert opened(tmp_path).find("train-2-0", replace(TASK, goal="another")) is None
    assert Journal(tmp_path, digests()).find("train-2-0", TASK) is None, "version 3 is yet to come"
    assert opened(tmp_path, 0.1, 0.3).find("train-2-0", TASK) == GROUP
    assert opened(tmp_path, 0.1 + 1e-15, 0.2).find("train-2-0", TASK) is None, "another version 3"


def test_groups_of_outdated_weights_are_not_written(tmp_path: Path) -> None:
    old = WeightDigests(keep=1)
    old.begin(3)
    old.learned({"loss": 0.1})
    Journal(tmp_path, old).write(2, {"train-2-0": GROUP})
    assert not list(tmp_path.iterdir())


def test_weight_digests_survive_a_checkpoint() -> None:
    weights = digests(0.1, 0.2)
    restored = WeightDigests(2, json.loads(json.dumps([*weights.items()])))
    restored.learned({"loss": 0.3})
    weights.learned({"loss": 0.3})
    assert [restored.get(version) for version in (3, 4, 5, 6)] == [None, weights[4], weights[5], None]


def test_a_group_of_an_unknown_class_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = type("Gone", (Group,), {"__module__": types.__name__})
    monkeypatch.setattr(types, "Gone", gone, raising=False)
    opened(tmp_path).write(3, {"train-3-0": gone(TASK, GROUP.rollouts)})
    assert opened(tmp_path).find("train-3-0", TASK) is not None
    monkeypatch.delattr(types, "Gone")
    assert opened(tmp_path).find("train-3-0", TASK) is None


def test_groups_with_a_missing_reward_or_an_error_are_not_written(tmp_path: Path) -> None:
    lost = {
        "no reward": Group(TASK, (rollout(1.0, 0), rollout(Missing("down"), 0))),
        "error": Group(TASK, (rollout(1.0, 0, Ending.ERROR),)),
    }
    opened(tmp_path).write(0, lost)
    assert not list(tmp_path.iterdir())


def branched(start: Ending, *ends: tuple[Ending, Score]) -> Rollout:
    """A trained turn with the ending `start`, and futures with these endings and scores."""
    base = rollout(0.5, 2, start)
    futures = tuple(Future(base.start.end(end), {"right": score, "style": 1.0}) for end, score in ends)
    return replace(base, futures=futures)


def test_one_conversation_with_an_error_makes_a_failed_group(tmp_path: Path) -> None:
    """The error may be in the trained turn or in any future of any rollout."""
    well = branched(Ending.USER_DONE, (Ending.USER_DONE, 1.0), (Ending.LENGTH, 0.0))
    assert [conversation.ending for conversation in conversations(Group(TASK, (well,)))] == [
        "user_done",
        "user_done",
        "length",
    ]
    assert not failed(Group(TASK, (well, well)))
    journal = opened(tmp_path)
    for broken in (
        branched(Ending.ERROR, (Ending.USER_DONE, 1.0)),
        branched(Ending.USER_DONE, (Ending.USER_DONE, 1.0), (Ending.ERROR, 0.0)),
    ):
        group = Group(TASK, (well, broken, well))
        assert failed(group)
        journal.write(0, {"train-0-0": group})
    assert not list(tmp_path.iterdir())


def test_a_group_is_scored_if_no_score_is_missing() -> None:
    well = branched(Ending.USER_DONE, (Ending.USER_DONE, 1.0), (Ending.LENGTH, 0.0))
    partly = branched(Ending.USER_DONE, (Ending.USER_DONE, 1.0), (Ending.USER_DONE, Missing("down")))
    assert scored(Group(TASK, (well, well))) and not scored(Group(TASK, (well, partly)))


@pytest.mark.parametrize("cut", [1, 5, 14, 20, 60, "damaged"])
def test_a_partly_written_entry_is_dropped(tmp_path: Path, cut: int | str) -> None:
    journal = opened(tmp_path)
    (file,) = [tmp_path / "step_0.groups"]
    journal.write(0, {"first": GROUP})
    size = file.stat().st_size
    journal.write(0, {"second": GROUP})
    content = bytearray(file.read_bytes())
    if isinstance(cut, int):
        content = content[: size + cut]
    else:
        content[-3] ^= 1
    file.write_bytes(content)
    reopened = opened(tmp_path)
    assert reopened.find("first", TASK) == GROUP and reopened.find("second", TASK) is None
    reopened.write(0, {"third": GROUP})
    assert [entry.stream for entry in entries(file)] == ["first", "third"]


def test_an_entry_is_on_disk_when_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it is flushed before the file is synced."""
    synced: list[tuple[int, int]] = []

    def watched(descriptor: int) -> None:
        status = os.fstat(descriptor)
        synced.append((status.st_ino, status.st_size))

    monkeypatch.setattr(os, "fsync", watched)
    opened(tmp_path).write(0, {"first": GROUP, "second": GROUP})
    written = (tmp_path / "step_0.groups").stat()
    assert synced == [(written.st_ino, written.st_size)] and written.st_size


def test_a_file_that_the_file_system_filled_with_zeros_is_empty(tmp_path: Path) -> None:
    (tmp_path / "step_0.groups").write_bytes(bytes(100))
    opened(tmp_path)
    assert (tmp_path / "step_0.groups").stat().st_size == 0


def test_steps_before_a_checkpoint_are_forgotten(tmp_path: Path) -> None:
    for step in (2, 10, 11):
        opened(tmp_path).write(step, {f"train-{step}-0": GROUP})
    journal = opened(tmp_path)
    journal.forget(11)
    assert [file.name for file in tmp_path.iterdir()] == ["step_11.groups"]
    assert journal.find("train-2-0", TASK) is None
    journal.forget()
    assert not list(tmp_path.iterdir())


def make(world: Maker, **options: Any) -> World:
    run = world(lambda task: DIFFERENT if task % 2 else EQUAL, refills=3, **options)
    run.config.train.steps = 6
    return run


def preempted(run: World, play: Callable[[], Any], *, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preempt `play` at the look after the one that began stream `at`; that look collects what is not slow."""
    group = run.group

    def group_with_notice(task: Task, stream: str) -> Group:
        if stream == at:
            monkeypatch.setattr(signals, "notice", signals.Notice(signals.PREEMPTION))
        return group(task, stream)

    run.group = group_with_notice  # type: ignore[method-assign]
    with pytest.raises(Preempted), run.manager:
        play()
    monkeypatch.setattr(signals, "notice", None)


def assert_same(batch: Batch, expected: Batch) -> None:
    for sample, other in zip(batch.samples, expected.samples, strict=True):
        assert np.array_equal(sample.token_ids, other.token_ids) and np.array_equal(sample.log_probs, other.log_probs)
        assert (sample.credits, sample.version) == (other.credits, other.version)
    counted = "count/from_journal"
    assert {name: value for name, value in batch.metrics.items() if name != counted} == expected.metrics


@pytest.mark.parametrize("at", ["train-4-2", "train-4.1-0", "train-4.2-1"])
def test_an_interrupted_step_resumes(world: Maker, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = make(world)
    expected = undisturbed.next(4)
    assert at in undisturbed.played
    before = make(world)
    before.slow = {"train-4-0"} if at == "train-4-2" else set()
    preempted(before, lambda: before.next(4), at=at, monkeypatch=monkeypatch)
    after = make(world, journal=True)
    batch = after.next(4)
    assert_same(batch, expected)
    assert batch.metrics["count/from_journal"] == len(before.played) - len(before.slow)
    assert after.played.keys() == undisturbed.played.keys() - before.played.keys() | before.slow
    assert after.written == undisturbed.written


def test_a_step_interrupted_in_its_update_is_collected_without_playing(world: Maker) -> None:
    before = make(world)
    expected = before.next(4)
    after = make(world, journal=True)
    assert_same(after.next(4), expected)
    assert not after.played


def test_sampling_ahead_resumes(world: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch of step 2 was collected but not trained; the checkpoint is from the beginning of the step."""
    before = make(world, max_staleness=1)
    for step in range(2):
        before.next(step)
    state = json.loads(json.dumps(before.manager.state()))
    before.slow = {"train-3-1"}
    expected = before.next(2)
    with pytest.raises(Preempted), before.manager:
        raise Preempted
    after = make(world, max_staleness=1, state=state, journal=True)
    after.slow = before.slow
    assert_same(after.next(2), expected)
    assert after.played.keys() == {"train-3-1"}


TURN = Turn((1, 2, 3), (10,), (-0.25,), (0,), Finish.ABORT, "")


def test_paused_turns_come_back_with_their_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of step 3, which version 3 sampled."""
    opened(tmp_path).pause(3, {"train-4-0": [(7, TURN)]})
    assert opened(tmp_path).paused(3) == {"train-4-0": [(7, TURN)]}
    assert opened(tmp_path).paused(2) is None
    assert opened(tmp_path, 0.1 + 1e-15, 0.2).paused(3) is None, "another version 3"
    monkeypatch.delattr(types, "Turn")
    assert opened(tmp_path).paused(3) is None, "another version of the package"


@pytest.mark.parametrize("resumed", [0, 1, 2])
def test_a_run_resumes_from_where_its_groups_paused(world: Maker, resumed: int) -> None:
    """It is killed in the update of step 1, while train-2-0 pauses; the checkpoint is from the beginning of a step."""
    options: dict[str, Any] = {"max_staleness": 1, "colocated": True}
    before = make(world, **options)
    states = []
    for step in range(2):
        states.append(json.loads(json.dumps(before.manager.state())))
        before.slow = {"train-2-0"} if step else set()
        before.turns = {"train-2-0": [(7, TURN)]} if step else {}
        before.next(step)
    states.append(json.loads(json.dumps(before.manager.state())))
    after = make(world, **options, state=states[resumed], journal=True)
    for step in range(resumed, 2):
        after.next(step)
    assert not after.played, "what pauses at the end of step 1 is not begun before step 2"
    after.next(2)
    assert after.resumed == {"train-2-0": [(7, TURN)]}
    regular = {name for name in after.played if name.startswith("train-2-")}
    assert regular == {"train-2-0"}


def test_a_group_that_finishes_while_others_pause_is_in_the_journal(
    world: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker has no turns of it any more, and its result is still on the way to rank 0."""
    before = make(world, max_staleness=1, colocated=True)
    before.slow, before.turns = {"train-1-0", "train-1-1"}, {"train-1-1": [(7, TURN)]}
    wait, state = before.ray.wait, before.manager.state()

    def arriving(pending: list[Any], num_returns: int, timeout: float) -> Any:
        if timeout and len(pending) == 1:
            before.slow.discard("train-1-0")
        return wait(pending, num_returns, timeout)

    monkeypatch.setattr(before.ray, "wait", arriving)
    before.next(0)
    after = make(world, max_staleness=1, colocated=True, state=state, journal=True)
    after.next(0)
    after.next(1)
    assert {stream for stream in after.played if stream.startswith("train-1-")} == {"train-1-1"}


@pytest.mark.seconds
def test_turns_of_other_weights_are_sampled_again(world: Maker) -> None:
    before = make(world, max_staleness=1, colocated=True)
    before.slow, before.turns = {"train-1-0"}, {"train-1-0": [(7, TURN)]}
    before.next(0)
    state = {**before.manager.state(), "weights": [(0, "0" * 64), (1, "1" * 64)]}
    for weights, resumed in (([*before.manager.state()["weights"]], before.turns), ([(0, "1" * 64), (1, "")], {})):
        after = make(world, max_staleness=1, colocated=True, state={**state, "weights": weights}, journal=True)
        after.next(1)
        assert after.resumed == resumed and "train-1-0" in after.played


def test_a_run_that_went_back_replays_groups_of_newer_weights(world: Maker) -> None:
    """The conversation began at step 0; the weights of step 1 arrived in the middle of it."""
    before = make(world, max_staleness=1)
    before.slow = {"train-1-0"}
    before.group = lambda task, stream: Group(  # type: ignore[method-assign]
        task, tuple(rollout(value, int(stream == "train-1-0")) for value in DIFFERENT)
    )
    before.next(0)
    before.slow.clear()
    before.next(1)
    after = make(world, max_staleness=1, journal=True)
    after.next(0)
    assert set(after.played) == {"train-1-0"}


def test_groups_are_played_again_if_their_weights_come_out_differently(world: Maker) -> None:
    """A run that goes back to an older checkpoint computes versions with the same numbers again."""
    before = make(world)
    for step in range(2):
        before.next(step)
    same, other = (make(world, journal=True) for _ in range(2))
    other.stats = {**other.stats, "grad_norm": 1.5000000000000002}
    for after in (same, other):
        for step in range(2):
            after.next(step)
    assert not same.played
    assert other.played == {name: task for name, task in before.played.items() if name.startswith("train-1")}


def test_groups_that_are_finished_when_a_run_stops_are_written(world: Maker) -> None:
    """They were not collected yet, since the ranks were training."""
    before = make(world, max_staleness=1)
    before.slow = {f"train-1-{number}" for number in range(PROMPTS)}
    before.next(0)
    before.slow.clear()
    with pytest.raises(Preempted), before.manager:
        raise Preempted
    after = make(world, max_staleness=1, state=before.manager.state(), journal=True)
    after.version = 1
    after.next(1)
    assert not {name for name in after.played if name.startswith("train-1-")}


def test_an_error_while_closing_does_not_hide_why_a_run_stops(
    world: Maker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error of writing finished groups is printed; the workers are stopped all the same."""
    run, ended = make(world, max_staleness=1), []
    run.slow = {"train-1-0"}
    run.next(0)
    run.slow.clear()

    def fail(*_: object) -> None:
        raise OSError("no space\nleft")

    monkeypatch.setattr(run.manager._rank_0_collector.lead.journal, "write", fail)
    monkeypatch.setattr(type(run.manager._rank_0_collector.lead.workers), "stop", lambda _: ended.append("workers"))
    with pytest.raises(Preempted), run.manager:
        raise Preempted
    assert ended == ["workers"]
    assert capsys.readouterr().err == "megatron-collab: failed to stop sampling: no space left\n"


@pytest.mark.parametrize("step", [0, 5])
def test_an_interrupted_evaluation_resumes(world: Maker, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = make(world)
    undisturbed.version = step
    undisturbed.manager.evaluate(step)
    before = make(world)
    before.version, before.slow = step, {"eval-before-1"}
    stop = lambda: before.manager.evaluate(step)  # noqa: E731
    preempted(before, stop, at="eval-before-3", monkeypatch=monkeypatch)
    after = make(world, journal=True)
    after.version = step
    after.manager.evaluate(step)
    assert set(after.played) == {"eval-before-1"}
    assert after.evaluated == undisturbed.evaluated


def test_a_finished_run_leaves_no_journal(world: Maker, tmp_path: Path) -> None:
    run = make(world)
    with run.manager:
        run.next(0)
        assert list((tmp_path / "journal").iterdir())
    assert not list((tmp_path / "journal").iterdir())


def test_a_checkpoint_removes_learned_steps_from_the_journal(world: Maker, tmp_path: Path) -> None:
    run = make(world, max_staleness=1, colocated=True)
    for step in range(3):
        run.next(step)
        run.manager.forget((step + 1, {"collector": run.manager.state()}))
    assert {file.name for file in (tmp_path / "journal").iterdir()} == {"step_3.groups", "step_2.paused"}
