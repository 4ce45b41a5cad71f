"""ConversationWorkers: Ray processes that play groups of conversations and have them scored."""

from __future__ import annotations

import gc
from typing import Any

from megatron_collab.config import Config
from megatron_collab.reward.loop import RewardClient, RewardWorker, start_actor
from megatron_collab.types import Group, Task


class ConversationWorker:
    """A Player with its own connections to the SGLang server; runs as a Ray actor."""

    def __init__(self, config: Config, server_url: str, api_key: str, reward_workers: list[Any]) -> None:
        # Imported here: the process that starts the workers needs neither LiteLLM nor the tokenizer.
        from megatron_collab.data.prompts import ChatRenderer
        from megatron_collab.rollout.player import Player
        from megatron_collab.rollout.sglang import SGLangClient

        client = SGLangClient(server_url, api_key, config.rollout.turn_timeout)
        rewards = RewardClient(reward_workers, config.reward)
        self.player = Player(client, ChatRenderer(config.model.path), rewards, config)
        gc.freeze()  # what the imports made stays; looking through it costs a quarter of a worker's time

    async def play(self, task: Task, stream: str, rollouts: int, futures: int) -> Group:
        """See Player.play."""
        return await self.player.play(task, stream, rollouts, futures)


def start_workers(config: Config, url: str, key: str) -> list[Any]:
    """The run's ConversationWorkers, spread over the nodes, with their RewardWorkers; does not wait for them.

    They end with the Ray session.
    """
    rewards = [start_actor(RewardWorker, config.reward) for _ in range(config.reward.workers)]
    return [start_actor(ConversationWorker, config, url, key, rewards) for _ in range(config.rollout.workers)]
