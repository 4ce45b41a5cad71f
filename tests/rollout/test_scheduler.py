"""Sampling ahead of training: what is begun when, what is taken, what is too old, what goes on after a restart; and
how long a group may take, worked out by hand from the settings."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from ray.exceptions import RayTaskError

from megatron_collab.config import Config
from megatron_collab.rollout import scheduler as ahead
from megatron_collab.rollout.journal import Journal, WeightDigests
from megatron_collab.rollout.scheduler import Flight, Slot, group_seconds, window
from megatron_collab.runtime.process import Hung, RunStopped
from megatron_collab.types import Ending, Group, Message, Missing, Task
from tests.helpers import configured
from tests.ranks import run_ranks
from tests.rollout.simulated import DIFFERENT, EQUAL, PROMPTS, FakeRay, Method, Reference, World, rollout

STEPS = 5
Maker = Callable[..., World]


def make(world: Maker, ahead: int, **options: Any) -> World:
    made = world(lambda task: DIFFERENT, max_staleness=ahead, **options)
    made.config.train.steps = STEPS
    return made


def slots(names: Sequence[str]) -> list[Slot]:
    """What streams are called after."""
    found = []
    for name in names:
        _, step, number = name.split("-")
        own, _, refill = step.partition(".")
        found.append(Slot(int(own), int(refill or 0), int(number)))
    return found


def own(step: int) -> set[str]:
    return {Slot(step, 0, number).stream for number in range(PROMPTS)}


def outstanding(made: World) -> set[str]:
    return {Slot(*slot).stream for slot in made.manager.state()["in_flight"]}


def test_slots_are_named_and_ordered_as_they_are_played() -> None:
    order = [Slot(3, 0, 0), Slot(3, 0, 5), Slot(3, 1, 0), Slot(3, 2, 1), Slot(4, 0, 2), Slot(10, 0, 0)]
    assert order == sorted(order)
    assert [slot.stream for slot in order[1:3]] == ["train-3-5", "train-3.1-0"]
    assert slots([slot.stream for slot in order]) == order
    assert Slot(3, 0, 4).after(6) == Slot(3, 0, 5) and Slot(3, 0, 5).after(6) == Slot(4, 0, 0)


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("seed", [0, 1])
def test_no_group_is_begun_too_early_or_trained_too_late(world: Maker, ahead: int, seed: int) -> None:
    """Whichever groups are finished first."""
    made, drawn = make(world, ahead), random.Random(seed)
    made.rewards = lambda task: DIFFERENT
    trained: list[int] = []
    for step in range(STEPS):
        begun = [name for number in range(step, STEPS) for name in own(number)]
        made.slow = set(drawn.sample(begun, len(begun) // 3)) if ahead and step < STEPS - 1 else set()
        batch = made.next(step)
        assert len(made.played) - len(made.written) == window(step, STEPS, PROMPTS, ahead) - PROMPTS
        assert all(step - ahead <= sample.version <= step for sample in batch.samples)
        assert len(batch.samples) == 3 * PROMPTS
        trained += made.trained(batch)
        assert made.peak <= (ahead + 1) * PROMPTS
    assert Counter(trained) <= Counter(made.played.values())
    regular = {name for name in made.played if "." not in name}
    assert regular == {name for step in range(STEPS) for name in own(step)}
    for slot, version in zip(slots(list(made.begun)), made.begun.values(), strict=True):
        assert version == (slot.step if slot.refill else max(0, slot.step - ahead))
    assert len(made.played) == len(made.written)  # nothing is left in flight


@pytest.mark.processes
def test_a_group_that_could_not_be_played_costs_no_other(world: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found at one look, wherever it stands among them."""
    made, get = make(world, 0), ahead.ray.get
    broken = {"train-0-2"}

    def failing(asked: Any) -> Any:
        answer = get(asked)
        if isinstance(answer, Group) and made.played[next(iter(broken))] == int(answer.task.id):
            raise ValueError("no such task")
        return answer

    monkeypatch.setattr(ahead.ray, "get", failing)
    with pytest.raises(ValueError, match="no such task"):
        made.next(0)
    monkeypatch.undo()
    monkeypatch.setattr(ahead, "ray", FakeRay())
    after = make(world, 0, journal=True)
    after.next(0)
    assert after.played.keys() == broken


def test_a_slow_group_is_trained_a_step_later(world: Maker) -> None:
    made = make(world, 1)
    made.slow = {"train-0-2"}
    first = made.trained(made.next(0))
    late = made.played["train-0-2"]
    assert set(made.played) == own(0) | own(1)
    assert len(first) == PROMPTS and late not in first
    assert outstanding(made) >= {"train-0-2"} and len(outstanding(made)) == PROMPTS
    made.slow = set()
    second = made.next(1)
    assert made.trained(second)[0] == late
    assert [sample.version for sample in second.samples] == [0] * 3 * PROMPTS
    assert (second.metrics["staleness/mean"], second.metrics["staleness/max"]) == (1.0, 1.0)
    assert second.metrics["staleness/dropped"] == second.metrics["staleness/groups_dropped"] == 0.0


def test_what_is_too_old_is_counted_and_replaced(world: Maker) -> None:
    made = make(world, 1)
    late = ["train-0-1", "train-0-3"]
    made.slow = set(late)
    made.next(0)
    made.next(1)
    made.slow = set()
    batch = made.next(2)
    assert not set(map(made.played.get, late)) & set(made.trained(batch))
    assert len(batch.samples) == 3 * PROMPTS and all(sample.version >= 1 for sample in batch.samples)
    assert {name for name in made.played if "." in name} == {"train-2.1-0", "train-2.1-1"}
    found = {name: batch.metrics[f"staleness/{name}"] for name in ("dropped", "groups_dropped", "groups_lacking")}
    assert found == {"dropped": 6.0, "groups_dropped": 2.0, "groups_lacking": 0.0}
    assert [int(group.task.id) for group in made.written if int(group.task.id) in map(made.played.get, late)]


@pytest.mark.parametrize(("advantage", "old", "trained"), [("grpo", 1, 2), ("grpo", 2, 0), ("reinforce++", 2, 1)])
def test_a_group_goes_on_without_its_old_samples_where_enough_are_left(
    world: Maker, advantage: str, old: int, trained: int
) -> None:
    """Of three samples of every group of a step, `old` are of version 1, which step 3 may not train."""
    made = make(world, 1)
    made.config.algo.advantage = advantage

    def group(task: Task, stream: str) -> Group:
        versions = [made.version] * 3
        if stream in own(3):
            versions[:old] = [1] * old
        return Group(task, tuple(rollout(value, at) for value, at in zip(DIFFERENT, versions, strict=True)))

    made.group = group  # type: ignore[method-assign]
    for step in range(3):
        made.next(step)
    batch = made.next(3)
    replaced = 0 if trained else PROMPTS
    assert len(batch.samples) == (3 if replaced else trained) * PROMPTS
    assert batch.metrics["staleness/dropped"] == old * PROMPTS + (replaced and (3 - old) * PROMPTS)
    assert batch.metrics["staleness/groups_dropped"] == replaced


def test_servers_that_never_get_younger_are_not_asked_for_ever(world: Maker) -> None:
    made = make(world, 1)
    stuck = lambda task, stream: Group(task, tuple(rollout(value, 0) for value in DIFFERENT))  # noqa: E731
    made.group = stuck
    for step in range(2):
        made.next(step)
    with pytest.raises(RunStopped, match=r"^step 2: no group has enough rewards of version 1 or newer"):
        made.next(2)


def test_groups_that_teach_nothing_are_replaced_that_often(world: Maker) -> None:
    made = make(world, 1, refills=2)
    made.rewards = lambda task: DIFFERENT if task % 2 else EQUAL
    for step in range(STEPS):
        batch = made.next(step)
        kept, dropped, refills = (batch.metrics[f"dynamic/{name}"] for name in ("kept", "dropped", "refills"))
        assert len(batch.samples) == 3 * kept and refills <= 2
        assert kept == PROMPTS or refills == 2
        assert made.peak <= 2 * PROMPTS
        assert dropped > 0
    assert len(made.played) == len(made.written)


@pytest.mark.parametrize("published", [True, False])
def test_samples_of_unpublished_weights_are_not_trained(world: Maker, published: bool) -> None:
    """Also without staleness; where there are none, nothing is said of it."""
    made = make(world, 0)

    def group(task: Task, stream: str) -> Group:
        versions = [0, 0, 0 if published or stream != "train-0-2" else -1]
        return Group(task, tuple(rollout(value, at) for value, at in zip(DIFFERENT, versions, strict=True)))

    made.group = group  # type: ignore[method-assign]
    batch = made.next(0)
    assert len(batch.samples) == 3 * PROMPTS - (not published)
    assert batch.metrics.get("staleness/dropped") == (None if published else 1.0)


def resumed(world: Maker, made: World, step: int, ahead: int) -> World:
    state = json.loads(json.dumps(made.manager.state()))
    again = make(world, ahead, state=state)
    again.version = step
    return again


@pytest.mark.parametrize("then", [0, 1, 2])
def test_a_restart_plays_what_was_in_flight_first_and_trains_nothing_twice(world: Maker, then: int) -> None:
    """Also where it may run further ahead than before, or not at all."""
    before = make(world, 1)
    before.slow = {"train-0-2", "train-1-3"}
    batches = [before.next(step) for step in range(2)]
    left = outstanding(before)
    assert before.slow < left and len(left) == PROMPTS
    after = resumed(world, before, 2, then)
    batches += [after.next(2)]
    assert list(after.played)[:PROMPTS] == [slot.stream for slot in sorted(slots(list(left)))]
    batches += [after.next(step) for step in range(3, STEPS)]
    trained = [name for made in (before, after) for name in made.played if made is after or name not in left]
    assert sorted(trained) == sorted(name for step in range(STEPS) for name in own(step))
    assert sum(len(batch.samples) for batch in batches) == 3 * PROMPTS * STEPS
    assert after.peak == (then + 1) * PROMPTS


def test_a_run_that_starts_again_at_every_step_trains_all_once(world: Maker) -> None:
    """Each time with another staleness: what cannot be begun yet stays in the state."""
    trained: list[str] = []
    made = make(world, 2)
    for step, staleness in enumerate([2, 0, 1, 0, 2]):
        made = resumed(world, made, step, staleness)
        made.next(step)
        trained += [name for name in made.played if name not in outstanding(made)]
        assert made.peak == window(step, STEPS, PROMPTS, staleness)
    assert sorted(trained) == sorted(name for step in range(STEPS) for name in own(step))


def test_a_batch_is_in_the_order_of_the_slots(world: Maker) -> None:
    """Not in that in which the groups were finished."""
    made = make(world, 1, refills=1)
    made.slow = own(0)

    def group(task: Task, stream: str) -> Group:
        values = EQUAL if stream in ("train-1-0", "train-1-3") else DIFFERENT
        return Group(task, tuple(rollout(value, made.version) for value in values))

    made.group = group  # type: ignore[method-assign]
    batch = made.next(0)
    names = ["train-0.1-0", "train-0.1-1", "train-1-1", "train-1-2", "train-1-4", "train-1-5"]
    assert made.trained(batch) == [made.played[name] for name in names]


def test_a_step_that_fails_is_done_again_from_its_beginning(world: Maker) -> None:
    made = make(world, 1)
    made.next(0)
    state = json.dumps(made.manager.state())
    made.rewards = lambda task: [Missing("down")] * 3
    made.next(1)  # what was begun before has its rewards
    between = json.dumps(made.manager.state())
    assert state != between
    with pytest.raises(RunStopped, match="have no reward"):
        made.next(2)
    assert json.dumps(made.manager.state()) == between


def test_after_an_outage_the_finished_groups_stay_and_the_broken_are_played_again(world: Maker) -> None:
    made = make(world, 0)
    made.slow = {"train-0-2", "train-0-4", "train-0-5"}
    made.outage, made.broken = 2, {"train-0-2", "train-0-5"}  # the others are taken
    made.on_revive = made.slow.clear
    batch = made.next(0)
    assert made.revived == 1
    assert len(batch.samples) == 3 * PROMPTS
    assert made.calls == {name: 1 + (name in made.broken) for name in own(0)}
    assert not [future for group in made.written for r in group.rollouts for future in r.futures
                if future.conversation.ending is Ending.ERROR]  # fmt: skip


@pytest.mark.parametrize("evaluated", [False, True])
def test_groups_that_lost_their_scores_with_a_reward_model_are_played_again_once(world: Maker, evaluated: bool) -> None:
    """Its servers are waited for, and the policy's weights, which its servers have, are not synced."""
    made = world(lambda task: DIFFERENT)
    name = "eval-before-1" if evaluated else "train-0-2"
    made.scoring_outage, made.unscored = 1, {name}
    if evaluated:
        made.manager.evaluate(0)
    else:
        made.next(0)
    assert made.revived == 0
    assert {stream for stream, calls in made.calls.items() if calls == 2} == {name}
    values = [rollout.reward.value for group in made.evaluated or made.written for rollout in group.rollouts]
    assert set(values) == {0.0, 1.0}


def test_scores_that_are_missing_without_an_outage_stay_so(world: Maker) -> None:
    made = world(lambda task: DIFFERENT)
    made.unscored = {"train-0-2"}
    made.next(0)
    assert set(made.calls.values()) == {1}


def test_errors_without_an_outage_are_not_played_again(world: Maker) -> None:
    made = make(world, 0)
    made.broken = {"train-0-0"}
    made.next(0)
    assert len(made.played) == PROMPTS and made.revived == 0
    assert made.written[0].rollouts[0].start.ending is Ending.ERROR


def test_an_outage_while_nobody_waited_counts(world: Maker) -> None:
    """Servers that went and were back while the ranks trained: the pool says so at the next step."""
    made = make(world, 1)
    made.broken = own(1)
    made.next(0)
    made.outage = made.looks + 1
    batch = made.next(1)
    assert made.revived == 1 and len(batch.samples) == 3 * PROMPTS
    assert made.calls == {name: 1 + (name in made.broken) for name in own(0) | own(1) | own(2)}


def test_an_outage_while_nothing_was_in_flight_costs_nothing(world: Maker) -> None:
    """Servers that went after one step and were back before the next."""
    made = make(world, 0)
    made.next(0)
    made.lose_servers()
    made.next(1)
    assert made.revived == 0


def test_an_evaluation_survives_an_outage_too(world: Maker) -> None:
    made = make(world, 1)
    made.outage, made.broken = 1, {"eval-before-1"}
    made.manager.evaluate(0)
    assert made.revived == 1
    assert [int(group.task.id) for group in made.evaluated] == [0, 1, 2, 3]
    assert all(group.rollouts[0].start.ending is Ending.USER_DONE for group in made.evaluated)


@pytest.mark.processes
def test_all_ranks_revive_the_servers_and_have_the_batch(tmp_path: Path) -> None:
    found = run_ranks(lose_the_servers_once, 2, tmp_path)
    assert [one.pop("asked") for one in found] == [2 * PROMPTS + 1, 0]
    assert found[0] == found[1]
    assert found[0]["revived"] == 1 and len(found[0]["trained"]) == PROMPTS


def lose_the_servers_once(folder: Path) -> dict[str, Any]:
    """As one of two ranks."""
    dist.init_process_group("gloo")
    ahead.ray = FakeRay()
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


def test_a_turn_its_futures_and_their_scores_twice() -> None:
    """And 10 s for users to finish after their deadline."""
    assert group_seconds(settings(), 1) == 2 * (100 + 110 + 10 + 20)
    assert group_seconds(settings(), 2) == 2 * (100 + 110 + 20 + 20), "half of the 24 scores wait for a place"
    assert group_seconds(settings(reward__workers=2), 2) == 2 * (100 + 110 + 10 + 20)
    assert group_seconds(settings(rollout__futures=0), 6) == 2 * (100 + 110 + 20 + 20), "24 whole conversations"


def test_tools_have_time_to_close_after_the_trained_turn_and_after_its_futures() -> None:
    tools = settings(rollout__tools=["calculator"], rollout__mcp_servers={"m": {}}, rollout__tool_timeout=300.0)
    assert group_seconds(tools, 1) == 2 * (100 + 110 + 2 * 2 * 300 + 10 + 20)


def test_judges_have_their_deadline_and_wait_for_the_limiter() -> None:
    judged = settings(reward__weights={"accuracy": 1.0}, reward__metrics={"accuracy": {"judge": True}})
    judged.reward.judge.deadline = 50.0
    assert group_seconds(judged, 1) == 2 * (100 + 110 + 50 + 20)
    judged.llm.max_concurrent = 4
    assert group_seconds(judged, 1) == 2 * (100 + 110 + 3 * 50 + 20)
    judged.llm.requests_per_minute = 60
    judged.reward.judge.attempts, judged.user.attempts, judged.rollout.max_user_turns = 6, 3, 2
    assert group_seconds(judged, 1) == 2 * (100 + 110 + 150 + 20 + 12 * (6 + 3 * 3)), "a call a second"


def test_tokens_a_minute_bound_it_too() -> None:
    """12 conversations with two judgements each, and two messages of a user: those who may take most count."""
    judged = {"interactivity": 1.0, "accuracy": 1.0}
    slow = settings(reward__weights=judged, reward__metrics={"accuracy": {"judge": True}})
    slow.reward.judge.deadline, slow.reward.judge.attempts, slow.reward.judge.max_tokens = 50.0, 2, 100
    slow.user.attempts, slow.user.max_tokens, slow.rollout.max_user_turns = 3, 50, 1
    slow.users = {"patient": {"attempts": 5, "max_tokens": 20}, "verbose": {"attempts": 1, "max_tokens": 80}}
    slow.rollout.context_length, slow.llm.tokens_per_minute = 1000, 6000
    judgements, messages = 24 * 2, 12 * 2 * 5
    tokens = judgements * 100 + messages * 80 + (judgements + messages) * 1000
    assert group_seconds(slow, 1) == pytest.approx(2 * (100 + 110 + 2 * 50 + 20 + 60 * tokens / 6000))


def test_answers_of_actors_come_in_order_or_the_silent_are_named(fake_ray: FakeRay) -> None:
    assert ahead.answers({"one": Reference(1), "two": Reference(2)}, 60.0) == [1, 2]
    calls = {"its counters": Reference(1), "its spending": Reference(2, lambda: False)}
    with pytest.raises(Hung, match=r"^rank 0 has waited 60 s \(half of launch.timeout\) for its spending$"):
        ahead.answers(calls, 60.0)
    assert ahead.answered(list(calls.values()), 60.0) == [1] and ahead.answered([], 60.0) == []


def test_what_stops_a_run_is_raised_without_the_workers_between() -> None:
    stop, fault = RunStopped("enough"), ValueError("no such task")

    def through_two_workers(cause: Exception) -> Exception:
        inner = RayTaskError("score", "a trace", cause, "worker", 1, "127.0.0.1")
        return RayTaskError("play", "a trace", inner, "worker", 1, "127.0.0.1")

    assert ahead.raised(through_two_workers(stop)) is stop
    outer = through_two_workers(fault)
    assert ahead.raised(outer) is outer and ahead.raised(fault) is fault


class Simulated:
    """Flights of groups with numbers, of which those in `finished` are there, at the time `clock` in seconds.

    `groups`: what is played other than a group with a reward, by number. `gone`: no server is left. `calls`: how often
    a number was played. `asked`: folders of stacks. `shown`: steps of the bar, 0 when it is closed. `waits`: number and
    timeout of each wait.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.folder, self.gone = 1000.0, folder, False
        self.finished: set[int] = set()
        self.groups: dict[int, Group] = {}
        self.calls: Counter[int] = Counter()
        self.asked: list[Path] = []
        self.shown: list[int] = []
        self.waits: list[tuple[int, float]] = []
        self.digests = WeightDigests(8)
        self.digests.begin(0)
        monkeypatch.setattr(ahead, "time", SimpleNamespace(monotonic=lambda: self.clock))
        monkeypatch.setattr(ahead.stacks, "ask", self.asked.append)
        bar = SimpleNamespace(update=self.shown.append, close=lambda: self.shown.append(0))
        monkeypatch.setattr(ahead, "progress", lambda title, count: bar)
        ray = FakeRay()
        wait = ray.wait

        def watched(pending: list[Reference], num_returns: int, timeout: float) -> Any:
            self.waits.append((num_returns, timeout))
            return wait(pending, num_returns, timeout)

        monkeypatch.setattr(ray, "wait", watched)
        monkeypatch.setattr(ahead, "ray", ray)

    def flight(self, **more: Any) -> Flight:
        config = settings(run__dir=str(self.folder))
        worker = SimpleNamespace(play=Method(self.play))
        return Flight(config, [worker], Journal(self.folder / "journal", self.digests), lambda: self.gone, **more)

    def play(self, task: Task, stream: str, one: object) -> Reference:
        number = int(task.id)
        self.calls[number] += 1
        group = self.groups.get(number) or Group(task, (rollout(1.0, 0),))
        return Reference(group, lambda: number in self.finished)

    def begin(self, flight: Flight, *numbers: int) -> None:
        for number in numbers:
            task = Task(str(number), (Message("user", "hi"),), "g", "", "u")
            flight.begin(ahead.Asked(Slot(0, 0, number), f"train-0-{number}", task))


@pytest.fixture
def simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Simulated:
    return Simulated(tmp_path, monkeypatch)


ONE, TWO = 2 * (100 + 110 + 10 + 20), 2 * (100 + 110 + 20 + 20)  # seconds of `settings()` for so many groups


def test_groups_none_of_which_is_finished_in_time_are_hung(simulated: Simulated) -> None:
    """Counted from when the last one was begun, or was waited for."""
    flight = simulated.flight()
    simulated.begin(flight, 0)
    simulated.clock += 300
    simulated.begin(flight, 1)
    simulated.clock += 200
    flight.wait_for(2, "training")
    simulated.clock += TWO
    assert flight.look() == "playing" and not simulated.asked
    simulated.clock += 1
    with pytest.raises(Hung) as error:
        flight.look()
    assert str(error.value).startswith("rank 0 has waited 500 s for any of 2 groups, longer than one can take by")
    assert f": train-0-0, train-0-1, asked of conversation-0; stacks are in {simulated.folder}/stacks" in str(
        error.value
    )
    assert simulated.asked == [simulated.folder / "stacks"]


def test_a_group_that_is_begun_has_its_whole_time(simulated: Simulated) -> None:
    flight = simulated.flight()
    flight.wait_for(1, "training")
    simulated.clock += 300
    simulated.begin(flight, 0)
    simulated.clock += ONE
    assert flight.look() == "playing"


def test_a_finished_group_gives_the_others_their_whole_time(simulated: Simulated) -> None:
    flight = simulated.flight()
    simulated.begin(flight, 0, 1)
    flight.wait_for(2, "training")
    simulated.finished = {0}
    simulated.clock += TWO + 100
    assert flight.look() == "playing"
    simulated.clock += ONE
    assert flight.look() == "playing"
    simulated.clock += 1
    with pytest.raises(Hung, match=r"^rank 0 has waited 480 s for any of 1 groups.*: train-0-1, asked"):
        flight.look()


def test_the_wait_for_servers_does_not_count(simulated: Simulated) -> None:
    """Nor does it for the groups that stay in flight beside those that are waited for."""
    training = simulated.flight()
    evaluation = simulated.flight(beside=training)
    simulated.begin(training, 0)
    simulated.begin(evaluation, 1, 2)
    evaluation.wait_for(2, "evaluation")
    simulated.clock += 400
    simulated.gone = True
    assert evaluation.look() == "servers lost"
    simulated.clock += 10_000
    simulated.gone = False
    assert evaluation.look() == "playing"
    simulated.clock += TWO + ONE
    assert evaluation.look() == "playing", "they share their workers"
    simulated.clock += 1
    with pytest.raises(Hung, match="980 s for any of 2 groups"):
        evaluation.look()
    training.wait_for(1, "training")
    simulated.finished = {0}
    assert training.look() == "finished" and simulated.calls[0] == 1


@pytest.mark.parametrize("beside", [False, True])
def test_what_failed_in_an_outage_is_played_again_until_it_does_not(simulated: Simulated, beside: bool) -> None:
    other = simulated.flight()
    flight = simulated.flight(beside=other)
    lost = other if beside else flight
    simulated.groups[0] = Group(Task("0", (), "g", "", "u"), (rollout(1.0, 0), rollout(1.0, 0, Ending.ERROR)))
    simulated.begin(lost, 0)
    flight.wait_for(1, "training")
    simulated.gone = True
    assert flight.look() == "servers lost"
    simulated.gone, simulated.finished = False, {0}
    lost.wait_for(1, "training")
    assert lost.look() == "playing" and simulated.calls[0] == 2
    assert lost.look() == "finished", "the second failure is none of an outage"
    assert simulated.calls[0] == 2 and simulated.shown == [1, 0]


def test_what_lacks_a_score_after_an_outage_is_played_once_more_and_not_twice(simulated: Simulated) -> None:
    flight = simulated.flight()
    simulated.groups[0] = Group(Task("0", (), "g", "", "u"), (rollout(Missing("down"), 0),))
    simulated.begin(flight, 0)
    flight.wait_for(1, "training")
    simulated.gone = True
    assert flight.look() == "servers lost"
    simulated.gone, simulated.finished = False, {0}
    assert flight.look() == "playing" and simulated.calls[0] == 2
    simulated.gone = True
    assert flight.look() == "servers lost"
    simulated.gone = False
    assert flight.look() == "finished" and simulated.calls[0] == 2


def test_as_many_groups_are_taken_as_are_waited_for_in_the_order_they_were_begun(simulated: Simulated) -> None:
    flight = simulated.flight()
    simulated.begin(flight, 4, 3, 2, 1, 0)
    flight.wait_for(3, "training")
    simulated.finished = {1, 2}
    assert flight.look() == "playing" and flight.slots == [Slot(0, 0, number) for number in (0, 3, 4)]
    simulated.finished = {0, 1, 2, 3, 4}
    assert flight.look() == "finished" and len(flight) == 2
    assert list(flight.take()) == [Slot(0, 0, number) for number in (1, 2, 4)]
    assert simulated.shown == [1, 1, 1, 0], "the bar grows by each and is closed"


def test_a_look_waits_for_the_first_group_unless_one_is_there(simulated: Simulated) -> None:
    flight = simulated.flight()
    simulated.begin(flight, 0, 1, 2)
    flight.wait_for(1, "training")
    flight.look()
    assert simulated.waits == [(1, ahead.POLL_SECONDS), (3, 0)]
    simulated.finished, simulated.waits = {0, 1}, []
    assert flight.look() == "finished"
    flight.wait_for(2, "training")
    simulated.waits = []
    assert flight.look() == "playing" and simulated.waits == [(1, 0.0), (1, 0)], "one was left over"


def test_a_group_of_the_journal_is_not_played(simulated: Simulated) -> None:
    flight = simulated.flight()
    simulated.begin(flight, 0)
    simulated.finished = {0}
    flight.collect(0.0)
    again = simulated.flight()
    simulated.begin(again, 0, 1)
    assert again.from_journal == 1 and simulated.calls == {0: 1, 1: 1}
