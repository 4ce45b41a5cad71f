"""RewardClient: sends ended conversations to the RewardWorkers and returns their scores."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from ray.exceptions import RayActorError

from megatron_collab.config import RewardConfig
from megatron_collab.reward.workers import Job, Scores
from megatron_collab.types import Conversation, Ending, Missing, Task

_CUT_OFF = (Ending.ERROR, Ending.DEADLINE)
_GATHER_SECONDS = 0.005  # conversations that end within this time share requests
_AHEAD = 4  # times the conversations that the workers score at once are sent; the rest waits for a free worker

_Jobs = dict[asyncio.Future[Scores], Job]


@dataclass(eq=False)
class _Worker:
    """The handle of a RewardWorker, and how many jobs it was sent and has not finished."""

    handle: Any
    jobs: int = 0


class RewardClient:
    """Sends each conversation to the worker with the least to do; those that end together share requests.

    Scores are returned as they arrive, not with their request.
    """

    def __init__(self, workers: Sequence[Any], config: RewardConfig) -> None:
        """`workers`: handles of RewardWorkers."""
        self.names = tuple(config.weights)
        self.deadline = 2 * config.timeout  # a worker sends something every reward.timeout unless it is stuck
        self._places = asyncio.Semaphore(_AHEAD * config.concurrency * len(workers))
        self._up = deque(_Worker(handle) for handle in workers)
        self._down: set[asyncio.Task[None]] = set()  # each waits for a worker to come back
        self._gathered: _Jobs = {}
        self._sending: set[asyncio.Task[None]] = set()

    async def score(self, task: Task, conversation: Conversation) -> Scores:
        """The scores of an ended conversation; Missing where no worker answers.

        What a metric raises is raised here, BudgetSpent too.
        """
        if conversation.ending in _CUT_OFF:  # half a conversation says nothing about the policy
            return self._missing(conversation.error)
        async with self._places:
            if not self._gathered:
                _start(self._send(), self._sending)
            scores: asyncio.Future[Scores] = asyncio.get_running_loop().create_future()
            self._gathered[scores] = Job(self.names, task, conversation)
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
