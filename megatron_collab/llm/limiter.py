"""Rate limits and budget of all calls to language models: requests and tokens per minute, concurrency, US dollars.

`Limiter` keeps the accounts, as one Ray actor per run; the calls of one process wait in a `Line`, which has one message
to the limiter in flight and batches what gathers meanwhile into the next.
"""

from __future__ import annotations

import asyncio
import json
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

from megatron_collab.config import LlmConfig
from megatron_collab.runtime import files
from megatron_collab.runtime.process import RunStopped

NAME = "limiter"
MINUTE = 60.0
_POLL = 0.1  # seconds until a line of which no call was admitted asks again
_AT_ONCE = 256  # requests in one message
_WRITE_AFTER = 1.0  # seconds


@dataclass(frozen=True)
class Wish:
    """A call that waits to begin: the most tokens it may take, the seconds after which it has ended for certain.

    `usd`: the most it may cost, None where its model has no price.
    """

    tokens: int
    seconds: float
    usd: float | None = 0.0


@dataclass(frozen=True)
class Ended:
    """A call that has ended: its number, its tokens and its price, None where they are not known."""

    call: int
    tokens: int | None = None
    usd: float | None = 0.0


class BudgetSpent(RunStopped):
    """llm.budget_usd is used up: the run has to end. Not a failure of one call, so it must not become Missing."""


class Limiter:
    """Admits calls within the limits of `config` in every sliding minute.

    A call counts with the most tokens it may take until it reports what it took. Running calls are not stopped, so the
    budget may be exceeded by what they cost. A call whose process died ends with its time, and counts as its wish.

    Spending continues from the file `ledger`: earlier starts of the run count, repeated steps too. After a crash what
    was spent since the last `write`, a second at most, is lost, the minute begins anew, and a message without an answer
    counts twice.
    """

    def __init__(self, config: LlmConfig, ledger: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: the time in seconds."""
        self.config, self._ledger, self._clock = config, ledger, clock
        # `usd` is that of the other calls than the `unpriced`, whose price is not known; with a budget there are none.
        self._spend: dict[str, float] = {"calls": 0, "tokens": 0, "usd": 0.0, "unpriced": 0}
        if ledger.is_file():
            self._spend |= json.loads(ledger.read_text())
        self._changed = False  # since the ledger was written
        self._numbers = count(secrets.randbits(62))  # distinct from the numbers of a limiter before this one
        self._running: dict[int, tuple[float, Wish]] = {}  # call: when it has ended for certain
        self._given_up: set[int] = set()  # calls that were counted then
        self._minute: dict[int, tuple[float, int]] = {}  # call: when it began, its tokens; in order
        self._tokens = 0  # of the calls in _minute

    async def talk(self, ended: Sequence[Ended], wishes: Sequence[Wish]) -> list[int]:
        """Record the calls that ended and admit the first of `wishes` that the limits allow: their numbers.

        Raises BudgetSpent, after recording. Asynchronous, so that Ray runs the actor on an event loop, which also
        writes the ledger where no further message comes.
        """
        self._forget(now := self._clock())
        for call in ended:
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
                f"raise it to go on from the last checkpoint"
            )
        return [self._begin(wish, now) for wish in takewhile(self._may_begin, wishes)]

    def spend(self) -> dict[str, float]:
        """The totals of the run so far, after writing them to disk: calls, tokens, usd, unpriced."""
        self.write()
        return dict(self._spend)

    def write(self) -> None:
        """Write the ledger; RunStopped where that fails."""
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
        for call in [call for call, (end, _) in self._running.items() if end <= now]:
            _, wish = self._running.pop(call)
            self._count(wish.tokens, wish.usd)
            self._given_up.add(call)
        for call in list(takewhile(lambda call: now - self._minute[call][0] >= MINUTE, self._minute)):
            self._tokens -= self._minute.pop(call)[1]

    def _may_begin(self, wish: Wish) -> bool:
        config, used = self.config, len(self._minute)
        if len(self._running) >= config.max_concurrent:
            return False
        if config.requests_per_minute is not None and used >= config.requests_per_minute:
            return False
        limit = config.tokens_per_minute
        return limit is None or used == 0 or self._tokens + wish.tokens <= limit  # a call above the limit runs alone

    def _begin(self, wish: Wish, now: float) -> int:
        call = next(self._numbers)
        self._running[call] = now + wish.seconds, wish
        self._minute[call] = (now, wish.tokens)
        self._tokens += wish.tokens
        return call


def start_limiter(config: LlmConfig, ledger: Path) -> Any:
    """The handle of the run's limiter, a new actor on this node; if it dies Ray restarts it and retries its calls."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": here}
    return ray.remote(**options)(Limiter).options(name=NAME).remote(config, ledger.absolute())


def local_limiter(config: LlmConfig, ledger: Path) -> Any:
    """A limiter in this process, for a program that asks models from nowhere else; called as the handle of an actor."""
    limiter = Limiter(config, ledger)
    return SimpleNamespace(talk=SimpleNamespace(remote=limiter.talk), write=limiter.write)


class LimiterDied(RuntimeError):
    """The limiter is gone, and with it the account of costs: the run has to end."""


class Line:
    """The queue of this process's calls that wait for the limiter, the handle of a Limiter."""

    def __init__(self, limiter: Any) -> None:
        self._limiter = limiter
        self._waiting: dict[asyncio.Future[int], Wish] = {}  # those that wait longest first
        self._ended: list[Ended] = []
        self._talking: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    async def begin(self, wish: Wish) -> int:
        """Wait until a call may begin; returns its number. Raises BudgetSpent or LimiterDied."""
        place: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[place] = wish
        self._talk()
        try:
            return await place
        except asyncio.CancelledError:
            self._waiting.pop(place, None)
            if not place.cancelled() and place.exception() is None:  # admitted and cancelled at the same moment
                self.end(Ended(place.result(), tokens=0))
            raise

    def end(self, ended: Ended) -> None:
        """Report the end of a call; once for every number."""
        self._ended.append(ended)
        self._news.set()
        self._talk()

    def _talk(self) -> None:
        if self._talking is None or self._talking.done():
            self._news = asyncio.Event()
            self._talking = asyncio.create_task(self._until_empty())

    async def _until_empty(self) -> None:
        while self._waiting or self._ended:
            try:
                await self._exchange()
            except Exception as error:
                for place in self._waiting:
                    if not place.done():
                        place.set_exception(error)
                self._waiting.clear()

    async def _exchange(self) -> None:
        """Report what ended and admit the calls that waited longest; where there is none, wait for news."""
        self._news.clear()
        ended, self._ended = self._ended, []
        asked = dict(islice(self._waiting.items(), _AT_ONCE))
        try:
            calls = await self._limiter.talk.remote(ended, list(asked.values()))
        except RayTaskError as error:
            raise error.cause from None
        except RayActorError as error:
            raise LimiterDied(f"the limiter of the calls to language models died: {error}") from error
        for place, call in zip(asked, calls, strict=False):
            self._waiting.pop(place, None)
            if place.done():  # cancelled
                self._ended.append(Ended(call, tokens=0))
            else:
                place.set_result(call)
        if asked and not calls:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), _POLL)
