"""RewardClient: sends ended conversations to the RewardWorkers and returns their scores."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from ray.exceptions import RayActorError

from megatron_collab.config import RewardConfig
from megatron_collab.reward import metrics
from megatron_collab.reward.workers import Job, Scores
from megatron_collab.types import Conversation, Ending, Missing, Task

_CUT_OFF = (Ending.ERROR, Ending.DEADLINE)
_REQUEST_SECONDS = 1.0  # of work in one request: it delays what is queued behind it, and is repeated if a worker dies
_OVERHEAD_SECONDS = 0.005  # of a job, whatever its metrics
_GATHER_SECONDS = 0.005  # conversations that end within this time share requests
_AHEAD = 4  # times the scores that the workers make at once is sent; the rest waits for whichever worker is free first


@dataclass(eq=False)
class _Part:
    """Metrics that are applied in one job: its estimated seconds, and how many such jobs may be sent at once."""

    names: tuple[str, ...]
    seconds: float
    places: asyncio.Semaphore


@dataclass(eq=False)
class _Order:
    """A job, its estimated seconds, and the future of its scores."""

    job: Job
    seconds: float
    scores: asyncio.Future[Scores]

    def fill(self, scores: Scores) -> None:
        if not self.scores.done():  # else the caller was cancelled
            self.scores.set_result(scores)


@dataclass(eq=False)
class _Worker:
    """The handle of a RewardWorker, and the estimated seconds of work that it was sent and has not finished."""

    handle: Any
    seconds: float = 0.0


class RewardClient:
    """Batches jobs into requests and sends each request to the worker with the least work.

    Metrics of no cost share a job, each of the others is a job of its own; `chunks` groups jobs into requests. Scores
    are returned as they arrive, not with their request.
    """

    def __init__(self, workers: Sequence[Any], config: RewardConfig) -> None:
        """`workers`: handles of RewardWorkers."""
        self.names = tuple(config.weights)
        self.deadline = 2 * config.timeout  # a worker sends something every reward.timeout unless it is stuck
        seconds = {name: metrics.split(name, config.metrics.get(name, {}))[0].seconds for name in self.names}
        free = tuple(name for name in self.names if not seconds[name])
        costly = [(name,) for name in self.names if seconds[name]]
        at_once = _AHEAD * config.concurrency * len(workers)
        self._parts = [
            _Part(names, _OVERHEAD_SECONDS + sum(seconds[name] for name in names), asyncio.Semaphore(at_once))
            for names in ([free] if free else []) + costly
        ]
        self._up = [_Worker(handle) for handle in workers]
        self._down: set[asyncio.Task[None]] = set()  # each waits for a worker to come back
        self._gathered: list[_Order] = []
        self._sending: set[asyncio.Task[None]] = set()

    async def score(self, task: Task, conversation: Conversation) -> Scores:
        """The scores of an ended conversation; Missing where no worker answers.

        What a metric raises is raised here, BudgetSpent too.
        """
        if conversation.ending in _CUT_OFF:  # half a conversation says nothing about the policy
            return {name: Missing(conversation.error) for name in self.names}
        scores = await asyncio.gather(*(self._score(part, task, conversation) for part in self._parts))
        return {name: score for some in scores for name, score in some.items()}

    async def _score(self, part: _Part, task: Task, conversation: Conversation) -> Scores:
        loop = asyncio.get_running_loop()
        async with part.places:
            order = _Order(Job(part.names, task, conversation), part.seconds, loop.create_future())
            if not self._gathered:
                loop.call_later(_GATHER_SECONDS, self._send)
            self._gathered.append(order)
            return await order.scores

    def _send(self) -> None:
        orders, self._gathered = self._gathered, []
        for chunk in chunks([order.seconds for order in orders]):
            sending = asyncio.create_task(self._have_scored([orders[index] for index in chunk]))
            self._sending.add(sending)
            sending.add_done_callback(self._sending.discard)

    async def _have_scored(self, orders: list[_Order]) -> None:
        """Fill the orders; those of a worker that dies are sent to the next."""
        why = "no RewardWorker is running"
        try:
            while orders := [order for order in orders if not order.scores.done()]:
                worker = await self._least_busy()
                if worker is None:
                    return _give_up(orders, why)
                try:
                    await self._ask(worker, orders)
                except RayActorError as error:
                    why = f"the RewardWorkers died: {' '.join(str(error).split())}"
                    self._lose(worker)
                except _Stuck as error:
                    self._lose(worker)
                    return _give_up(orders, str(error))
        except Exception as error:  # of a metric: the callers raise it
            for order in orders:
                if not order.scores.done():
                    order.scores.set_exception(error)

    async def _ask(self, worker: _Worker, orders: Sequence[_Order]) -> None:
        """Receive the scores as they arrive. Raises RayActorError or _Stuck where they stop arriving."""
        loop, seconds = asyncio.get_running_loop(), sum(order.seconds for order in orders)
        worker.seconds += seconds
        try:
            async with asyncio.timeout(self.deadline) as limit:
                async for some in worker.handle.score.remote([order.job for order in orders]):
                    for index, scores in (await some).items():
                        orders[index].fill(scores)
                    limit.reschedule(loop.time() + self.deadline)
        except TimeoutError as error:
            if not limit.expired():
                raise
            why = f"the RewardWorker sent no heartbeat within {self.deadline:g} s (twice reward.timeout)"
            raise _Stuck(why) from error
        finally:
            worker.seconds -= seconds

    async def _least_busy(self) -> _Worker | None:
        """The worker with the least work, in turn among equals; where all are down, the first to come back."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.deadline):
                while not self._up and self._down:
                    await asyncio.wait(self._down, return_when=asyncio.FIRST_COMPLETED)
        if not self._up:
            return None
        worker = min(self._up, key=attrgetter("seconds"))
        self._up.remove(worker)
        self._up.append(worker)
        return worker

    def _lose(self, worker: _Worker) -> None:
        """Send nothing more to a worker until it is back."""
        if worker in self._up:  # else another request noticed before
            self._up.remove(worker)
            waiting = asyncio.create_task(self._back(worker))
            self._down.add(waiting)
            waiting.add_done_callback(self._down.discard)

    async def _back(self, worker: _Worker) -> None:
        """Ray restarts a worker that died, up to its limit of restarts."""
        with suppress(RayActorError):
            await worker.handle.ready.remote()
            self._up.append(worker)


class _Stuck(RuntimeError):
    """A worker that is alive and sends nothing."""


def _give_up(orders: Sequence[_Order], why: str) -> None:
    for order in orders:
        order.fill({name: Missing(why) for name in order.job.names})


def chunks(seconds: Sequence[float]) -> list[list[int]]:
    """Groups jobs into requests: lists of their indices, the longest jobs first. `seconds`: of each job.

    A request holds at most _REQUEST_SECONDS of work, or one job.
    """
    requests: list[list[int]] = []
    room = 0.0
    for index in sorted(range(len(seconds)), key=lambda index: -seconds[index]):
        if not requests or seconds[index] > room:
            requests.append([])
            room = _REQUEST_SECONDS
        requests[-1].append(index)
        room -= seconds[index]
    return requests
