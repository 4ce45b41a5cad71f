"""Sampling ahead of training: when groups begin, which are trained, what a restart continues.

Also how long a group may take, computed by hand from the settings.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from ray.exceptions import RayTaskError

from megatron_collab.config import Config
from megatron_collab.data.evaluation import EvaluationSet
from megatron_collab.launch.play_specs import play_spec
from megatron_collab.rollout import scheduler
from megatron_collab.rollout.journal import Journal, WeightDigests
from megatron_collab.rollout.scheduler import Flight, Slot, group_seconds
from megatron_collab.rollout.workers import Workers
from megatron_collab.runtime.process import Hung, RunStopped
from megatron_collab.types import Ending, Group, Message, Missing, Reward, Task
from tests.helpers import configured
from tests.ranks import run_ranks
from tests.rollout.simulated import DIFFERENT, EQUAL, PROMPTS, FakeRay, Method, Reference, World, rollout

STEPS = 5
Maker = Callable[..., World]


def make(world: Maker, ahead: int, **options: Any) -> World:
    run = world(lambda task: DIFFERENT, max_staleness=ahead, **options)
    run.config.train.steps = STEPS
    return run


def slots(names: Sequence[str]) -> list[Slot]:
    """The slots that streams are named after."""
    parsed = []
    for name in names:
        _, step, number = name.split("-")
        base, _, refill = step.partition(".")
        parsed.append(Slot(int(base), int(refill or 0), int(number)))
    return parsed


def step_streams(step: int) -> set[str]:
    return {Slot(step, 0, number).stream for number in range(PROMPTS)}


def tasks(run: World, step: int) -> list[int]:
    """The tasks of the regular groups of a step, in order."""
    return [run.played[Slot(step, 0, number).stream] for number in range(PROMPTS)]


def test_slots_are_named_and_ordered_as_they_are_played() -> None:
    order = [Slot(3, 0, 0), Slot(3, 0, 5), Slot(3, 1, 0), Slot(3, 2, 1), Slot(4, 0, 2), Slot(10, 0, 0)]
    assert order == sorted(order)
    assert [slot.stream for slot in order[1:3]] == ["train-3-5", "train-3.1-0"]
    assert slots([slot.stream for slot in order]) == order


@pytest.mark.parametrize("colocated", [False, True])
@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_group_is_trained_once_in_its_own_step(world: Maker, ahead: int, seed: int, colocated: bool) -> None:
    """So long conversations are trained as often as short ones: of the groups ahead, a third outlast a step."""
    run, drawn = make(world, ahead, colocated=colocated), random.Random(seed)
    trained, waited = list[int](), Counter[str]()
    for step in range(STEPS):
        later = [name for number in range(step + 1, STEPS) for name in step_streams(number)]
        run.slow = set(drawn.sample(later, len(later) // 3))
        batch = run.next(step)
        waited.update(run.slow & run.played.keys())
        assert run.trained(batch) == tasks(run, step)
        assert {sample.version for sample in batch.samples} == {max(0, step - ahead)}
        assert run.peak <= (ahead + 1) * PROMPTS
        trained += run.trained(batch)
    assert bool(waited) == bool(ahead)
    assert trained == [task for step in range(STEPS) for task in tasks(run, step)]
    assert len(run.played) == len(run.written) == STEPS * PROMPTS, "and nothing is left in flight"
    assert run.pauses == ["turns wait", "servers abort", "turns go on"] * (STEPS - 1) * (colocated and ahead > 0)


def test_an_outage_during_a_pause_aborts_no_turn_again(world: Maker) -> None:
    """The step's weight sync has brought the servers back; another one would abort what has just gone on."""
    run = make(world, 1, colocated=True)
    run.broken = {"train-1-0"}
    run.next(0)
    run.lose_servers()
    run.next(1)
    assert run.revived == 0
    assert run.pauses == ["turns wait", "servers abort", "turns go on", "turns wait", "servers abort"]
    assert run.calls["train-1-0"] == 2, "what failed in the outage is played again"


@pytest.mark.processes
def test_a_group_that_raises_does_not_lose_the_others(world: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several groups finish at the same look, in any order."""
    run = make(world, 0)
    get = run.ray.get
    broken = {"train-0-2"}

    def failing(references: Any) -> Any:
        answer = get(references)
        if isinstance(answer, Group) and run.played[next(iter(broken))] == int(answer.task.id):
            raise ValueError("no such task")
        return answer

    monkeypatch.setattr(run.ray, "get", failing)
    with pytest.raises(ValueError, match="no such task"):
        run.next(0)
    after = make(world, 0, journal=True)
    after.next(0)
    assert after.played.keys() == broken


def test_the_age_of_samples_is_recorded(world: Maker) -> None:
    run = make(world, 1)
    first, second = run.next(0), run.next(1)
    assert (first.metrics["staleness/mean"], first.metrics["staleness/max"]) == (0.0, 0.0)
    assert (second.metrics["staleness/mean"], second.metrics["staleness/max"]) == (1.0, 1.0)


def test_groups_that_teach_nothing_are_replaced_up_to_the_limit(world: Maker) -> None:
    run = make(world, 1, refills=2)
    run.rewards = lambda task: DIFFERENT if task % 2 else EQUAL
    for step in range(STEPS):
        batch = run.next(step)
        kept, dropped, refills = (batch.metrics[f"dynamic/{name}"] for name in ("kept", "dropped", "refills"))
        assert len(batch.samples) == 3 * kept and refills <= 2
        assert kept == PROMPTS or refills == 2
        assert run.peak <= 2 * PROMPTS
        assert dropped > 0
    assert len(run.played) == len(run.written)


def resumed(world: Maker, run: World, step: int, ahead: int) -> World:
    state = json.loads(json.dumps(run.manager.state()))
    restarted = make(world, ahead, state=state)
    restarted.version = step
    return restarted


def test_a_run_restarted_at_every_step_trains_every_group_once(world: Maker) -> None:
    """Each time with another staleness."""
    trained: list[int] = []
    run, played = make(world, 2), dict[str, int]()
    for step, staleness in enumerate([2, 0, 1, 0, 2]):
        run = resumed(world, run, step, staleness)
        trained += run.trained(run.next(step))
        played |= run.played
        assert list(run.played)[:PROMPTS] == [Slot(step, 0, number).stream for number in range(PROMPTS)]
        assert run.peak == (min(step + staleness + 1, STEPS) - step) * PROMPTS
    run.played = played
    assert trained == [task for step in range(STEPS) for task in tasks(run, step)]


def test_a_batch_is_in_the_order_of_the_slots(world: Maker) -> None:
    """And not in the order in which the groups finish."""
    run = make(world, 1, refills=1)

    def group(task: Task, stream: str) -> Group:
        values = EQUAL if stream in ("train-0-0", "train-0-3") else DIFFERENT
        return Group(task, tuple(rollout(value, run.version) for value in values))

    run.group = group  # type: ignore[method-assign]
    batch = run.next(0)
    names = ["train-0-1", "train-0-2", "train-0-4", "train-0-5", "train-0.1-0", "train-0.1-1"]
    assert run.trained(batch) == [run.played[name] for name in names]


def test_a_failed_step_keeps_the_state_of_its_beginning(world: Maker) -> None:
    run = make(world, 1)
    run.next(0)
    state = json.dumps(run.manager.state())
    run.rewards = lambda task: [Missing("down")] * 3
    run.next(1)  # groups begun before have their rewards
    between = json.dumps(run.manager.state())
    assert state != between
    with pytest.raises(RunStopped, match="have no reward"):
        run.next(2)
    assert json.dumps(run.manager.state()) == between


def test_after_an_outage_the_finished_groups_stay_and_the_broken_are_played_again(world: Maker) -> None:
    run = make(world, 0)
    run.slow = {"train-0-2", "train-0-4", "train-0-5"}
    run.outage, run.broken = 2, {"train-0-2", "train-0-5"}  # the others are collected
    run.on_revive = run.slow.clear
    batch = run.next(0)
    assert run.revived == 1
    assert len(batch.samples) == 3 * PROMPTS
    assert run.calls == {name: 1 + (name in run.broken) for name in step_streams(0)}
    assert not [future for group in run.written for r in group.rollouts for future in r.futures
                if future.conversation.ending is Ending.ERROR]  # fmt: skip


@pytest.mark.parametrize("evaluated", [False, True])
def test_groups_that_lost_their_scores_with_a_reward_model_are_played_again_once(world: Maker, evaluated: bool) -> None:
    """The run waits for the reward model's servers, and does not sync the policy's weights."""
    run = world(lambda task: DIFFERENT)
    name = "eval-before-1" if evaluated else "train-0-2"
    run.scoring_outage, run.unscored = 1, {name}
    if evaluated:
        run.manager.evaluate(0)
    else:
        run.next(0)
    assert run.revived == 0
    assert {stream for stream, calls in run.calls.items() if calls == 2} == {name}
    values = [rollout.reward.value for group in run.evaluated or run.written for rollout in group.rollouts]
    assert set(values) == {0.0, 1.0}


def test_missing_scores_without_an_outage_are_not_played_again(world: Maker) -> None:
    run = world(lambda task: DIFFERENT)
    run.unscored = {"train-0-2"}
    run.next(0)
    assert set(run.calls.values()) == {1}


def test_errors_without_an_outage_are_not_played_again(world: Maker) -> None:
    run = make(world, 0)
    run.broken = {"train-0-0"}
    run.next(0)
    assert len(run.played) == PROMPTS and run.revived == 0
    assert run.written[0].rollouts[0].start.ending is Ending.ERROR


def test_an_outage_during_training_counts(world: Maker) -> None:
    """Servers were lost and came back while the ranks trained: the pool reports it at the next step."""
    run = make(world, 1)
    run.broken = step_streams(1)
    run.next(0)
    run.outage = run.looks + 1
    batch = run.next(1)
    assert run.revived == 1 and len(batch.samples) == 3 * PROMPTS
    assert run.calls == {name: 1 + (name in run.broken) for name in step_streams(0) | step_streams(1) | step_streams(2)}


def test_an_outage_with_nothing_in_flight_costs_nothing(world: Maker) -> None:
    """Servers were lost after one step and came back before the next."""
    run = make(world, 0)
    run.next(0)
    run.lose_servers()
    run.next(1)
    assert run.revived == 0


def test_an_evaluation_survives_an_outage_too(world: Maker) -> None:
    run = make(world, 1)
    run.outage, run.broken = 1, {"eval-before-1"}
    run.manager.evaluate(0)
    assert run.revived == 1
    assert [int(group.task.id) for group in run.evaluated] == [0, 1, 2, 3]
    assert all(group.rollouts[0].start.ending is Ending.USER_DONE for group in run.evaluated)


@pytest.mark.processes
def test_all_ranks_revive_the_servers_and_have_the_batch(tmp_path: Path) -> None:
    results = run_ranks(lose_the_servers_once, 2, tmp_path)
    assert [result.pop("asked") for result in results] == [2 * PROMPTS + 1, 0]
    assert results[0] == results[1]
    assert results[0]["revived"] == 1 and len(results[0]["trained"]) == PROMPTS


def lose_the_servers_once(folder: Path) -> dict[str, Any]:
    """As one of two ranks."""
    dist.init_process_group("gloo")
    world = World(folder, lambda task: DIFFERENT, max_staleness=1)
    world.outage, world.broken = 1, {"train-0-3"}
    batch = world.next(0)
    dist.destroy_process_group()
    return {"revived": world.revived, "trained": world.trained(batch), "asked": sum(world.calls.values())}


def settings(**more: object) -> Config:
    config = configured(
        Config(),
        {
            "train.rollouts_per_prompt": 4,
            "rollout.futures": 3,
            "rollout.deadline": 100.0,
            "reward.timeout": 10.0,
            "reward.concurrency": 12,
            "reward.weights": {"token_amount": 1.0},
        },
    )
    return configured(config, {name.replace("__", "."): value for name, value in more.items()})


def bound(config: Config, groups: int) -> float:
    return group_seconds(play_spec(config), groups)


def test_the_bound_is_twice_the_time_of_a_turn_its_futures_and_their_scores() -> None:
    """Plus 10 s for users to finish after their deadline."""
    assert bound(settings(), 1) == 2 * (100 + 110 + 10 + 20)
    assert bound(settings(), 2) == 2 * (100 + 110 + 20 + 20), "half of the 24 scores wait for a place"
    assert bound(settings(reward__workers=2), 2) == 2 * (100 + 110 + 10 + 20)
    assert bound(settings(rollout__futures=0), 6) == 2 * (100 + 110 + 20 + 20), "24 whole conversations"


def test_tools_have_time_to_close_after_the_trained_turn_and_after_its_futures() -> None:
    tools = settings(
        rollout__tools=["calculator"], rollout__mcp_servers={"m": {"command": "serve"}}, rollout__tool_timeout=300.0
    )
    assert bound(tools, 1) == 2 * (100 + 110 + 2 * 2 * 300 + 10 + 20)


def test_judges_have_their_deadline_and_wait_for_the_limiter() -> None:
    judged = settings(reward__weights={"accuracy": 1.0}, reward__metrics={"accuracy": {"judge": True}})
    judged.reward.judge.deadline = 50.0
    assert bound(judged, 1) == 2 * (100 + 110 + 50 + 20)
    judged.llm.max_concurrent = 4
    assert bound(judged, 1) == 2 * (100 + 110 + 3 * 50 + 20)
    judged.llm.requests_per_minute = 60
    judged.reward.judge.attempts, judged.user.attempts, judged.rollout.max_user_turns = 6, 3, 2
    assert bound(judged, 1) == 2 * (100 + 110 + 150 + 20 + 12 * (6 + 3 * 3)), "a call a second"


def test_a_judge_of_turns_is_asked_about_one_after_another() -> None:
    judged = settings(
        reward__weights={"generative": 1.0, "token_amount": -0.1},
        reward__metrics={"generative": {"prompt": "{conversation}", "turns": "reply"}},
        rollout__max_user_turns=4,
        rollout__max_assistant_turns=4,
    )
    judged.reward.judge.deadline = 50.0
    assert bound(judged, 1) == 2 * (100 + 110 + (48 / 12 + 3) * 50 + 20), "12 conversations with 4 turns, 12 at once"
    judged.llm.requests_per_minute, judged.reward.judge.attempts, judged.user.attempts = 60, 2, 1
    assert bound(judged, 1) == 2 * (100 + 110 + (48 / 12 + 3) * 50 + 20 + 48 * 2 + 12 * 5), "a call a second"


def test_the_bound_counts_tokens_per_minute() -> None:
    """12 conversations with two judgments and two user messages each; the user with the largest limits counts."""
    judged = {"interactivity": 1.0, "accuracy": 1.0}
    slow = settings(reward__weights=judged, reward__metrics={"accuracy": {"judge": True}})
    slow.reward.judge.deadline, slow.reward.judge.attempts, slow.reward.judge.max_tokens = 50.0, 2, 100
    slow.user.attempts, slow.user.max_tokens, slow.rollout.max_user_turns = 3, 50, 1
    slow.users = {"patient": {"attempts": 5, "max_tokens": 20}, "verbose": {"attempts": 1, "max_tokens": 80}}
    slow.rollout.context_length, slow.llm.tokens_per_minute = 1000, 6000
    judgments, messages = 24 * 2, 12 * 2 * 5
    tokens = judgments * 100 + messages * 80 + (judgments + messages) * 1000
    assert bound(slow, 1) == pytest.approx(2 * (100 + 110 + 2 * 50 + 20 + 60 * tokens / 6000))


def test_results_of_actors_come_in_order_and_a_late_call_is_named() -> None:
    workers = Workers([], [], None, ray=FakeRay())
    assert workers.answers({"one": Reference(1), "two": Reference(2)}, 60.0) == [1, 2]
    calls = {"its counters": Reference(1), "its spending": Reference(2, lambda: False)}
    with pytest.raises(Hung, match=r"^rank 0 has waited 60 s \(half of launch.timeout\) for its spending$"):
        workers.answers(calls, 60.0)
    assert workers.available_results(list(calls.values()), 60.0) == [1]
    assert workers.available_results([], 60.0) == []


def test_worker_error_unwraps_only_errors_that_stop_a_run() -> None:
    stop, fault = RunStopped("enough"), ValueError("no such task")

    def through_two_workers(cause: Exception) -> Exception:
        inner = RayTaskError("score", "a trace", cause, "worker", 1, "127.0.0.1")
        return RayTaskError("play", "a trace", inner, "worker", 1, "127.0.0.1")

    assert scheduler.worker_error(through_two_workers(stop)) is stop
    outer = through_two_workers(fault)
    assert scheduler.worker_error(outer) is outer and scheduler.worker_error(fault) is fault


class Simulated:
    """Flights of numbered groups, of which those in `finished` are finished, at the time `clock` in seconds.

    `groups`: by number, groups or errors that replace the default, which has a reward. `gone`: all servers are lost.
    `calls`: how often a number was played; `servers`: on which of the servers `in_use`. `stack_folders`: folders
    in which stacks were requested. `shown`: steps of the progress bar, 0 when it is closed. `waits`: number and timeout
    of each wait.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.folder, self.gone = 1000.0, folder, False
        self.finished: set[int] = set()
        self.groups: dict[int, Group | Exception] = {}
        self.calls: Counter[int] = Counter()
        self.servers: dict[int, int] = {}
        self.in_use = [0, 1, 2]
        self.stack_folders: list[Path] = []
        self.shown: list[int] = []
        self.waits: list[tuple[int, float]] = []
        self.digests = WeightDigests(8)
        self.digests.begin(0)
        monkeypatch.setattr(scheduler, "time", SimpleNamespace(monotonic=lambda: self.clock))
        monkeypatch.setattr(scheduler.stacks, "ask", self.stack_folders.append)
        bar = SimpleNamespace(update=self.shown.append, close=lambda: self.shown.append(0))
        monkeypatch.setattr(scheduler, "progress", lambda title, count: bar)
        self.ray = FakeRay()
        wait = self.ray.wait

        def watched(pending: list[Reference], num_returns: int, timeout: float) -> Any:
            self.waits.append((num_returns, timeout))
            return wait(pending, num_returns, timeout)

        monkeypatch.setattr(self.ray, "wait", watched)

    def flight(self, **more: Any) -> Flight:
        config = settings(run__dir=str(self.folder))
        worker = SimpleNamespace(play=Method(self.play))
        return Flight(
            play_spec(config),
            Workers([worker], [], None, self.in_use, self.ray),
            Journal(self.folder / "journal", self.digests),
            lambda: self.gone,
            **more,
        )

    def play(self, task: Task, stream: str, eval_set: object, server: int, turns: object) -> Reference:
        number = int(task.id)
        self.calls[number] += 1
        self.servers[number] = server
        group = self.groups.get(number) or Group(task, (rollout(1.0, 0),))
        return Reference(group, lambda: number in self.finished)

    def begin(self, flight: Flight, *numbers: int, eval_set: EvaluationSet | None = None) -> None:
        for number in numbers:
            task = Task(str(number), (Message("user", "hi"),), "g", "", "u")
            flight.begin(scheduler.GroupRequest(Slot(0, 0, number), f"train-0-{number}", task, eval_set))


@pytest.fixture
def simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Simulated:
    return Simulated(tmp_path, monkeypatch)


# Longest time of so many groups under `settings()`.
ONE_GROUP_SECONDS, TWO_GROUP_SECONDS = 2 * (100 + 110 + 10 + 20), 2 * (100 + 110 + 20 + 20)


def test_groups_are_hung_if_none_finishes_in_time(simulated: Simulated) -> None:
    """The time counts from when the last group began, or when the wait began."""
    flight = simulated.flight()
    simulated.begin(flight, 0)
    simulated.clock += 300
    simulated.begin(flight, 1)
    simulated.clock += 200
    flight.wait_for(2, "training")
    simulated.clock += TWO_GROUP_SECONDS
    assert flight.poll() == "playing" and not simulated.stack_folders
    simulated.clock += 1
    with pytest.raises(Hung) as error:
        flight.poll()
    assert str(error.value).startswith("rank 0 has waited 500 s for any of 2 groups, longer than allowed by")
    assert f": train-0-0, train-0-1 on conversation-0; stacks are in {simulated.folder}/stacks" in str(error.value)
    assert simulated.stack_folders == [simulated.folder / "stacks"]


def test_a_server_that_is_gone_gets_no_group(simulated: Simulated) -> None:
    flight = simulated.flight()
    simulated.begin(flight, 0, 1, 2)
    simulated.in_use[:] = [0, 2]
    simulated.begin(flight, 3, 4, 5, 6)
    simulated.in_use[:] = [0, 1, 2]
    simulated.begin(flight, 7)
    assert [simulated.servers[number] for number in range(8)] == [0, 1, 2, 0, 2, 0, 2, 1]


def test_groups_are_dealt_over_the_servers_and_a_slow_server_gets_fewer(simulated: Simulated) -> None:
    flight = simulated.flight()
    simulated.begin(flight, *range(6))
    assert [simulated.servers[number] for number in range(6)] == [0, 1, 2, 0, 1, 2]
    simulated.finished = {1, 2, 4, 5}  # server 0 has answered nothing
    flight.collect(0.0)
    simulated.begin(flight, *range(6, 11))
    assert [simulated.servers[number] for number in range(6, 11)] == [1, 2, 1, 2, 0]


def test_servers_without_a_group_take_turns(simulated: Simulated) -> None:
    flight = simulated.flight()
    for number in range(6):
        simulated.begin(flight, number)
        simulated.finished = {number}
        flight.collect(0.0)
    assert [simulated.servers[number] for number in range(6)] == [0, 1, 2, 0, 1, 2]


def test_a_new_group_has_the_whole_time(simulated: Simulated) -> None:
    flight = simulated.flight()
    flight.wait_for(1, "training")
    simulated.clock += 300
    simulated.begin(flight, 0)
    simulated.clock += ONE_GROUP_SECONDS
    assert flight.poll() == "playing"


def test_a_finished_group_gives_the_others_the_whole_time_again(simulated: Simulated) -> None:
    flight = simulated.flight()
    simulated.begin(flight, 0, 1)
    flight.wait_for(2, "training")
    simulated.finished = {0}
    simulated.clock += TWO_GROUP_SECONDS + 100
    assert flight.poll() == "playing"
    simulated.clock += ONE_GROUP_SECONDS
    assert flight.poll() == "playing"
    simulated.clock += 1
    with pytest.raises(Hung, match=r"^rank 0 has waited 480 s for any of 1 groups.*: train-0-1 on"):
        flight.poll()


def test_the_wait_for_servers_does_not_count(simulated: Simulated) -> None:
    """Neither for the awaited groups nor for those that stay in flight in the background."""
    training = simulated.flight()
    evaluation = simulated.flight(background=training)
    simulated.begin(training, 0)
    simulated.begin(evaluation, 1, 2)
    evaluation.wait_for(2, "evaluation")
    simulated.clock += 400
    simulated.gone = True
    assert evaluation.poll() == "servers lost"
    simulated.clock += 10_000
    simulated.gone = False
    assert evaluation.poll() == "playing"
    simulated.clock += TWO_GROUP_SECONDS + ONE_GROUP_SECONDS
    assert evaluation.poll() == "playing", "they share their workers"
    simulated.clock += 1
    with pytest.raises(Hung, match="980 s for any of 2 groups"):
        evaluation.poll()
    training.wait_for(1, "training")
    simulated.finished = {0}
    assert training.poll() == "finished" and simulated.calls[0] == 1


@pytest.mark.parametrize("background", [False, True])
def test_groups_that_failed_in_an_outage_are_played_again(simulated: Simulated, background: bool) -> None:
    other = simulated.flight()
    flight = simulated.flight(background=other)
    lost = other if background else flight
    simulated.groups[0] = Group(Task("0", (), "g", "", "u"), (rollout(1.0, 0), rollout(1.0, 0, Ending.ERROR)))
    simulated.begin(lost, 0)
    flight.wait_for(1, "training")
    simulated.gone = True
    assert flight.poll() == "servers lost"
    simulated.gone, simulated.finished = False, {0}
    lost.wait_for(1, "training")
    assert lost.poll() == "playing" and simulated.calls[0] == 2
    assert lost.poll() == "finished", "the second failure is none of an outage"
    assert simulated.calls[0] == 2 and simulated.shown == [1, 0]


def test_groups_that_lack_a_score_after_an_outage_are_played_again_only_once(simulated: Simulated) -> None:
    flight = simulated.flight()
    simulated.groups[0] = Group(Task("0", (), "g", "", "u"), (rollout(Missing("down"), 0),))
    simulated.begin(flight, 0)
    flight.wait_for(1, "training")
    simulated.gone = True
    assert flight.poll() == "servers lost"
    simulated.gone, simulated.finished = False, {0}
    assert flight.poll() == "playing" and simulated.calls[0] == 2
    simulated.gone = True
    assert flight.poll() == "servers lost"
    simulated.gone = False
    assert flight.poll() == "finished" and simulated.calls[0] == 2


def test_the_first_groups_in_the_order_of_the_run_are_awaited(simulated: Simulated) -> None:
    """Whichever finish first."""
    flight = simulated.flight()
    simulated.begin(flight, 4, 3, 2, 1, 0)
    flight.wait_for(3, "training")
    simulated.finished = {1, 2, 3, 4}
    assert flight.poll() == "playing" and flight.slots == [Slot(0, 0, number) for number in (0, 3, 4)]
    simulated.finished = {0, 1, 2, 3, 4}
    assert flight.poll() == "finished" and len(flight) == 2
    assert list(flight.take()) == [Slot(0, 0, number) for number in (0, 1, 2)]
    assert simulated.shown == [1, 1, 1, 0], "the bar grows by each and is closed"


def test_poll_waits_for_a_group_unless_one_is_finished(simulated: Simulated) -> None:
    flight = simulated.flight()
    simulated.begin(flight, 0, 1, 2)
    flight.wait_for(1, "training")
    flight.poll()
    assert simulated.waits == [(1, scheduler.POLL_SECONDS), (3, 0)]
    simulated.finished, simulated.waits = {0, 1}, []
    assert flight.poll() == "finished"
    flight.wait_for(2, "training")
    simulated.waits = []
    assert flight.poll() == "playing" and simulated.waits == [(1, 0.0), (1, 0)], "one was left over"


def test_a_group_of_the_journal_is_not_played(simulated: Simulated) -> None:
    flight = simulated.flight()
    simulated.begin(flight, 0)
    simulated.finished = {0}
    flight.collect(0.0)
    restarted = simulated.flight()
    simulated.begin(restarted, 0, 1)
    assert restarted.from_journal == 1 and simulated.calls == {0: 1, 1: 1}


def test_the_error_of_a_group_is_raised_when_the_others_are_in_the_journal(simulated: Simulated) -> None:
    flight = simulated.flight()
    simulated.groups[0] = ValueError("no such task")
    simulated.begin(flight, 0, 1, 2)
    simulated.finished = {0, 1}
    with pytest.raises(ValueError, match="no such task"):
        flight.collect(0.0)
    assert flight.slots == [Slot(0, 0, 1), Slot(0, 0, 2)]
    restarted = simulated.flight()
    simulated.begin(restarted, 0, 1, 2)
    assert restarted.from_journal == 1 and simulated.calls == {0: 2, 1: 1, 2: 2}


@pytest.mark.parametrize("eval_set", [None, EvaluationSet("tasks.jsonl")], ids=["training", "evaluation"])
def test_a_rewarded_group_that_lacks_a_score_is_played_again_only_by_an_evaluation(
    simulated: Simulated, eval_set: EvaluationSet | None
) -> None:
    """After a restart."""
    partly = replace(rollout(Missing("down"), 0), reward=Reward(1.0))
    simulated.groups[0] = Group(Task("0", (Message("user", "hi"),), "g", "", "u"), (partly,))
    flight = simulated.flight()
    simulated.begin(flight, 0, 1, eval_set=eval_set)
    simulated.finished = {0, 1}
    flight.collect(0.0)
    simulated.begin(simulated.flight(), 0, 1, eval_set=eval_set)
    assert simulated.calls == {0: 2 if eval_set else 1, 1: 1}


def test_a_follow_up_is_played_in_place_of_the_finished_group(simulated: Simulated) -> None:
    """Only a group without a follow-up counts as collected."""
    following = scheduler.GroupRequest(Slot(0, 0, 7), "train-0-7", Task("7", (Message("user", "hi"),), "g", "", "u"))
    flight = simulated.flight(follow_up=lambda request, group: following if request.slot.number == 0 else None)
    simulated.begin(flight, 0)
    flight.wait_for(1, "training")
    simulated.finished = {0}
    assert flight.poll() == "playing" and flight.slots == [Slot(0, 0, 7)] and not flight.take()
    simulated.finished = {0, 7}
    assert flight.poll() == "finished" and list(flight.take()) == [Slot(0, 0, 7)]
    assert simulated.calls == {0: 1, 7: 1} and simulated.shown == [1, 0]
