"""Time of a step's conversations over its lower bound, and how much longer the published order takes.

`python tools/bench/futures.py [--seeds 0 1 2 3 4] [--smoke]`: 16 tasks x 8 trained turns x 3 futures of 2 user turns on
the real FuturesPlayer. Engine, user and judge are simulated, at most CONCURRENCY of each kind at once. A call
takes MEDIAN seconds times a factor per call, and times a factor per task if it calls engine or user (some problems need
long answers). Both are lognormal, and the tail is heavy: one task in a hundred takes ten times the median. Time is
virtual: the event loop jumps to the next timer, so no clock is read and a seed gives the same values everywhere.
--smoke: 2 tasks and one seed.

`makespan_over_bound` = makespan / max(longest chain, work / concurrency of each kind); a chain is the sequence of calls
that one future needs. It is the worst over the seeds. `serial_over_ours` = the same calls in the order of the published
recipe (all trained turns at once, the futures of a turn one after the other, judging when all are played) / ours; the
mean over the seeds. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from simulated.clock import VirtualLoop

from megatron_collab.config import Config
from megatron_collab.launch.play_specs import play_spec
from megatron_collab.rollout.conversation import FuturesPlayer, RolloutPlace
from megatron_collab.rollout.users import UserReply
from megatron_collab.settings import SamplingConfig
from megatron_collab.types import Conversation, Finish, Future, Message, Task, Turn

TASKS, SMOKE_TASKS = 16, 2
ROLLOUTS, FUTURES, USER_TURNS = 8, 3, 2
MEDIAN = {"engine": 2.0, "user": 6.0, "judge": 2.0}  # seconds
CALL_SIGMA, TASK_SIGMA = 0.2, 1.0  # sigmas of the factors' logarithms
CONCURRENCY = {"engine": 256, "user": 256, "judge": 256}


class Simulation:
    """`tasks` and the time that calls about them take; `work` sums the seconds of each kind."""

    def __init__(self, seed: int, tasks: Sequence[Task]) -> None:
        self.seed = seed
        self.tasks = tasks
        self.places = {kind: asyncio.Semaphore(count) for kind, count in CONCURRENCY.items()}
        self.work: dict[str, float] = defaultdict(float)

    def seconds(self, kind: str, name: str, task: str = "") -> float:
        call_factor = random.Random(f"{self.seed}/{kind}/{name}").gauss(0.0, CALL_SIGMA)
        task_factor = random.Random(f"{self.seed}/{task}").gauss(0.0, TASK_SIGMA) if task else 0.0
        return MEDIAN[kind] * math.exp(call_factor + task_factor)

    async def call(self, kind: str, name: str, task: str = "") -> None:
        seconds = self.seconds(kind, name, task)
        async with self.places[kind]:
            self.work[kind] += seconds
            await asyncio.sleep(seconds)


class Engine:
    """A policy whose turns take time and have one token."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation

    async def generate(
        self,
        prompt_ids: tuple[int, ...],
        *,
        messages: Sequence[Message],
        max_new_tokens: int,
        sampling: SamplingConfig,
        seed: int,
        affinity: str,
        stop: int | None = None,
        routing_from: int | None = None,
    ) -> Turn:
        await self.simulation.call("engine", str(seed), affinity)
        return Turn(prompt_ids, (seed,), (-1.0,), (0,), Finish.STOP, str(seed))

    async def tool_calls(self, text: str, schemas: Sequence[Any]) -> list[Any]:
        return []


class Renderer:
    thought_end = None

    def first(self, messages: Sequence[Message], thinking: bool | None = None) -> tuple[int, ...]:
        return (0,)

    def next(self, messages: Sequence[Message], turn: Turn, thinking: bool | None = None) -> tuple[int, ...]:
        return (0,)

    def opens_thought(self, prompt: Sequence[int]) -> bool:
        return False


class User:
    """A user whose replies take time."""

    def __init__(self, simulation: Simulation, task: Task, sample: str) -> None:
        self.simulation = simulation
        self.task = task
        self.sample = sample

    async def start(self, conversation: Conversation) -> None:
        """Nothing to set up."""

    async def reply(self, conversation: Conversation) -> UserReply:
        await self.simulation.call("user", f"{self.sample}/{len(conversation.turns)}", self.task.id)
        return UserReply(Message("user", "and?"), done=False)

    async def finish(self, conversation: Conversation) -> float:
        return 0.0


class Users:
    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation

    def make(self, task: Task, sample: str) -> User:
        return User(self.simulation, task, sample)

    def ended(self, task: Task, conversation: Conversation) -> None:
        """Counts nothing."""


class Judge:
    """Scores that take time."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation

    async def future(self, task: Task, conversation: Conversation) -> Future:
        await self.simulation.call("judge", str(conversation.token_ids))
        return Future(conversation, {"judged": 1.0})


def options() -> Config:
    config = Config()
    config.rollout.futures, config.rollout.max_user_turns = FUTURES, USER_TURNS
    config.rollout.deadline = 1e6
    config.train.rollouts_per_prompt = ROLLOUTS
    config.reward.weights, config.reward.metrics = {"judged": 1.0}, {"judged": {"metric": "interactivity"}}
    return config


def make_tasks(count: int) -> list[Task]:
    return [Task(f"t{i}", (Message("user", "hi"),), "", "", "") for i in range(count)]


async def ours(simulation: Simulation) -> list[Conversation]:
    player = FuturesPlayer(Engine(simulation), Renderer(), Users(simulation), Judge(simulation), play_spec(options()))  # type: ignore[arg-type]
    groups = await asyncio.gather(*(player.play(task, task.id) for task in simulation.tasks))
    return [f.conversation for group in groups for rollout in group.rollouts for f in rollout.futures]


async def serial(simulation: Simulation) -> list[Conversation]:
    """The published order: futures of a turn one after the other, judging when all are played."""
    config = options()
    player = FuturesPlayer(Engine(simulation), Renderer(), Users(simulation), Judge(simulation), play_spec(config))  # type: ignore[arg-type]

    async def turn(task: Task, rollout: int) -> list[Conversation]:
        start = await player.trained_turn(task, RolloutPlace(task.id, rollout))
        places = [RolloutPlace(task.id, rollout, number) for number in range(FUTURES)]
        return [await player.play_on(start, task, place, config.rollout.future) for place in places]

    played = await asyncio.gather(*(turn(task, rollout) for task in simulation.tasks for rollout in range(ROLLOUTS)))
    conversations = [conversation for futures in played for conversation in futures]
    judge = Judge(simulation)
    await asyncio.gather(*(judge.future(simulation.tasks[0], conversation) for conversation in conversations))
    return conversations


def run[Result](
    play: Callable[[Simulation], Coroutine[Any, Any, Result]], seed: int, tasks: Sequence[Task]
) -> tuple[float, Simulation, Result]:
    """(virtual seconds that `play` takes, its simulation, its result)."""
    loop = VirtualLoop()
    try:
        simulation = Simulation(seed, tasks)
        result = loop.run_until_complete(play(simulation))
        return loop.time(), simulation, result
    finally:
        loop.close()


def longest_chain(simulation: Simulation, conversations: Sequence[Conversation]) -> float:
    """Seconds of the longest future if no call ever waits for a slot; `conversations` in the order of `ours`."""
    places = [RolloutPlace(task.id, i, j) for task in simulation.tasks for i in range(ROLLOUTS) for j in range(FUTURES)]
    chains = []
    for place, conversation in zip(places, conversations, strict=True):
        engine = [simulation.seconds("engine", turn.text, place.stream) for turn in conversation.turns]
        users = [simulation.seconds("user", f"{place.name}/{turn}", place.stream) for turn in range(1, USER_TURNS + 1)]
        chains.append(sum(engine) + sum(users) + simulation.seconds("judge", str(conversation.token_ids)))
    return max(chains)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--smoke", action="store_true", help="one seed of a few tasks: shows that it runs, no figures")
    arguments = parser.parse_args()
    tasks = make_tasks(SMOKE_TASKS if arguments.smoke else TASKS)
    over_bound, over_ours = [], []
    for seed in arguments.seeds[:1] if arguments.smoke else arguments.seeds:
        seconds, simulation, conversations = run(ours, seed, tasks)
        chain = longest_chain(simulation, conversations)
        bounds = {kind: simulation.work[kind] / CONCURRENCY[kind] for kind in CONCURRENCY}
        published, _, same = run(serial, seed, tasks)
        assert sorted(c.token_ids for c in same) == sorted(c.token_ids for c in conversations)
        over_bound.append(seconds / max(chain, *bounds.values()))
        over_ours.append(published / seconds)
        shown = ", ".join(f"{kind} {bound:.1f}" for kind, bound in bounds.items())
        print(f"seed {seed}: ours {seconds:.1f} s, published order {published:.1f} s; chain {chain:.1f}, work {shown}")
    values = {
        "makespan_over_bound": round(max(over_bound), 4),
        "serial_over_ours": round(sum(over_ours) / len(over_ours), 4),
    }
    print(json.dumps({"name": "futures", "values": values}))


if __name__ == "__main__":
    main()
