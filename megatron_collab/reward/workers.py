"""RewardWorker: the Ray actor that applies the metrics to conversations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from megatron_collab import patches
from megatron_collab.config import Config
from megatron_collab.reward import metrics
from megatron_collab.runtime import stacks
from megatron_collab.types import Conversation, Missing, Score, Task

Scores = dict[str, Score]


@dataclass(frozen=True)
class Job:
    """One conversation and the metrics to apply to it."""

    names: tuple[str, ...]
    task: Task
    conversation: Conversation


class RewardWorker:
    """Applies the metrics of `reward.weights`; runs as a Ray actor."""

    def __init__(self, config: Config, name: str | None = None) -> None:
        """`name`: of the file with this process's stacks; None where the worker shares a process."""
        if name:
            stacks.register(Path(config.run.dir) / stacks.FOLDER, name)
        reward = config.reward
        kinds = {name: metrics.split(name, reward.metrics.get(name, {})) for name in reward.weights}
        # These have the judge's deadline, which does not count the time spent waiting for the rate limiter.
        self._judged = {name for name, (kind, options) in kinds.items() if kind.judged(options)}
        judge: Any = _judge(config) if self._judged else None
        self.timeout = reward.timeout
        self.metrics = {name: kind(options, judge) for name, (kind, options) in kinds.items()}
        # Per metric: a slow one delays no other.
        self._places = {name: asyncio.Semaphore(reward.concurrency) for name in kinds}

    async def ready(self) -> None:
        """Returns once the worker accepts requests."""

    @ray.method(max_task_retries=0)  # RewardClient gives unfinished jobs to another worker
    async def score(self, jobs: Sequence[Job]) -> AsyncIterator[dict[int, Scores]]:
        """The scores of each job by its index, as they are made; metrics that do not apply to its task are left out.

        Yields an empty dict as a heartbeat where no job finished within reward.timeout.
        """
        making = {asyncio.create_task(self._score(job)): index for index, job in enumerate(jobs)}
        try:
            while making:
                done, _ = await asyncio.wait(making, timeout=self.timeout, return_when=asyncio.FIRST_COMPLETED)
                yield {making.pop(task): task.result() for task in done}
        finally:
            for task in making:
                task.cancel()

    async def _score(self, job: Job) -> Scores:
        scores = await asyncio.gather(*(self._one(name, job) for name in job.names))
        return {name: score for name, score in zip(job.names, scores, strict=True) if score is not None}

    async def _one(self, name: str, job: Job) -> Score | None:
        async with self._places[name]:
            try:
                async with asyncio.timeout(None if name in self._judged else self.timeout) as limit:
                    return await self.metrics[name].score(job.task, job.conversation)
            except TimeoutError:
                if not limit.expired():  # raised by the metric itself
                    raise
                return Missing(f"no score within reward.timeout={self.timeout:g} s")


def _judge(config: Config) -> Any:
    """The Judge of `reward.judge`, with the run's rate limiter and a cache of its answers."""
    patches.apply("litellm")
    # Imported lazily: LiteLLM takes seconds to import, and most metrics do not need it.
    from megatron_collab.llm import limiter
    from megatron_collab.llm.cache import Cache
    from megatron_collab.llm.client import LlmClient
    from megatron_collab.reward.judge import Judge

    folder = Path(config.llm.cache) if config.llm.cache else Path(config.run.dir) / "llm_cache"
    return Judge(LlmClient(limiter.find_limiter(), Cache(folder)), config.reward.judge)
