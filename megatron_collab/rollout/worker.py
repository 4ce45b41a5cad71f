"""ConversationWorkers: Ray processes that play groups of conversations and have them scored."""

from __future__ import annotations

import gc
from typing import Any

import ray

from megatron_collab.config import Config
from megatron_collab.reward.loop import RewardClient, RewardWorker, start_actor
from megatron_collab.rollout.tools import schemas
from megatron_collab.types import Group, Task


class ConversationWorker:
    """A Player with its own connections to the SGLang server; runs as a Ray actor."""

    def __init__(self, config: Config, servers: list[tuple[str, str]], reward_workers: list[str]) -> None:
        """`servers`: address and key of each SGLang server; `reward_workers`: names of the Ray actors that score."""
        # Imported here: the process that starts the workers needs neither LiteLLM nor the tokenizer.
        from megatron_collab.data.prompts import ChatRenderer
        from megatron_collab.llm.client import LlmClient
        from megatron_collab.llm.limiter import Limiter
        from megatron_collab.rollout.player import Player
        from megatron_collab.rollout.router import Router
        from megatron_collab.rollout.users import Users

        policy = Router(servers, config.rollout)
        renderer = ChatRenderer(config.model.path, schemas(config.rollout.tools))
        self.users = Users(config, LlmClient(Limiter.find()), servers)
        rewards = RewardClient([ray.get_actor(name) for name in reward_workers], config.reward)
        self.player = Player(policy, renderer, self.users, rewards, config)
        gc.freeze()  # what the imports made stays; looking through it costs a quarter of a worker's time

    async def play(self, task: Task, stream: str) -> Group:
        """See Player.play."""
        return await self.player.play(task, stream)

    async def evaluate(self, task: Task, stream: str) -> Group:
        """See Player.evaluate."""
        return await self.player.evaluate(task, stream)

    async def take_counters(self) -> dict[str, int]:
        """What users and tools counted since the last call."""
        return {**self.users.take_counters(), **self.player.sampler.tools.take_counters()}


def start_workers(config: Config, servers: list[tuple[str, str]]) -> tuple[list[Any], list[Any]]:
    """The run's ConversationWorkers and RewardWorkers, spread over the nodes; does not wait for them.

    They end with their handles, or with the Ray session.
    """
    names = [f"reward-{i}" for i in range(config.reward.workers)]
    rewards = [start_actor(RewardWorker, config, name=name) for name in names]
    workers = [start_actor(ConversationWorker, config, servers, names) for _ in range(config.rollout.workers)]
    return workers, rewards
