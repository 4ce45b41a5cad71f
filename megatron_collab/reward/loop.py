"""Scoring on Ray: workers that hold the metrics, and the client that sends them what has ended."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import cycle
from typing import Any

import psutil
import ray
from ray.exceptions import RayActorError

from megatron_collab.config import Config, RewardConfig
from megatron_collab.reward import metrics
from megatron_collab.reward.metrics import Metric
from megatron_collab.types import Conversation, Ending, Missing, Score, Task

Scores = dict[str, Score]
_CUT_OFF = (Ending.ERROR, Ending.DEADLINE)
_GATHERING = 0.02  # seconds in which ended conversations gather to share one call


@contextmanager
def ray_session(config: Config) -> Iterator[None]:
    """Ray for this run: the cluster at RAY_ADDRESS if that is set, else one on this machine that ends with us.

    Ray's ports are open to the network, for who knows its token; a session of our own has a token of its own.
    """
    quiet = {"log_to_driver": False, "logging_level": "error"}
    with ExitStack() as stack:
        stack.callback(ray.shutdown)
        if "RAY_ADDRESS" in os.environ:
            ray.init(**quiet)
        else:
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
            processes = config.rollout.workers + config.reward.workers  # Ray starts a process a CPU in advance
            ray.init("local", num_cpus=processes, include_dashboard=False, **quiet)
            stack.callback(_reaper().communicate, "\n")
        yield


def _reaper() -> subprocess.Popen[str]:
    """A process that ends Ray's agents when this one is killed: by themselves they live on for a minute.

    It waits for a line, which says that all is well, or the end of its input.
    """
    raylets = (child for child in psutil.Process().children() if child.name() == "raylet")
    agents = [str(agent.pid) for raylet in raylets for agent in raylet.children()]
    command = ["sh", "-c", 'read line || kill -9 "$@"', "reaper", *agents]
    return subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)


def start_actor(kind: type, *arguments: Any, name: str | None = None) -> Any:
    """The handle of a Ray actor that is a `kind(*arguments)`, on any node; it ends with its last handle.

    When its process dies it is started again, and what it was doing is done again. `name` is for others to find
    it by: a handle among the arguments could be gone when the actor is started again.
    """
    actor = ray.remote(num_cpus=0.01, max_restarts=3, max_task_retries=3, scheduling_strategy="SPREAD")
    return actor(kind).options(name=name).remote(*arguments)


class RewardWorker:
    """Applies the metrics of `reward.weights` to conversations; runs as a Ray actor."""

    def __init__(self, config: RewardConfig) -> None:
        self.timeout = config.timeout
        self.metrics = {name: metrics.load(name) for name in config.weights}

    async def score(self, pairs: Sequence[tuple[Task, Conversation]]) -> list[Scores]:
        """The scores of each conversation; metrics that do not apply to its task are left out."""
        return await asyncio.gather(*(self._score(task, conversation) for task, conversation in pairs))

    async def _score(self, task: Task, conversation: Conversation) -> Scores:
        if conversation.ending in _CUT_OFF:  # half a conversation says nothing about the policy
            return {name: Missing(conversation.error) for name in self.metrics}
        scored = await asyncio.gather(*(self._one(metric, task, conversation) for metric in self.metrics.values()))
        return {name: score for name, score in zip(self.metrics, scored, strict=True) if score is not None}

    async def _one(self, metric: Metric, task: Task, conversation: Conversation) -> Score | None:
        try:
            async with asyncio.timeout(self.timeout):
                return await metric(task, conversation, 0)
        except TimeoutError:
            return Missing(f"no score within reward.timeout={self.timeout:g} s")


class RewardClient:
    """Sends conversations to the RewardWorkers as they end: many in a call, the workers in turns."""

    def __init__(self, workers: Sequence[Any], config: RewardConfig) -> None:
        self.deadline = 2 * config.timeout  # a worker keeps to reward.timeout unless it is stuck itself
        self.names = tuple(config.weights)
        self._workers = cycle(workers)
        self._tries = len(workers)
        self._waiting: list[tuple[Task, Conversation]] = []
        self._call: asyncio.Task[list[Scores]] | None = None

    async def score(self, task: Task, conversation: Conversation) -> Scores:
        """The scores of an ended conversation; all Missing where no worker answers."""
        index = len(self._waiting)
        self._waiting.append((task, conversation))
        if self._call is None:
            self._call = asyncio.create_task(self._gather_and_call())
        return (await asyncio.shield(self._call))[index]

    async def _gather_and_call(self) -> list[Scores]:
        await asyncio.sleep(_GATHERING)
        pairs, self._waiting, self._call = self._waiting, [], None
        why = ""
        for _ in range(self._tries):
            try:
                async with asyncio.timeout(self.deadline):
                    return await next(self._workers).score.remote(pairs)
            except RayActorError as error:
                why = f"the RewardWorkers died: {error}"
            except TimeoutError:
                why = f"the RewardWorker gave no answer within {self.deadline:g} s (twice reward.timeout)"
                break
        return [{name: Missing(why) for name in self.names} for _ in pairs]
