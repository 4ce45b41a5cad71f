"""The score of a discriminative reward model that an SGLang server of its own serves."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_collab.config import option
from megatron_collab.reward.metrics import Metric
from megatron_collab.reward.model import RewardModelClient, RewardModelError
from megatron_collab.types import Conversation, Missing, Score, Task

if TYPE_CHECKING:
    from megatron_collab.reward.judge import Judge

KEY_VARIABLE = "REWARD_MODEL_API_KEY"


@dataclass(frozen=True)
class RewardModelOptions:
    url: str = option("", "address of the server, as http://10.0.0.5:30000; its key is in REWARD_MODEL_API_KEY")

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(
                f"url={self.url}: give the address of an SGLang server with a reward model, as http://HOST:PORT"
            )


class RewardModel(Metric):
    """The model's output for the whole conversation, unbounded."""

    Options = RewardModelOptions
    seconds = 0.2

    def __init__(self, options: Any, judge: Judge) -> None:
        super().__init__(options, judge)
        self.client = RewardModelClient(options.url, os.environ.get(KEY_VARIABLE))

    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        try:
            return await self.client.score(conversation.messages)
        except RewardModelError as error:
            return Missing(str(error))
