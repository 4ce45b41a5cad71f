"""RewardWorkers, the Ray actors that apply the metrics to conversations, and their client."""

from __future__ import annotations

import asyncio
import math
import os
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError

from megatron_collab import patches
from megatron_collab.config import Config, RewardConfig
from megatron_collab.llm.caller import ask_as, caller
from megatron_collab.llm.served import ServedModel
from megatron_collab.llm.tape import open_tape
from megatron_collab.reward import metrics
from megatron_collab.runtime import gpu_environment, keys, network, stacks
from megatron_collab.runtime.process import RunStopped
from megatron_collab.runtime.redact import redact_output
from megatron_collab.types import Conversation, Ending, Missing, Score, Task

if TYPE_CHECKING:
    from megatron_collab.llm.cache import Cache

_CUT_OFF = (Ending.ERROR, Ending.DEADLINE)
_GATHER_SECONDS = 0.005  # conversations that end within this time share requests
_AHEAD = 4  # times the conversations that the workers score at once are sent; the rest waits for a free worker

Scores = dict[str, Score]


@dataclass(frozen=True)
class Job:
    """One conversation and the names of the metrics to apply to it."""

    names: tuple[str, ...]
    task: Task
    conversation: Conversation
    name: str = ""  # of the conversation, as whose the calls of judges are recorded


_Jobs = dict[asyncio.Future[Scores], Job]


class RewardWorker:
    """Applies the metrics of `reward.weights`; runs as a Ray actor."""

    def __init__(self, config: Config, name: str | None = None, served: Mapping[str, ServedModel] = {}) -> None:
        """`name`: of the file with this process's stacks; None where the worker shares a process.

        `served`: by name, the models that the run serves.
        """
        keys.take()
        os.environ |= network.without_proxy(url for model in served.values() for url, _ in model.addresses)
        if name:
            gpu_environment.enter()
            redact_output()
            stacks.register(Path(config.run.dir) / stacks.FOLDER, name)
        reward = config.reward
        kinds = {name: metrics.split(name, reward.metrics.get(name, {})) for name in reward.weights}
        # These have the judge's deadline, which does not count the time spent waiting for the rate limiter.
        self._judged = {name for name, (kind, options) in kinds.items() if kind.judged(options)}
        judge: Any = None
        self._tape = open_tape(config)
        self._cache: Cache | None = None
        if self._judged:
            patches.apply("litellm")
            # Imported lazily: LiteLLM takes seconds to import, and most metrics do not need it.
            from megatron_collab.llm import limiter
            from megatron_collab.llm.cache import Cache
            from megatron_collab.llm.client import LlmClient

            folder = Path(config.llm.cache) if config.llm.cache else Path(config.run.dir) / "llm_cache"
            self._cache = Cache(folder)
            bound = ray.get_actor(limiter.NAME)
            client = LlmClient(bound, self._cache, served=served, prices=config.llm.prices, tape=self._tape)
            judge = metrics.Judge(client, reward.judge)
        self.timeout = reward.timeout
        self.metrics = {name: kind(options, judge) for name, (kind, options) in kinds.items()}
        for name, made in self.metrics.items():
            made.name, made.tape = name, self._tape
        for metric, model in metrics.scorers(reward).items() if served else ():
            self.metrics[metric].servers = served[model].addresses
        # Per metric: a slow one delays no other.
        self._places = {name: asyncio.Semaphore(reward.concurrency) for name in kinds}

    async def take_counters(self) -> dict[str, float]:
        """Counts of the metrics and of replayed calls since the last call."""
        taken: dict[str, float] = self._tape.take_counters() if self._tape else {}
        taken |= {f"{metric}_{what}": n for metric, made in self.metrics.items() for what, n in made.counters.items()}
        for made in self.metrics.values():
            made.counters.clear()
        if self._cache:
            taken |= {f"llm_cache_{what}": n for what, n in self._cache.counters.items()}
            self._cache.counters.clear()
        return taken

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
        ask_as(job.name)
        scores = await asyncio.gather(*(self._one(name, job) for name in job.names))
        return {name: score for name, score in zip(job.names, scores, strict=True) if score is not None}

    async def _one(self, name: str, job: Job) -> Score | None:
        async with self._places[name]:
            metric = self.metrics[name]
            try:
                async with asyncio.timeout(None if name in self._judged else self.timeout) as limit:
                    score = await metric.score(job.task, job.conversation)
                    return score if score is None or isinstance(score, Missing) else _finite(score)
            except RunStopped:
                raise
            except Exception as error:  # of a metric from anywhere
                if isinstance(error, TimeoutError) and limit.expired():
                    return Missing(f"no score within reward.timeout={self.timeout:g} s")
                metric.counters["failed"] += 1
                return Missing(f"metric {name}: {type(error).__name__}: {' '.join(str(error).split())}")


def _finite(score: Any) -> float:
    if not math.isfinite(number := float(score)):
        raise ValueError(f"a score of {number}; give a finite number, None or Missing")
    return number


@dataclass(eq=False)
class _Worker:
    """The handle of a RewardWorker, and how many jobs it was sent and has not finished."""

    handle: Any
    jobs: int = 0


class RewardClient:
    """Sends each conversation to the worker (a handle) with the least to do; those that end together share requests."""

    def __init__(self, workers: Sequence[Any], config: RewardConfig) -> None:
        self.names = tuple(config.weights)
        self.deadline = 2 * config.timeout  # a worker sends something every reward.timeout unless it is stuck
        self._places = asyncio.Semaphore(_AHEAD * config.concurrency * len(workers))
        self._up = deque(_Worker(handle) for handle in workers)
        self._down: set[asyncio.Task[None]] = set()  # each waits for a worker to come back
        self._gathered: _Jobs = {}
        self._sending: set[asyncio.Task[None]] = set()

    async def score(self, task: Task, conversation: Conversation) -> Scores:
        """The scores of an ended conversation, Missing where a metric fails or no worker answers.

        Raises RunStopped where a metric does, as for a spent budget.
        """
        if conversation.ending in _CUT_OFF:  # half a conversation says nothing about the policy
            return self._missing(conversation.error)
        async with self._places:
            if not self._gathered:
                _start(self._send(), self._sending)
            scores: asyncio.Future[Scores] = asyncio.get_running_loop().create_future()
            asking = caller()
            self._gathered[scores] = Job(self.names, task, conversation, asking.name if asking else "")
            return await scores

    async def _send(self) -> None:
        await asyncio.sleep(_GATHER_SECONDS)
        jobs, self._gathered = self._gathered, {}
        try:
            await self._share(jobs, "no RewardWorker is running")
        except Exception as error:  # of a metric: the callers raise it
            _settle(jobs, error)

    async def _share(self, jobs: _Jobs, why: str) -> None:
        """Have workers make the scores that are not made yet; Missing(why) where none is up within the deadline."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.deadline):
                while not self._up and self._down:
                    await asyncio.wait(self._down, return_when=asyncio.FIRST_COMPLETED)
        if not self._up:
            return _settle(jobs, self._missing(why))
        requests: dict[_Worker, _Jobs] = defaultdict(dict)
        for scores, job in jobs.items():
            if not scores.done():
                worker = min(self._up, key=attrgetter("jobs"))
                worker.jobs += 1
                requests[worker][scores] = job
                self._up.rotate(-1)  # equals take turns
        await asyncio.gather(*(self._ask(worker, request) for worker, request in requests.items()))

    async def _ask(self, worker: _Worker, jobs: _Jobs) -> None:
        """Settle the scores as they arrive; those of a worker that dies are made by the others."""
        loop, waiting = asyncio.get_running_loop(), list(jobs)
        try:
            async with asyncio.timeout(self.deadline) as limit:
                async for some in worker.handle.score.remote(list(jobs.values())):
                    for index, scores in (await some).items():
                        _settle([waiting[index]], scores)
                        worker.jobs -= 1
                    limit.reschedule(loop.time() + self.deadline)
        except RayActorError as error:
            self._lose(worker)
            await self._share(jobs, f"the RewardWorkers died: {' '.join(str(error).split())}")
        except TimeoutError:
            if not limit.expired():  # raised by a metric
                raise
            self._lose(worker)
            why = f"the RewardWorker sent no heartbeat within {self.deadline:g} s (twice reward.timeout)"
            _settle(jobs, self._missing(why))

    def _missing(self, why: str) -> Scores:
        return {name: Missing(why) for name in self.names}

    def _lose(self, worker: _Worker) -> None:
        """Send nothing more to a worker until it is back."""
        if worker in self._up:  # else another request noticed before
            self._up.remove(worker)
            _start(self._back(worker.handle), self._down)

    async def _back(self, handle: Any) -> None:
        """Ray restarts a worker that died, up to its limit of restarts."""
        with suppress(RayActorError):
            await handle.ready.remote()
            self._up.append(_Worker(handle))


def _start(work: Coroutine[Any, Any, None], running: set[asyncio.Task[None]]) -> None:
    """Start a task, which is in `running` until it ends."""
    task = asyncio.create_task(work)
    running.add(task)
    task.add_done_callback(running.discard)


def _settle(waiting: Iterable[asyncio.Future[Scores]], outcome: Scores | Exception) -> None:
    for scores in waiting:
        if scores.done():  # also where the caller was cancelled
            continue
        if isinstance(outcome, Exception):
            scores.set_exception(outcome)
        else:
            scores.set_result(outcome)
