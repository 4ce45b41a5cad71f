"""Scoring on Ray: workers that hold the metrics, and the client that sends them what has ended."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayActorError

from megatron_collab import patches
from megatron_collab.config import Config, RewardConfig
from megatron_collab.reward import metrics
from megatron_collab.runtime import heartbeat, preemption, stacks
from megatron_collab.runtime.process import RunStopped
from megatron_collab.types import Conversation, Ending, Missing, Score, Task

Scores = dict[str, Score]
_CUT_OFF = (Ending.ERROR, Ending.DEADLINE)
_REQUEST = 1.0  # seconds of work in one request: what waits behind it, or is done again where a worker dies
_HANDLING = 0.005  # seconds that a job takes whatever its metrics
_GATHERING = 0.005  # seconds in which conversations that end share requests
_AHEAD = 4  # times the scores that the workers make at once is sent; the rest waits to see who has the least to do
STARTS = 3  # of Ray, in a row, that may fail
_POLL = 0.2  # seconds between looks for the nodes of a cluster
_REQUESTS = 100_000  # that an actor may have at once; the rest would wait where nobody sees them


@contextmanager
def ray_session(config: Config) -> Iterator[None]:
    """Ray for this run: the cluster at RAY_ADDRESS if that is set, else one on this machine that ends with us.

    In a cluster it is joined by way of this machine's own node, which must be there; RunStopped where it has fewer
    nodes than the run after rollout.server.start_timeout seconds.

    Ray's ports are open to the network, for who knows its token; a session of our own has a token of its own.
    """
    quiet = {"log_to_driver": False, "logging_level": "error"}
    with ExitStack() as stack:
        stack.callback(ray.shutdown)
        if "RAY_ADDRESS" in os.environ:
            ray.init(**quiet)
            _await_nodes(config)
        else:
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
            # By itself Ray starts workers at nice 15, which starve beside ranks that are busy.
            os.environ.setdefault("RAY_worker_niceness", "0")
            processes = config.rollout.workers + config.reward.workers  # Ray starts a process a CPU in advance
            _start_ray(num_cpus=processes, **quiet)
            stack.callback(_reaper().communicate, "\n")
        yield


def _start_ray(**options: Any) -> None:
    """A Ray of our own. It gives itself 30 seconds, which a busy machine may not keep to: RunStopped after STARTS."""
    others = set(psutil.Process().children())
    for left in reversed(range(STARTS)):
        heartbeat.beat()
        preemption.check()
        try:
            ray.init("local", include_dashboard=False, **options)
            return
        except Exception as error:  # Ray has no kind of its own for it
            ray.shutdown()
            for child in set(psutil.Process().children()) - others:  # what it leaves behind would start on
                child.kill()
            if not left:
                raise RunStopped(f"Ray did not start, {STARTS} times in a row: {error}") from error


def _await_nodes(config: Config) -> None:
    """Return once the cluster has a node for each of the run's; RunStopped where they do not come."""
    wanted, timeout = config.launch.nodes, config.rollout.server.start_timeout
    deadline = time.monotonic() + timeout
    while (found := sum(node["Alive"] for node in ray.nodes())) < wanted:
        if time.monotonic() > deadline:
            raise RunStopped(
                f"RAY_ADDRESS={os.environ['RAY_ADDRESS']}: {found} Ray nodes after "
                f"rollout.server.start_timeout={timeout:g} s, and launch.nodes={wanted}; start Ray on all of them"
            )
        heartbeat.beat()
        preemption.check()
        time.sleep(_POLL)


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
    options = {"num_cpus": 0.01, "max_restarts": 3, "max_task_retries": 3, "max_concurrency": _REQUESTS}
    actor = ray.remote(**options, scheduling_strategy="SPREAD")
    return actor(kind).options(name=name).remote(*arguments)


@dataclass(frozen=True)
class Job:
    """What a RewardWorker is asked: these metrics of this conversation."""

    names: tuple[str, ...]
    task: Task
    conversation: Conversation


class RewardWorker:
    """Applies the metrics of `reward.weights` to conversations; runs as a Ray actor."""

    def __init__(self, config: Config, name: str | None = None) -> None:
        """`name`, in a process of its own: what the file with its stacks is called after."""
        if name:
            stacks.register(Path(config.run.dir) / stacks.FOLDER, name)
        reward = config.reward
        kinds = {name: metrics.split(name, reward.metrics.get(name, {})) for name in reward.weights}
        judge: Any = _judge(config) if any(kind.judged(options) for kind, options in kinds.values()) else None
        self.timeout = reward.timeout
        self.metrics = {name: kind(options, judge) for name, (kind, options) in kinds.items()}
        # A judge keeps to its own deadline, in which waiting for the limiter does not count.
        self._limits = {
            name: None if kind.judged(options) else reward.timeout for name, (kind, options) in kinds.items()
        }
        self._places = {name: asyncio.Semaphore(reward.concurrency) for name in kinds}  # a slow metric holds its own

    async def ready(self) -> None:
        """Returns once the worker can be asked."""

    @ray.method(max_task_retries=0)  # what it leaves undone when it dies, RewardClient gives to another
    async def score(self, jobs: Sequence[Job]) -> AsyncIterator[dict[int, Scores]]:
        """The scores of each job by its index, as they come; metrics that do not apply to its task are left out.

        Where none has come within reward.timeout, it yields nothing in a dict, to show that it is alive.
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
                async with asyncio.timeout(self._limits.get(name, self.timeout)) as limit:
                    return await self.metrics[name].score(job.task, job.conversation)
            except TimeoutError:
                if not limit.expired():  # it is the metric's own
                    raise
                return Missing(f"no score within reward.timeout={self.timeout:g} s")


def _judge(config: Config) -> Any:
    """The Judge of `reward.judge`, which keeps to the run's limiter and remembers its answers."""
    patches.apply("litellm")
    # Imported here: LiteLLM takes seconds to import, and most metrics do without.
    from megatron_collab.llm import limiter
    from megatron_collab.llm.cache import Cache
    from megatron_collab.llm.client import LlmClient
    from megatron_collab.reward.judge import Judge

    folder = Path(config.llm.cache) if config.llm.cache else Path(config.run.dir) / "llm_cache"
    return Judge(LlmClient(limiter.find(), Cache(folder)), config.reward.judge)


@dataclass(eq=False)
class _Order:
    """A job, the seconds that it takes about, and its scores once they are there."""

    job: Job
    seconds: float
    scores: asyncio.Future[Scores]

    def fill(self, scores: Scores) -> None:
        if not self.scores.done():  # whoever waited may have gone
            self.scores.set_result(scores)


@dataclass(eq=False)
class _Part:
    """Metrics that are asked for in one job: the seconds that takes about, how many more jobs may be sent now, and
    those that wait for it."""

    names: tuple[str, ...]
    seconds: float
    room: int
    waiting: deque[_Order] = field(default_factory=deque)

    def take(self) -> list[_Order]:
        """The orders that go now."""
        taken: list[_Order] = []
        while self.waiting and self.room > 0:
            order = self.waiting.popleft()
            if not order.scores.done():  # else whoever waited is gone
                taken.append(order)
                self.room -= 1
        return taken


@dataclass(eq=False)
class _Worker:
    """The handle of a RewardWorker, and the seconds of work that it was given and has not done."""

    handle: Any
    seconds: float = 0.0


class RewardClient:
    """Sends conversations to the RewardWorkers as they end; each has its scores as soon as they are made.

    Metrics of no cost share a job, each of the others is a job of its own; `chunks` makes requests of the jobs, and
    the worker with the least to do gets the next.
    """

    def __init__(self, workers: Sequence[Any], config: RewardConfig) -> None:
        """`workers`: handles of RewardWorkers."""
        self.names = tuple(config.weights)
        self.deadline = 2 * config.timeout  # a worker says something every reward.timeout, unless it is stuck itself
        seconds = {name: metrics.split(name, config.metrics.get(name, {}))[0].seconds for name in self.names}
        free = tuple(name for name in self.names if not seconds[name])
        parts = [free] if free else []
        parts += [(name,) for name in self.names if seconds[name]]
        room = _AHEAD * config.concurrency * len(workers)
        self._parts = [_Part(names, _HANDLING + sum(seconds[name] for name in names), room) for names in parts]
        self._up = [_Worker(handle) for handle in workers]
        self._down: set[asyncio.Task[None]] = set()  # each waits for a worker to come back
        self._gathering = False
        self._sending: set[asyncio.Task[None]] = set()

    async def score(self, task: Task, conversation: Conversation) -> Scores:
        """The scores of an ended conversation; Missing where no worker answers.

        What a metric raises is raised here, BudgetSpent too.
        """
        if conversation.ending in _CUT_OFF:  # half a conversation says nothing about the policy
            return {name: Missing(conversation.error) for name in self.names}
        scores = await asyncio.gather(*(self._order(part, task, conversation) for part in self._parts))
        return {name: score for some in scores for name, score in some.items()}

    def _order(self, part: _Part, task: Task, conversation: Conversation) -> asyncio.Future[Scores]:
        scores: asyncio.Future[Scores] = asyncio.get_running_loop().create_future()
        part.waiting.append(_Order(Job(part.names, task, conversation), part.seconds, scores))
        self._gather()
        return scores

    def _gather(self) -> None:
        if not self._gathering:
            self._gathering = True
            asyncio.get_running_loop().call_later(_GATHERING, self._send)

    def _send(self) -> None:
        self._gathering = False
        orders = []
        for part in self._parts:
            for order in part.take():
                order.scores.add_done_callback(partial(self._make_room, part))
                orders.append(order)
        for chunk in chunks([order.seconds for order in orders]):
            request = [orders[index] for index in chunk]
            sending = asyncio.create_task(self._have_scored(request))
            self._sending.add(sending)
            sending.add_done_callback(partial(self._sent, request))

    def _make_room(self, part: _Part, scores: asyncio.Future[Scores]) -> None:
        part.room += 1
        if part.waiting:
            self._gather()

    def _sent(self, orders: Sequence[_Order], sending: asyncio.Task[None]) -> None:
        self._sending.discard(sending)
        error = None if sending.cancelled() else sending.exception()
        for order in orders:
            if error and not order.scores.done():
                order.scores.set_exception(error)

    async def _have_scored(self, orders: list[_Order]) -> None:
        """Have the jobs done by one worker after another, as long as they die before it is done."""
        why = "no RewardWorker is there to answer"
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

    async def _ask(self, worker: _Worker, orders: Sequence[_Order]) -> None:
        """Take the scores as they come. Raises RayActorError or _Stuck where they stop coming."""
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
            why = f"the RewardWorker gave no sign of life within {self.deadline:g} s (twice reward.timeout)"
            raise _Stuck(why) from error
        finally:
            worker.seconds -= seconds

    async def _least_busy(self) -> _Worker | None:
        """The worker with the least to do, in turns among equals; where all are down, the first to come back."""
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
        """Ask a worker no more until it is back."""
        if worker in self._up:  # else another request noticed before
            self._up.remove(worker)
            waiting = asyncio.create_task(self._back(worker))
            self._down.add(waiting)
            waiting.add_done_callback(self._down.discard)

    async def _back(self, worker: _Worker) -> None:
        """Ray starts a worker again when it dies; one that died too often stays away."""
        with suppress(RayActorError):
            await worker.handle.ready.remote()
            self._up.append(worker)


class _Stuck(RuntimeError):
    """A worker that lives and does nothing."""


def _give_up(orders: Sequence[_Order], why: str) -> None:
    for order in orders:
        order.fill({name: Missing(why) for name in order.job.names})


def chunks(seconds: Sequence[float]) -> list[list[int]]:
    """Which jobs go in one request: their indices, the longest first. `seconds` is what each takes.

    A request is a second of work at most, or one job.
    """
    requests: list[list[int]] = []
    room = 0.0
    for index in sorted(range(len(seconds)), key=lambda index: -seconds[index]):
        if not requests or seconds[index] > room:
            requests.append([])
            room = _REQUEST
        requests[-1].append(index)
        room -= seconds[index]
    return requests
