"""RewardWorkers, the Ray actors that apply the metrics to conversations, and their client."""

from __future__ import annotations

import asyncio
import math
import os
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
from ray.exceptions import RayActorError

from megatron_collab import patches
from megatron_collab.llm.caller import ask_as, caller
from megatron_collab.llm.served import ServedModel
from megatron_collab.llm.tape import open_tape
from megatron_collab.reward.explanations import explained
from megatron_collab.reward.metrics import Judge, scorers
from megatron_collab.reward.spec import RewardSpec
from megatron_collab.runtime import console, gpu_environment, keys, network, stacks
from megatron_collab.runtime.process import ends_caller
from megatron_collab.settings import LlmConfig
from megatron_collab.types import Conversation, Ending, Future, Judgment, Missing, Score, Task, without_private

if TYPE_CHECKING:
    from megatron_collab.llm.cache import Cache

_CUT_OFF = (Ending.ERROR, Ending.DEADLINE)
_GATHER_SECONDS = 0.005  # conversations that end within this time share requests
_BACKLOG = 4  # conversations sent at most, as a multiple of what the workers score at once; the others wait here

Scores = dict[str, Score]


@dataclass(frozen=True)
class Job:
    """One conversation and the names of the metrics to apply to it."""

    names: tuple[str, ...]
    task: Task
    conversation: Conversation
    name: str = ""  # of the conversation; its judge calls are recorded under this name


class Scored(NamedTuple):
    """The scores of a conversation by metric, the judgments of metrics that explain theirs, and scores of its turns."""

    scores: Scores
    judgments: Mapping[str, Judgment] = {}
    turn_scores: Mapping[str, tuple[float, ...]] = {}


_Jobs = dict[asyncio.Future[Scored], Job]


class RewardWorker:
    """Applies metrics to conversations; runs as a Ray actor."""

    def __init__(
        self,
        reward: RewardSpec,
        llm: LlmConfig,
        run_dir: Path,
        name: str | None = None,
        served: Mapping[str, ServedModel] = {},
    ) -> None:
        """`llm`: limits and recordings of judge calls. `served`: the models that the run serves, by name.

        `name`: name of the file for this process's stacks; None if the worker shares a process.
        """
        keys.take()
        os.environ |= network.without_proxy(url for model in served.values() for url, _ in model.addresses)
        if name:
            gpu_environment.enter()
            console.begin(name)
            stacks.register(run_dir / stacks.FOLDER, name)
        self.scored = scored = reward.metrics
        # These have the judge's deadline, which does not count the time spent waiting for the rate limiter.
        self._judged = {name for name, metric in scored.items() if metric.judged}
        self._tape = open_tape(llm, run_dir)
        self._cache: Cache | None = None
        judge = self._judge(reward, llm, run_dir, served) if self._judged else None
        self.timeout = reward.timeout
        self.metrics = {name: metric.make(judge, self._tape) for name, metric in scored.items()}
        for name, model in scorers(scored).items() if served else ():
            self.metrics[name].servers = served[model].addresses
        # One semaphore per metric, so that a slow metric does not delay the others.
        self._places = {name: asyncio.Semaphore(reward.concurrency) for name in scored}

    def _judge(self, reward: RewardSpec, llm: LlmConfig, run_dir: Path, served: Mapping[str, ServedModel]) -> Judge:
        patches.apply("litellm")
        # Imported lazily: LiteLLM takes seconds to import, and most metrics do not need it.
        from megatron_collab.llm import limiter
        from megatron_collab.llm.cache import Cache
        from megatron_collab.llm.client import LlmClient

        self._cache = Cache(Path(llm.cache) if llm.cache else run_dir / "llm_cache")
        bound = ray.get_actor(limiter.NAME)
        client = LlmClient(bound, self._cache, served=served, prices=llm.prices, tape=self._tape)
        return Judge(client, reward.judge)

    async def take_counters(self) -> dict[str, float]:
        """Counts of the metrics and of replayed calls since the previous call of this method."""
        counts: dict[str, float] = self._tape.take_counters() if self._tape else {}
        counts |= {f"{name}_{key}": n for name, metric in self.metrics.items() for key, n in metric.counters.items()}
        for metric in self.metrics.values():
            metric.counters.clear()
        if self._cache:
            counts |= {f"llm_cache_{key}": n for key, n in self._cache.counters.items()}
            self._cache.counters.clear()
        return counts

    async def ready(self) -> None:
        """Returns once the worker accepts requests."""

    @ray.method(max_task_retries=0)  # RewardClient gives unfinished jobs to another worker
    async def score(self, jobs: Sequence[Job]) -> AsyncIterator[dict[int, Scored]]:
        """The scores of each job by its index, as jobs finish; metrics that do not apply to the task are absent.

        Yields an empty dict as a heartbeat if no job finished within reward.timeout.
        """
        pending = {asyncio.create_task(self._score(job)): index for index, job in enumerate(jobs)}
        try:
            while pending:
                done, _ = await asyncio.wait(pending, timeout=self.timeout, return_when=asyncio.FIRST_COMPLETED)
                yield {pending.pop(task): task.result() for task in done}
        finally:
            for task in pending:
                task.cancel()

    async def _score(self, job: Job) -> Scored:
        ask_as(job.name)
        results = await asyncio.gather(*(self._explained(name, job) for name in job.names))
        by_name = dict(zip(job.names, results, strict=True))
        scores = {name: score for name, (score, _) in by_name.items() if score is not None}
        judgments = {name: judgment for name, (_, judgment) in by_name.items() if judgment}
        turn_scores = {name: score for name, score in scores.items() if isinstance(score, tuple)}
        totals = {name: sum(score) if isinstance(score, tuple) else score for name, score in scores.items()}
        return Scored(totals, judgments, turn_scores)

    async def _explained(self, name: str, job: Job) -> tuple[Score | tuple[float, ...] | None, Judgment | None]:
        with explained() as judgment:
            score = await self._apply(name, job)
        return score, judgment()

    async def _apply(self, name: str, job: Job) -> Score | tuple[float, ...] | None:
        """The score of a metric, or those of the turns if it scores turns."""
        async with self._places[name]:
            metric = self.metrics[name]
            try:
                async with asyncio.timeout(None if name in self._judged else self.timeout) as limit:
                    if self.scored[name].scores_turns:
                        turns = await metric.score_turns(job.task, job.conversation)
                        return turns if turns is None or isinstance(turns, Missing) else _of_turns(turns, job)
                    score = await metric.score(job.task, job.conversation)
                    return score if score is None or isinstance(score, Missing) else _finite(score)
            except BaseException as error:  # a custom metric may raise anything
                if ends_caller(error):
                    raise
                if isinstance(error, TimeoutError) and limit.expired():
                    return Missing(f"no score within reward.timeout={self.timeout:g} s")
                metric.counters["failed"] += 1
                return Missing(f"metric {name}: {type(error).__name__}: {' '.join(str(error).split())}")


def _finite(score: Any) -> float:
    if not math.isfinite(number := float(score)):
        raise ValueError(f"a score of {number}; give a finite number, None or Missing")
    return number


def _of_turns(scores: Sequence[Any], job: Job) -> tuple[float, ...]:
    if len(scores) != len(job.conversation.turns):
        raise ValueError(f"{len(scores)} scores of {len(job.conversation.turns)} turns; give a number for each")
    return tuple(map(_finite, scores))


@dataclass(eq=False)
class _Worker:
    """The handle of a RewardWorker and its number of unfinished jobs."""

    handle: Any
    jobs: int = 0


class RewardClient:
    """Sends each conversation to the least loaded worker (a handle); conversations that end together share requests."""

    def __init__(self, workers: Sequence[Any], reward: RewardSpec) -> None:
        self.names = tuple(reward.metrics)
        self.deadline = 2 * reward.timeout  # a worker sends something every reward.timeout unless it is stuck
        self._places = asyncio.Semaphore(_BACKLOG * reward.concurrency * len(workers))
        self._up = deque(_Worker(handle) for handle in workers)
        self._down: set[asyncio.Task[None]] = set()  # each waits for a worker's restart
        self._gathered: _Jobs = {}
        self._sending: set[asyncio.Task[None]] = set()

    async def score(self, task: Task, conversation: Conversation) -> Scores:
        """The scores of `future`."""
        return {**(await self.future(task, conversation)).scores}

    async def future(self, task: Task, conversation: Conversation) -> Future:
        """An ended conversation with its scores and judgments; Missing if a metric fails or no worker answers.

        Metrics do not see the users' private notes. Raises RunStopped if a metric raises it, e.g. for a spent budget.
        """
        if conversation.ending in _CUT_OFF:  # half a conversation says nothing about the policy
            return Future(conversation, self._missing(conversation.error).scores)
        public = replace(conversation, messages=without_private(conversation.messages))
        public_task = replace(task, messages=without_private(task.messages))
        async with self._places:
            if not self._gathered:
                _start(self._send(), self._sending)
            scored: asyncio.Future[Scored] = asyncio.get_running_loop().create_future()
            current = caller()
            self._gathered[scored] = Job(self.names, public_task, public, current.name if current else "")
            return Future(conversation, *(await scored))

    async def _send(self) -> None:
        await asyncio.sleep(_GATHER_SECONDS)
        jobs, self._gathered = self._gathered, {}
        try:
            await self._distribute(jobs, "no RewardWorker is running")
        except Exception as error:  # raised by a metric; the callers raise it
            _settle(jobs, error)

    async def _distribute(self, jobs: _Jobs, why: str) -> None:
        """Send the unscored jobs to workers; their scores are Missing(why) if no worker is up within the deadline."""
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
                self._up.rotate(-1)  # workers with equal load take turns
        await asyncio.gather(*(self._ask(worker, request) for worker, request in requests.items()))

    async def _ask(self, worker: _Worker, jobs: _Jobs) -> None:
        """Settle the scores as they arrive; if the worker dies, other workers score its remaining jobs."""
        loop, waiting = asyncio.get_running_loop(), list(jobs)
        try:
            async with asyncio.timeout(self.deadline) as limit:
                async for results in worker.handle.score.remote(list(jobs.values())):
                    for index, scored in (await results).items():
                        _settle([waiting[index]], scored)
                        worker.jobs -= 1
                    limit.reschedule(loop.time() + self.deadline)
        except RayActorError as error:
            self._mark_down(worker)
            await self._distribute(jobs, f"the RewardWorkers died: {' '.join(str(error).split())}")
        except TimeoutError:
            if not limit.expired():  # raised by a metric
                raise
            self._mark_down(worker)
            why = f"the RewardWorker sent no heartbeat within {self.deadline:g} s (twice reward.timeout)"
            _settle(jobs, self._missing(why))

    def _missing(self, why: str) -> Scored:
        return Scored({name: Missing(why) for name in self.names})

    def _mark_down(self, worker: _Worker) -> None:
        """Send no more jobs to a worker until it is back."""
        if worker in self._up:  # else another request removed it before
            self._up.remove(worker)
            _start(self._wait_for_restart(worker.handle), self._down)

    async def _wait_for_restart(self, handle: Any) -> None:
        """Wait until Ray has restarted a worker that died, which it does up to its restart limit."""
        with suppress(RayActorError):
            await handle.ready.remote()
            self._up.append(_Worker(handle))


def _start(work: Coroutine[Any, Any, None], running: set[asyncio.Task[None]]) -> None:
    """Start a task and keep it in `running` until it ends."""
    task = asyncio.create_task(work)
    running.add(task)
    task.add_done_callback(running.discard)


def _settle(waiting: Iterable[asyncio.Future[Scored]], outcome: Scored | Exception) -> None:
    for scores in waiting:
        if scores.done():  # also if the caller was cancelled
            continue
        if isinstance(outcome, Exception):
            scores.set_exception(outcome)
        else:
            scores.set_result(outcome)
