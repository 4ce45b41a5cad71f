"""Time to build conversations turn by turn, over its lower bound: the longest conversation.

The real Synthesis, Flight, journal and player over two Ray actors; engine, user and judge are simulated. 16 tasks, up
to five turns of 4 candidates with 3 futures of two user turns; users end a third of the conversations at each message.
A call takes MEDIAN seconds times two lognormal factors, one per call and a heavy-tailed one per task. The factors are
as in the bench futures and the medians a tenth, so that our own overhead shows; concurrent calls are not limited.

The bound is the longest conversation: at each turn its slowest future with its score, since the best candidate is known
only then. `makespan_over_bound` is the time from the first call until the rows are written over that, the worst of the
seeds; `turns_over_bound` is the lower bound of an order that finishes a turn of all tasks before the next one starts,
over the same bound. `python tools/bench/build.py [--seeds 0 1 2] [--smoke]` prints, last, one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import ray
import torch.distributed as dist

from megatron_collab.config import BuildDatasetConfig, PlayConfig, run_record
from megatron_collab.data.datasets import task_row, write_jsonl
from megatron_collab.environments import tiny_model
from megatron_collab.launch.spec import building_spec
from megatron_collab.observability.folder import RunFolder
from megatron_collab.rollout.conversation import FuturesPlayer
from megatron_collab.rollout.lead import Lead
from megatron_collab.rollout.users import UserReply
from megatron_collab.rollout.workers import Workers
from megatron_collab.runtime.ray_cluster import ray_session, start_actor
from megatron_collab.synthesis.synthesis import Synthesis
from megatron_collab.types import Conversation, Finish, Future, Group, Message, Task, Turn

TASKS, SMOKE_TASKS, WORKERS = 16, 2, 2
CANDIDATES, FUTURES, USER_TURNS, MESSAGES = 4, 3, 2, 10
SCRIPT = {"replay": ["said by nobody"]}  # a user that calls no model; Users plays in its place
ENDS = 1 / 3  # of a user's messages
MEDIAN = {"engine": 0.2, "user": 0.6, "judge": 0.2}  # seconds
CALL_SIGMA, TASK_SIGMA = 0.2, 1.0  # sigmas of the factors' logarithms


def seconds(kind: str, name: str, task: str) -> float:
    call_factor = random.Random(f"{kind}/{name}").gauss(0.0, CALL_SIGMA)
    task_factor = random.Random(task).gauss(0.0, TASK_SIGMA)
    return MEDIAN[kind] * math.exp(call_factor + (task_factor if kind != "judge" else 0.0))


async def wait_for_call(kind: str, name: str, task: str) -> str:
    """Sleep for the duration of the call; the duration is also the text that is returned."""
    duration = seconds(kind, name, task)
    await asyncio.sleep(duration)
    return str(duration)


class Engine:
    """A policy and its chat template; a turn is one token."""

    thought_end = None

    async def generate(self, prompt_ids: tuple[int, ...], *, seed: int, affinity: str, **_: Any) -> Turn:
        text = await wait_for_call("engine", str(seed), affinity.rpartition(".")[0])
        return Turn(prompt_ids, (1,), (-1.0,), (0,), Finish.STOP, text)

    def first(self, messages: Sequence[Message], thinking: bool | None = None) -> tuple[int, ...]:
        return (0,)

    def next(self, messages: Sequence[Message], turn: Sequence[int], thinking: bool | None = None) -> tuple[int, ...]:
        return (0,)

    def opens_thought(self, prompt: Sequence[int]) -> bool:
        return False


class User:
    def __init__(self, sample: str) -> None:
        self.sample = sample

    async def start(self, conversation: Conversation) -> None:
        """Nothing to set up."""

    async def reply(self, conversation: Conversation) -> UserReply:
        name = f"{self.sample}/{len(conversation.turns)}"
        text = await wait_for_call("user", name, self.sample.partition(".")[0])
        return UserReply(Message("user", text), random.Random(name).random() < ENDS)

    async def finish(self, conversation: Conversation) -> float:
        return 0.0


class Users:
    def __init__(self) -> None:
        self.counters = Counter[str]()

    def make(self, task: Task, sample: str) -> User:
        return User(sample)

    def ended(self, task: Task, conversation: Conversation) -> None:
        """Counts nothing."""


class Judge:
    async def future(self, task: Task, conversation: Conversation) -> Future:
        await wait_for_call("judge", text_of(conversation.messages), "")
        return Future(conversation, {"asks": random.Random(text_of(conversation.messages)).random()})


def text_of(messages: Sequence[Message]) -> str:
    return " ".join(message.content for message in messages)


class Worker:
    """Plays groups on the real FuturesPlayer. It is also the run's limiter, which counts nothing."""

    def __init__(self, config: BuildDatasetConfig) -> None:
        engine: Any = Engine()
        self.player = FuturesPlayer(engine, engine, Users(), Judge(), building_spec(config).play)  # type: ignore[arg-type]

    async def play(self, task: Task, stream: str, eval_set: None, server: int, turns: Sequence[object]) -> Group:
        return await self.player.play(task, stream)

    async def spend(self) -> dict[str, float]:
        return dict.fromkeys(("calls", "usd", "unpriced"), 0.0)


class Timed(Synthesis):
    """Gives access to the groups of the conversations."""

    def built(self) -> list[list[Group]]:
        assert self._conversations is not None
        return self._conversations.groups


def settings(folder: Path, seed: int, tasks: int) -> BuildDatasetConfig:
    config = BuildDatasetConfig()
    config.run.dir, config.run.seed = str(folder), seed
    config.data.eval = str(folder / "tasks.jsonl")
    config.model.path = str(folder / "model")
    config.build.candidates, config.rollout.futures = CANDIDATES, FUTURES
    config.rollout.max_user_turns, config.rollout.max_messages = USER_TURNS, MESSAGES
    config.reward.weights = {"asks": 1.0}
    tiny_model.byte_tokenizer([], 300).save_pretrained(folder / "model")
    examples = [
        Task(f"{seed}-{i}", (Message("user", "0.0"),), "goal", "answer", "replay", SCRIPT) for i in range(tasks)
    ]
    write_jsonl(folder / "tasks.jsonl", [task_row(task) for task in examples])
    return config


def build(config: BuildDatasetConfig) -> tuple[float, list[list[Group]]]:
    """The seconds until the rows of all conversations are written, and the groups of each."""
    workers = [start_actor(Worker, config) for _ in range(WORKERS)]
    ray.get([worker.spend.remote() for worker in workers])
    pool, spec = SimpleNamespace(recover=lambda: None), building_spec(config)
    servers: Any = SimpleNamespace(workers=Workers(workers, [], workers[0]), pool=pool, lost_all=lambda: False)
    servers.play, servers.timeout = spec.play, 150.0
    with RunFolder(run_record(config), start=0, steps=0) as run:
        synthesis = Timed(config, spec, spec.play, spec.data, run, lambda: None, Lead.standalone(servers, 0))
        with synthesis.standalone():
            (eval_set,) = synthesis.sets
            synthesis._prepared(eval_set)  # reads the tasks, which takes longer than everything else here
            began = time.monotonic()
            synthesis.evaluate(0)
            return time.monotonic() - began, synthesis.built()


def longest(group: Group) -> float:
    """The seconds of the slowest future of a turn, with its score."""
    begins = len(group.task.messages)
    futures = [future.conversation.messages for rollout in group.rollouts for future in rollout.futures]
    played = (sum(float(message.content) for message in messages[begins:]) for messages in futures)
    return max(took + seconds("judge", text_of(messages), "") for took, messages in zip(played, futures, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(3)))
    parser.add_argument("--smoke", action="store_true", help="one seed of two tasks: shows that it runs, no figures")
    arguments = parser.parse_args()
    tasks = SMOKE_TASKS if arguments.smoke else TASKS
    over_bound, in_turns = [], []
    config = PlayConfig()
    config.rollout.workers = WORKERS
    with TemporaryDirectory() as folder, ray_session(config.rollout.workers + config.reward.workers):
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        for seed in arguments.seeds[:1] if arguments.smoke else arguments.seeds:
            with TemporaryDirectory() as seed_folder:
                took, conversations = build(settings(Path(seed_folder), seed, tasks))
            chains = [[longest(group) for group in conversation] for conversation in conversations]
            bound = max(map(sum, chains))
            over_bound.append(took / bound)
            in_turns.append(sum(map(max, zip_longest(*chains, fillvalue=0.0))) / bound)
            turns = sum(map(len, chains))
            print(
                f"seed {seed}: {len(chains)} conversations of {turns} turns in {took:.2f} s; the longest {bound:.2f} s"
            )
        dist.destroy_process_group()
    values = {"makespan_over_bound": max(over_bound), "turns_over_bound": sum(in_turns) / len(in_turns)}
    print(json.dumps({"name": "build", "values": {name: round(value, 4) for name, value in values.items()}}))


if __name__ == "__main__":
    main()
