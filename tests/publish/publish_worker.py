"""One rank of test_engine_parity.py: `publish_worker.py FOLDER`, the servers in the environment variable SERVERS.

For every case a model is loaded that the servers have not seen, published, trained three times and published
again. Rank 0 writes FOLDER/found.json: what the servers' log-probs differ by from the trainer's, each time.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import torch.distributed as dist

from megatron_collab.actor import model as policies
from megatron_collab.actor.actor import Actor
from megatron_collab.config import Config, RolloutConfig
from megatron_collab.publish.publisher import Publisher
from megatron_collab.publish.transport import PublishError
from megatron_collab.rollout.sglang import SGLangClient
from megatron_collab.types import Batch, Credit, Sample, Turn

# name: (servers of this model, tensor parallel, pipeline parallel, bytes of a bucket); data parallel is what remains
# of two ranks
CASES = {
    "tp2": ("untied", 2, 1, 1 << 20),
    "tp2-many-buckets": ("untied", 2, 1, 1 << 15),
    "pp2": ("untied", 1, 2, 1 << 17),
    "dp2": ("untied", 1, 1, 1 << 20),
    "tied-tp2": ("tied", 2, 1, 1 << 20),
    "tied-pp2": ("tied", 1, 2, 1 << 20),
    "two-servers": ("untied-twice", 2, 1, 1 << 17),
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


def sample_turns(server: dict[str, Any], seed: int, config: RolloutConfig) -> tuple[list[Turn], int]:
    """Turns of the server's own, from the same random prompts each time, and the tokens of them it had cached."""
    prompts = np.random.default_rng(0).integers(3, 500, (TURNS, PROMPT)).tolist()

    async def sample() -> tuple[list[Turn], int]:
        client = SGLangClient(server["url"], server["api_key"], config)
        try:
            requests = [
                client.generate(tuple(prompt), max_new_tokens=REPLY, sampling=config.turn, seed=seed * 1000 + i)
                for i, prompt in enumerate(prompts)
            ]
            return await asyncio.gather(*requests), client.counters["cached_tokens"]
        finally:
            await client.close()

    return asyncio.run(sample())


def to_sample(turn: Turn, value: float) -> Sample:
    length = len(turn.prompt_ids) + len(turn.token_ids)
    log_probs, mask = np.zeros(length, np.float32), np.zeros(length, np.float32)
    log_probs[len(turn.prompt_ids) :], mask[len(turn.prompt_ids) :] = turn.log_probs, 1.0
    credit = Credit(((len(turn.prompt_ids), length),), value, peers="all", scale="all")
    return Sample(np.array(turn.prompt_ids + turn.token_ids, np.int64), mask, log_probs, (credit,))


class Case:
    """One model in one layout, beside the servers that it is published to."""

    def __init__(self, config: Config, servers: list[dict[str, Any]], bucket_bytes: int) -> None:
        policy, self.shape = policies.load(config)
        self.servers, self.policy, self.config = servers, policy, config
        self.actor = Actor(config, policy, policies.frozen_copy(policy))
        self.publisher = Publisher(config, policy, self.shape, self.lines(), bucket_bytes)
        self.samples: tuple[Sample, ...] = ()
        self.seed = 0

    def lines(self, **changes: Any) -> list[Any]:
        """What the publisher is given; `changes` are made to the last of the servers."""
        found = [*self.servers[:-1], self.servers[-1] | changes]
        return [SimpleNamespace(**server) for server in found] if dist.get_rank() == 0 else []

    def measure(self) -> dict[str, Any]:
        """Sample; the largest difference of log-probs between servers and trainer, versions, what was cached.

        `alike`: whether the servers gave the same turns, to the last bit.
        """
        self.seed += 1
        shared: list[Any] = [None]
        if dist.get_rank() == 0:
            shared = [[sample_turns(server, self.seed, self.config.rollout) for server in self.servers]]
        dist.broadcast_object_list(shared)
        (turns, cached), *others = shared[0]
        values = np.random.default_rng(self.seed).normal(size=len(turns))
        self.samples = tuple(to_sample(turn, value) for turn, value in zip(turns, values, strict=True))
        found = self.actor.log_probs(self.samples)
        pairs = zip(found, self.samples, strict=True)
        difference = max(float(np.abs((ours - sample.log_probs) * sample.loss_mask).max()) for ours, sample in pairs)
        return {
            "difference": difference,
            "versions": sorted({version for turn in turns for version in turn.versions}),
            "cached": cached,
            "alike": all(found == turns for found, _ in others),
        }

    def failures(self) -> list[list[str]]:
        """The message on every rank where the last server refuses the key, and where it is not there."""
        found: list[list[str]] = []
        for changes in ({"api_key": "wrong"}, {"url": "http://127.0.0.1:9"}):
            with Publisher(self.config, self.policy, self.shape, self.lines(**changes)) as publisher:
                messages: list[Any] = [None] * dist.get_world_size()
                try:
                    publisher.publish(999)
                except PublishError as error:
                    dist.all_gather_object(messages, str(error))
                assert publisher.version is None
                if dist.get_rank() == 0:
                    self.resume()
                found.append(messages)
        return found

    def resume(self) -> None:
        """Close the update that a failed publish left open on the other server; nobody but a test does that."""
        server = self.servers[0]
        for path in ("/end_weight_update", "/continue_generation"):
            headers = {"Authorization": f"Bearer {server['api_key']}", "Content-Type": "application/json"}
            with urlopen(Request(server["url"] + path, b"{}", headers), timeout=60):
                pass


def run(folder: Path, name: str, servers: dict[str, Any]) -> dict[str, Any]:
    kind, tp, pp, bucket_bytes = CASES[name]
    config = configure(folder / kind.removesuffix("-twice"), tp, pp)
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
            if name == "two-servers":
                found |= {"failures": case.failures(), "after_failures": case.measure()}
    return found


def main(folder: Path) -> None:
    servers = json.loads(os.environ["SERVERS"])
    found = {name: run(folder, name, servers) for name in CASES}
    if os.environ["RANK"] == "0":
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
