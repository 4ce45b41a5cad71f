"""ConversationWorkers: Ray processes that play groups of conversations and have them scored."""

from __future__ import annotations

import gc
from typing import Any

import ray

from megatron_collab.config import Config
from megatron_collab.reward.loop import RewardClient, RewardWorker, start_actor
from megatron_collab.types import Group, Task


class ConversationWorker:
    """A Player with its own connections to the SGLang server; runs as a Ray actor."""

    def __init__(self, config: Config, server_url: str, api_key: str, reward_workers: list[str]) -> None:
        """`reward_workers`: names of the Ray actors that score."""
        # Imported here: the process that starts the workers needs neither LiteLLM nor the tokenizer.
        from megatron_collab.data.prompts import ChatRenderer
        from megatron_collab.rollout.player import Player
        from megatron_collab.rollout.sglang import SGLangClient

        client = SGLangClient(server_url, api_key, config.rollout.turn_timeout)
        rewards = RewardClient([ray.get_actor(name) for name in reward_workers], config.reward)
        self.player = Player(client, ChatRenderer(config.model.path), rewards, config)
        gc.freeze()  # what the imports made stays; looking through it costs a quarter of a worker's time

    async def play(self, task: Task, stream: str, rollouts: int, futures: int) -> Group:
        """See Player.play."""
        return await self.player.play(task, stream, rollouts, futures)


def start_workers(config: Config, url: str, key: str) -> tuple[list[Any], list[Any]]:
    """The run's ConversationWorkers and RewardWorkers, spread over the nodes; does not wait for them.

    They end with their handles, or with the Ray session.
    """
    names = [f"reward-{i}" for i in range(config.reward.workers)]
    rewards = [start_actor(RewardWorker, config.reward, name=name) for name in names]
    workers = [start_actor(ConversationWorker, config, url, key, names) for _ in range(config.rollout.workers)]
    return workers, rewards
