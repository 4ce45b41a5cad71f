"""Rate limits and budget of all calls to language models: requests and tokens per minute, concurrency, US dollars.

`Limiter` keeps the accounts in one Ray actor per run. The calls of a process wait in its `CallQueue`, which has one
message to the limiter in flight and batches calls that arrive meanwhile into the next. It has no more calls running
than the process may have connections.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import resource
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, islice, takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megatron_collab.runtime import files
from megatron_collab.runtime.process import RunStopped
from megatron_collab.settings import LlmConfig

NAME = "limiter"
MINUTE = 60.0
_POLL = 0.1  # seconds until a queue asks again after no call was admitted
_AT_ONCE = 256  # requests in one message
_TO_A_HOST = 500  # connections that LiteLLM opens to a host; further calls would wait there and time out
_WRITE_AFTER = 1.0  # seconds


@dataclass(frozen=True)
class Reservation:
    """Upper bounds of a call that waits to begin: its tokens, and the seconds after which it has certainly ended.

    `usd`: upper bound of its price; None if its model has no price.
    """

    tokens: int
    seconds: float
    usd: float | None = 0.0


@dataclass(frozen=True)
class FinishedCall:
    """A call that has ended: its number, its tokens and its price; None if unknown."""

    call: int
    tokens: int | None = None
    usd: float | None = 0.0


class BudgetSpent(RunStopped):
    """llm.budget_usd is used up, so the run ends. It is not the failure of one call and must not become Missing."""


class Limiter:
    """Admits calls within the limits of `config` in every sliding minute.

    A call counts with its reserved tokens until it reports its actual usage. Running calls are not stopped, so the
    budget may be exceeded by their price. If a process dies, its calls end when their time is up and count as reserved.

    Spending continues from the file `ledger`: earlier starts of the run and repeated steps count too. After a crash,
    the spending since the last `write` (at most one second) is lost, the sliding minute starts empty, and a message
    without an answer counts twice.
    """

    def __init__(self, config: LlmConfig, ledger: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: the time in seconds."""
        self.config, self._ledger, self._clock = config, ledger, clock
        # `usd` covers all calls but the `unpriced`, whose price is unknown; a budget excludes these.
        self._spend: dict[str, float] = {"calls": 0, "tokens": 0, "usd": 0.0, "unpriced": 0}
        if ledger.is_file():
            self._spend |= json.loads(ledger.read_text())
        self._changed = False  # since the ledger was written
        self._numbers = count(secrets.randbits(62))  # distinct from the numbers of a limiter before this one
        self._running: dict[int, Reservation] = {}
        self._ends: list[tuple[float, int]] = []  # a heap: when a call has certainly ended, also of calls that have
        self._given_up: set[int] = set()  # calls that never reported and were counted as reserved
        self._minute: dict[int, tuple[float, int]] = {}  # call: its start and tokens, in order of start
        self._tokens = 0  # of the calls in _minute

    async def talk(self, finished: Sequence[FinishedCall], reservations: Sequence[Reservation]) -> list[int]:
        """Record the calls that ended, then admit as many of `reservations` as the limits allow; returns their numbers.

        Raises BudgetSpent, after recording. Asynchronous, so that Ray runs the actor on an event loop, which also
        writes the ledger if no further message arrives.
        """
        self._forget(now := self._clock())
        for call in finished:
            self._running.pop(call.call, None)
            if call.call not in self._given_up:
                self._count(call.tokens, call.usd)
            if call.call in self._minute and call.tokens is not None:
                began, reserved = self._minute[call.call]
                self._minute[call.call] = (began, call.tokens)
                self._tokens += call.tokens - reserved
        budget, spend = self.config.budget_usd, self._spend
        if budget is not None and spend["usd"] >= budget:
            self.write()
            raise BudgetSpent(
                f"llm.budget_usd={budget:g} is used up: {spend['calls']} calls cost {spend['usd']:.4g} USD; "
                f"raise it to continue from the last checkpoint"
            )
        return [self._begin(reservation, now) for reservation in takewhile(self._may_begin, reservations)]

    def spend(self) -> dict[str, float]:
        """Write the ledger; returns the run's totals so far: calls, tokens, usd, unpriced."""
        self.write()
        return dict(self._spend)

    def write(self) -> None:
        """Write the ledger. Raises RunStopped if that fails."""
        if self._changed:
            files.replace(self._ledger, json.dumps(self._spend))
            self._changed = False

    def _count(self, tokens: int | None, usd: float | None) -> None:
        if not self._changed:
            asyncio.get_running_loop().call_later(_WRITE_AFTER, self.write)
        self._changed = True
        self._spend["calls"] += 1
        self._spend["tokens"] += tokens or 0
        self._spend["usd"] += usd or 0.0
        self._spend["unpriced"] += usd is None

    def _forget(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            _, call = heapq.heappop(self._ends)
            if reservation := self._running.pop(call, None):
                self._count(reservation.tokens, reservation.usd)
                self._given_up.add(call)
        for call in list(takewhile(lambda call: now - self._minute[call][0] >= MINUTE, self._minute)):
            self._tokens -= self._minute.pop(call)[1]

    def _may_begin(self, reservation: Reservation) -> bool:
        config, used = self.config, len(self._minute)
        if config.max_concurrent is not None and len(self._running) >= config.max_concurrent:
            return False
        if config.requests_per_minute is not None and used >= config.requests_per_minute:
            return False
        limit = config.tokens_per_minute
        # A call above the limit is admitted if the minute is empty.
        return limit is None or used == 0 or self._tokens + reservation.tokens <= limit

    def _begin(self, reservation: Reservation, now: float) -> int:
        call = next(self._numbers)
        self._running[call] = reservation
        heapq.heappush(self._ends, (now + reservation.seconds, call))
        self._minute[call] = (now, reservation.tokens)
        self._tokens += reservation.tokens
        return call


def start_limiter(config: LlmConfig, ledger: Path) -> Any:
    """Start the run's limiter as an actor on this node; returns its handle. Ray restarts it and retries its calls."""
    on_this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": on_this_node}
    return ray.remote(**options)(Limiter).options(name=NAME).remote(config, ledger.absolute())


def local_limiter(config: LlmConfig, ledger: Path) -> Any:
    """A limiter for a single-process program, with the interface of an actor handle."""
    limiter = Limiter(config, ledger)
    return SimpleNamespace(talk=SimpleNamespace(remote=limiter.talk), write=limiter.write)


class LimiterDied(RunStopped):
    """The limiter and its account of costs are lost, so the run ends."""


class CallQueue:
    """Queue of this process's calls that wait for `limiter`, the handle of a Limiter."""

    def __init__(self, limiter: Any) -> None:
        self._limiter = limiter
        self._room = min(_TO_A_HOST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)  # further running calls
        self._waiting: dict[asyncio.Future[int], Reservation] = {}  # longest waiting first
        self._finished: list[FinishedCall] = []
        self._talking: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    async def begin(self, reservation: Reservation) -> int:
        """Wait until the call is admitted; returns its number. Raises BudgetSpent or LimiterDied."""
        place: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[place] = reservation
        self._talk()
        try:
            return await place
        except asyncio.CancelledError:
            self._waiting.pop(place, None)
            if not place.cancelled() and place.exception() is None:  # admitted and cancelled at the same moment
                self.end(FinishedCall(place.result(), tokens=0))
            raise

    def end(self, finished: FinishedCall) -> None:
        """Report the end of a call; call it once per number."""
        self._room += 1
        self._finished.append(finished)
        self._news.set()
        self._talk()

    def _talk(self) -> None:
        if self._talking is None or self._talking.done():
            self._news = asyncio.Event()  # of this event loop, which may be another one than before
            self._talking = asyncio.create_task(self._until_empty())

    async def _until_empty(self) -> None:
        while self._waiting or self._finished:
            try:
                await self._exchange()
            except Exception as error:
                for place in self._waiting:
                    if not place.done():
                        place.set_exception(error)
                self._waiting.clear()

    async def _exchange(self) -> None:
        """Report ended calls and admit those that waited longest; if none was admitted, wait for news or `_POLL`."""
        self._news.clear()
        finished, self._finished = self._finished, []
        batch = dict(islice(self._waiting.items(), max(0, min(_AT_ONCE, self._room))))
        try:
            calls = await self._limiter.talk.remote(finished, list(batch.values()))
        except RayTaskError as error:
            raise error.cause from None
        except RayActorError as error:
            raise LimiterDied(f"the limiter for language model calls died: {error}") from error
        for place, call in zip(batch, calls, strict=False):
            self._waiting.pop(place, None)
            self._room -= not place.done()
            if place.done():  # cancelled
                self._finished.append(FinishedCall(call, tokens=0))
            else:
                place.set_result(call)
        if self._waiting and not calls:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), _POLL)
