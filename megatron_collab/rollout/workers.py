"""ConversationWorkers: Ray processes that play groups of conversations and have them scored."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from megatron_collab import patches
from megatron_collab.config import Config
from megatron_collab.reward.workers import RewardClient, RewardWorker
from megatron_collab.rollout.tools.toolbox import make_tools, schemas
from megatron_collab.runtime import stacks
from megatron_collab.runtime.ray_cluster import start_actor
from megatron_collab.types import Group, Task

_GARBAGE = 50_000  # objects made and not yet gone, after which Python looks for cycles


class ConversationWorker:
    """A Player with its own connections to the SGLang server; runs as a Ray actor."""

    def __init__(self, config: Config, servers: list[tuple[str, str]], reward_workers: list[str], name: str) -> None:
        """`servers`: address and key of each SGLang server; `reward_workers`: names of the Ray actors that score."""
        stacks.register(Path(config.run.dir) / stacks.FOLDER, name)
        patches.apply("litellm")
        # Imported here: the process that starts the workers needs neither LiteLLM nor the tokenizer.
        from megatron_collab.data.chat_template import ChatRenderer
        from megatron_collab.inference.router import Router
        from megatron_collab.llm import limiter
        from megatron_collab.llm.client import LlmClient
        from megatron_collab.rollout.conversation import Player
        from megatron_collab.rollout.users import Users

        keys = {f"{url}/v1": key for url, key in servers}
        self.endpoints = list(keys)
        self.policy = Router(servers, config.rollout)
        renderer = ChatRenderer(config.model.path, schemas(make_tools(config.rollout)))
        self.users = Users(config, LlmClient(ray.get_actor(limiter.NAME), keys=keys), self.endpoints)
        rewards = RewardClient([ray.get_actor(name) for name in reward_workers], config.reward)
        self.player = Player(self.policy, renderer, self.users, rewards, config)
        # Neither what the imports made nor conversations are garbage: traversing them often costs a third of the time.
        gc.freeze()
        gc.set_threshold(_GARBAGE)

    async def play(self, task: Task, stream: str) -> Group:
        return await self.player.play(task, stream)

    async def evaluate(self, task: Task, stream: str) -> Group:
        return await self.player.evaluate(task, stream)

    async def use_servers(self, servers: Sequence[int]) -> None:
        """From now on use these servers, by their numbers, and no others."""
        self.policy.use(servers)
        if servers:  # without any, conversations fail before their users are asked
            self.users.engine = tuple(self.endpoints[index] for index in servers)

    async def take_counters(self) -> dict[str, int]:
        """Counts of users, tools and connections to the servers since the last call."""
        users, tools = self.users.counters, self.player.tools.counters
        taken = {**users, **tools, **self.policy.take_counters()}
        users.clear()
        tools.clear()
        return taken


@dataclass(frozen=True)
class Workers:
    """The handles of a run's Ray actors, which end with their handles or with the Ray session."""

    conversations: list[Any]
    rewards: list[Any]
    limiter: Any

    def stop(self) -> None:
        """End the workers, and with them what they ask of users and judges."""
        for worker in (*self.conversations, *self.rewards):
            ray.kill(worker)


def start_workers(
    config: Config, servers: list[tuple[str, str]], scoring: Mapping[str, Sequence[tuple[str, str]]]
) -> Workers:
    """The run's workers, spread over the nodes, and its limiter; does not wait for them.

    Address and key of each server: `servers` of the policy, `scoring` by metric.
    """
    from megatron_collab.llm import limiter

    bound = limiter.start_limiter(config.llm, Path(config.run.dir) / "spend.json")
    names = [f"reward-{i}" for i in range(config.reward.workers)]
    rewards = [start_actor(RewardWorker, config, name, scoring, name=name) for name in names]
    players = [
        start_actor(ConversationWorker, config, servers, names, f"conversation-{i}")
        for i in range(config.rollout.workers)
    ]
    return Workers(players, rewards, bound)
