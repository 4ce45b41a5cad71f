"""Metrics that stand in for registered ones, and a worker and a caller that use them."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from megatron_collab.launch.play_specs import reward_spec
from megatron_collab.llm.limiter import BudgetSpent
from megatron_collab.reward.metrics import Metric
from megatron_collab.reward.workers import RewardClient, RewardWorker, Scores
from megatron_collab.settings import LlmConfig, RewardConfig
from megatron_collab.types import Conversation, Ending, Finish, Message, Score, Task, Turn

TASK = Task("t", (Message("user", "hi"),), "goal", "answer", "testing")
WEIGHTS = {"asks": 1.0, "token_amount": -0.1}


def ended(text: str, ending: Ending = Ending.TURN_LIMIT, error: str = "") -> Conversation:
    ids = tuple(range(len(text)))
    turn = Turn((1,), ids, (-1.0,) * len(ids), (0,) * len(ids), Finish.STOP, text)
    return Conversation(TASK.messages, (1,)).add_turn(turn).end(ending, error)


class Length(Metric):
    """Characters of the reply, without delay."""

    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        return float(len(conversation.replies[-1]))


class Process(Metric):
    """Id of the scoring process, after a short delay."""

    seconds = 0.3

    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        await asyncio.sleep(self.seconds)
        return float(os.getpid())


class Slow(Metric):
    """Takes an hour for a reply that begins with "never"."""

    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        if conversation.replies[-1].startswith("never"):
            await asyncio.sleep(3600)
        return 1.0


class Buggy(Metric):
    """Fails in the way that the last reply names; 1 if that is "good"."""

    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        match conversation.replies[-1]:
            case "good":
                return 1.0
            case "nan":
                return math.nan
            case "text":
                return "high"  # type: ignore[return-value]
            case "deep":
                return self._deep()
            case "timeout":
                raise TimeoutError("a bug")
        raise KeyError("a bug")

    def _deep(self) -> float:
        return self._deep()


class Broke(Metric):
    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        raise BudgetSpent("llm.budget_usd=1 is used up")


class Judged(Metric):
    """Whether there is a judge with a limiter."""

    @classmethod
    def judged(cls, options: Any) -> bool:
        return True

    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        return float(self.judge.client._queue is not None)


class Reasoned(Metric):
    """1, with the reply as the reason."""

    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        self.explain(f"replied {conversation.replies[-1]}")
        return 1.0


class Turns(Metric):
    """The length of each reply; one score too few for "short"."""

    async def score_turns(self, task: Task, conversation: Conversation) -> Sequence[float]:
        lengths = [float(len(reply)) for reply in conversation.replies]
        return lengths[1:] if conversation.replies[-1] == "short" else lengths


METRICS = {kind.__name__.lower(): kind for kind in (Length, Process, Slow, Buggy, Broke, Judged, Reasoned, Turns)}


class TestingWorker(RewardWorker):
    """A RewardWorker that gives its process; pytest does not collect the class."""

    __test__ = False

    async def pid(self) -> int:
        return os.getpid()


class Asker:
    """Requests scores from a Ray actor, as a ConversationWorker does."""

    def __init__(self, workers: list[str], config: RewardConfig) -> None:
        self.client = RewardClient([ray.get_actor(name) for name in workers], reward_spec(config))

    async def score(self, text: str) -> Scores:
        return await self.client.score(TASK, ended(text))


def settings(*names: str, **options: Any) -> RewardConfig:
    """Each name is that of a metric of this file, in lower case, or of a registered one."""
    paths = {name: {"metric": f"{__name__}:{METRICS[name].__name__}"} for name in names if name in METRICS}
    return RewardConfig(weights=dict.fromkeys(names, 1.0), metrics=paths, **options)


def worker_of(reward: RewardConfig, **more: Any) -> RewardWorker:
    return RewardWorker(reward_spec(reward), LlmConfig(), Path("unused"), **more)
