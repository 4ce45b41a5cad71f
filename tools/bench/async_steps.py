"""What does sampling ahead of training gain? The real RolloutManager, real Ray actors, a simulated engine and update.

A group takes 0.3 to 0.6 s, drawn from its stream, so 16 of them at once take nearly 0.6 s; an update takes 0.6 s, in
which the process sleeps. A run is 16 steps. `speedup` is the steps a second with rollout.max_staleness=1 over those
with 0, when sampling and training take turns. A run's first batch cannot overlap anything, so the upper bound is
2 x 16 / 17 = 1.88. Both settings alternate three times; medians are reported.
`python tools/bench/async_steps.py [--smoke]` prints, last, one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import ray
import torch.distributed as dist

from megatron_collab.algo.credit import CreditSpec
from megatron_collab.config import Config, run_record
from megatron_collab.data.datasets import task_row, write_jsonl
from megatron_collab.environments import tiny_model
from megatron_collab.launch.data_specs import data_spec
from megatron_collab.launch.play_specs import play_spec
from megatron_collab.observability.run import Run
from megatron_collab.rollout.manager import RolloutManager
from megatron_collab.rollout.workers import Workers
from megatron_collab.runtime.ray_cluster import ray_session, start_actor
from megatron_collab.types import Conversation, Ending, Finish, Future, Group, Message, Reward, Rollout, Task, Turn

PROMPTS, WORKERS = 16, 2
STEPS, ROUNDS = 16, 3
SMOKE_STEPS, SMOKE_ROUNDS = 2, 1
SECONDS = 0.6  # of an update, and of the longest group
TASK = Task("t", (Message("user", "a table please"),), "goal", "answer", "nobody")


class Worker:
    """Plays groups of two rollouts: first token by the weights at the start, last token by those at the end.

    It is also the run's limiter, which counts nothing.
    """

    def __init__(self) -> None:
        self.version = 0

    async def publish(self, version: int) -> None:
        self.version = version

    async def play(self, task: Task, stream: str, eval_set: None, server: int, turns: Sequence[object]) -> Group:
        first = self.version
        await asyncio.sleep(random.Random(stream).uniform(SECONDS / 2, SECONDS))
        return Group(task, (rollout(0.0, first, self.version), rollout(1.0, first, self.version)))

    async def take_counters(self) -> dict[str, int]:
        return {}

    async def spend(self) -> dict[str, float]:
        return {}


def rollout(value: float, first: int, last: int) -> Rollout:
    turn = Turn((1, 2), (3, 4), (-0.5, -0.5), (first, last), Finish.STOP, "x")
    conversation = Conversation(TASK.messages, (1, 2)).add_turn(turn).end(Ending.USER_DONE)
    return Rollout(conversation, (Future(conversation, {"right": value}),), Reward(value))


def steps_a_second(workers: list[Any], folder: Path, staleness: int, steps: int) -> float:
    """Steps a second of one run."""
    config = Config()
    config.run.dir, config.data.train = str(folder), str(folder / "tasks.jsonl")
    config.train.steps, config.train.prompts_per_step, config.rollout.max_staleness = steps, PROMPTS, staleness
    config.rollout.server.colocated = False
    config.model.path = str(folder / "model")
    tiny_model.byte_tokenizer([], 300).save_pretrained(folder / "model")
    write_jsonl(folder / "tasks.jsonl", [task_row(TASK)])
    pool = SimpleNamespace(lost_all=lambda: False, recover=lambda: None)
    players, play = Workers(workers, [], workers[0]), play_spec(config)
    servers: Any = SimpleNamespace(workers=players, pool=pool, lost_all=pool.lost_all, play=play, timeout=150.0)
    weights: Any = SimpleNamespace()
    credit = CreditSpec(config.algo, config.reward, config.rollout)
    trained = 0
    with Run(run_record(config), config.train, 0, {}, {}) as run:
        rollouts = RolloutManager(config.train, credit, data_spec(config), servers, weights, run, {})
        began = time.monotonic()
        for step in range(steps):
            ray.get([worker.publish.remote(step) for worker in workers])
            batch = rollouts.collect(step)
            assert min(sample.version for sample in batch.samples) >= step - staleness
            trained += len(batch.samples)
            time.sleep(SECONDS)
            rollouts.learned({"step": float(step)})
        seconds = time.monotonic() - began
    assert trained == steps * PROMPTS * 2
    return steps / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="one round of two steps: shows that it runs, no figures")
    few = parser.parse_args().smoke
    steps, rounds = (SMOKE_STEPS, SMOKE_ROUNDS) if few else (STEPS, ROUNDS)
    config = Config()
    config.rollout.workers = WORKERS
    results: dict[int, list[float]] = {0: [], 1: []}
    with TemporaryDirectory() as folder, ray_session(config.rollout.workers + config.reward.workers):
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        workers = [start_actor(Worker) for _ in range(WORKERS)]
        ray.get([worker.spend.remote() for worker in workers])
        for _ in range(rounds):
            for staleness, runs in results.items():
                with TemporaryDirectory() as run_folder:
                    runs.append(steps_a_second(workers, Path(run_folder), staleness, steps))
                print(f"max_staleness {staleness}: {runs[-1]:.3f} steps/s", flush=True)
        dist.destroy_process_group()
    in_turns, ahead = map(median, results.values())
    values = {"speedup": ahead / in_turns, "steps_per_second": ahead}
    print(json.dumps({"name": "async_steps", "values": {name: round(value, 4) for name, value in values.items()}}))


if __name__ == "__main__":
    main()
