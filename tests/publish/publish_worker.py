"""One rank of test_engine_parity.py: `publish_worker.py FOLDER`, the servers in the environment variable SERVERS.

For every case a model is loaded that the server has not seen, published, trained three times and published
again. Rank 0 writes FOLDER/found.json: what the server's log-probs differ by from the trainer's, each time.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_collab.actor import model as policies
from megatron_collab.actor.actor import Actor
from megatron_collab.config import Config
from megatron_collab.publish.publisher import Publisher
from megatron_collab.publish.transport import PublishError
from megatron_collab.rollout.sglang import SGLangClient
from megatron_collab.types import Batch, Sample, Turn

# name: (model, tensor parallel, pipeline parallel, bytes of a bucket); data parallel is what remains of two ranks
CASES = {
    "tp2": ("untied", 2, 1, 1 << 20),
    "tp2-many-buckets": ("untied", 2, 1, 1 << 15),
    "pp2": ("untied", 1, 2, 1 << 17),
    "dp2": ("untied", 1, 1, 1 << 20),
    "tied-tp2": ("tied", 2, 1, 1 << 20),
    "tied-pp2": ("tied", 1, 2, 1 << 20),
}
UPDATES = 3
TURNS, PROMPT, REPLY = 12, 20, 16


def configure(folder: Path, tp: int, pp: int) -> Config:
    config = Config()
    config.launch.device, config.launch.timeout = "cpu", 60.0
    config.model.path, config.model.dtype = str(folder), "float32"
    config.parallel.tp, config.parallel.pp = tp, pp
    config.train.steps, config.optim.lr, config.algo.kl_coef = 100, 1e-2, 0.1
    config.rollout.turn.temperature = 0.7 if tp == pp == 1 else 1.0
    return config


def sample_turns(url: str, api_key: str, seed: int, temperature: float) -> list[Turn]:
    """Turns of the server's own, from random prompts."""
    prompts = np.random.default_rng(seed).integers(3, 500, (TURNS, PROMPT)).tolist()

    async def sample() -> list[Turn]:
        client = SGLangClient(url, api_key, 60.0)
        try:
            requests = [
                client.generate(tuple(prompt), max_new_tokens=REPLY, temperature=temperature, seed=seed * 1000 + i)
                for i, prompt in enumerate(prompts)
            ]
            return await asyncio.gather(*requests)
        finally:
            await client.close()

    return asyncio.run(sample())


def to_sample(turn: Turn, advantage: float) -> Sample:
    length = len(turn.prompt_ids) + len(turn.token_ids)
    log_probs, mask = np.zeros(length, np.float32), np.zeros(length, np.float32)
    log_probs[len(turn.prompt_ids) :], mask[len(turn.prompt_ids) :] = turn.log_probs, 1.0
    return Sample(np.array(turn.prompt_ids + turn.token_ids, np.int64), mask, mask * np.float32(advantage), log_probs)


class Case:
    """One model in one layout, beside the server that it is published to."""

    def __init__(self, config: Config, server: dict[str, Any], bucket_bytes: int) -> None:
        policy, self.shape = policies.load(config)
        self.server, self.policy, self.config = server, policy, config
        self.actor = Actor(config, policy, policies.frozen_copy(policy))
        self.publisher = Publisher(config, policy, self.shape, self.line(), bucket_bytes)
        self.samples: tuple[Sample, ...] = ()
        self.seed = 0

    def line(self, **changes: Any) -> Any:
        return SimpleNamespace(**self.server | changes) if dist.get_rank() == 0 else None

    def measure(self) -> dict[str, Any]:
        """Sample; the largest difference of log-probs between server and trainer, and the server's version."""
        self.seed += 1
        shared: list[Any] = [None]
        if dist.get_rank() == 0:
            temperature = self.config.rollout.turn.temperature
            shared = [sample_turns(self.server["url"], self.server["api_key"], self.seed, temperature)]
        dist.broadcast_object_list(shared)
        turns = shared[0]
        advantages = np.random.default_rng(self.seed).normal(size=len(turns))
        self.samples = tuple(to_sample(turn, advantage) for turn, advantage in zip(turns, advantages, strict=True))
        found = self.actor.log_probs(self.samples)
        pairs = zip(found, self.samples, strict=True)
        difference = max(float(np.abs((ours - sample.log_probs) * sample.loss_mask).max()) for ours, sample in pairs)
        return {"difference": difference, "versions": sorted({turn.version for turn in turns})}

    def failures(self) -> list[list[str]]:
        """The message of a publish with a wrong key and of one without a server, on every rank."""
        found: list[list[str]] = []
        for changes in ({"api_key": "wrong"}, {"url": "http://127.0.0.1:9"}):
            with Publisher(self.config, self.policy, self.shape, self.line(**changes)) as publisher:
                messages: list[Any] = [None] * dist.get_world_size()
                try:
                    publisher.publish(999)
                except PublishError as error:
                    dist.all_gather_object(messages, str(error))
                assert publisher.version is None
                found.append(messages)
        return found


def run(folder: Path, name: str, servers: dict[str, Any]) -> dict[str, Any]:
    kind, tp, pp, bucket_bytes = CASES[name]
    config = configure(folder / kind, tp, pp)
    first = 10 * (1 + list(CASES).index(name))
    with policies.init_parallel(config):
        case = Case(config, servers[kind], bucket_bytes)
        rounds = [case.measure()]
        stats: list[dict[str, float]] = []
        with case.publisher as publisher:
            publisher.publish(first)
            rounds.append(case.measure())
            for step in range(1, 1 + UPDATES):
                stats.append(case.actor.update(Batch(case.samples)))
                rounds.append(case.measure())
                publisher.publish(first + step)
                rounds.append(case.measure())
            found = {"first": first, "rounds": rounds, "stats": stats}
            if dist.get_rank() == 0:
                assert list(Path("/dev/shm").glob(f"torch_{os.getpid()}_*"))
                found["pid"] = os.getpid()
            if name == "tp2":
                found |= {"failures": case.failures(), "after_failures": case.measure()}
    return found


def main(folder: Path) -> None:
    servers = json.loads(os.environ["SERVERS"])
    found = {name: run(folder, name, servers) for name in CASES}
    if os.environ["RANK"] == "0":
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
