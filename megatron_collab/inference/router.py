"""Routes conversations to servers: those with a common prefix go to the same one, which rank 0 may have assigned.

When colocated servers release their memory, turns pause: the server aborts them, the tokens sampled so far stay here,
and after the pause they are the end of the prompt from which the turn goes on, with the next weights.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, Unpack

from megatron_collab.inference.client import EngineError, Paused, ServerGone, SGLangClient, TurnOptions
from megatron_collab.inference.server import UNPUBLISHED
from megatron_collab.inference.spec import ClientSpec
from megatron_collab.llm.busy import BusySpans
from megatron_collab.llm.served import choose
from megatron_collab.runtime.time_limit import uncounted
from megatron_collab.types import Finish, Message, PausedTurn, ToolCall, Turn

REMEMBERED = 100_000  # affinities that are kept; enough for many steps of a run
ABORT_SECONDS = 10.0  # for paused servers to answer; a request that they hold until the end of the pause is sent again

Decode = Callable[[Sequence[int], Sequence[int]], str]  # the text of tokens after a prompt

_Answer = TypeVar("_Answer")


class Router:
    """Samples turns for a worker from all SGLang servers and keeps each conversation on one of them.

    `in_flight` counts the requests of each server, `busy` knows when it had any; `gone` has the servers that are not in
    use or became unreachable.
    """

    def __init__(
        self,
        servers: Sequence[tuple[str, str]],
        spec: ClientSpec,
        unpublished: bool = False,
        decode: Decode | None = None,
    ) -> None:
        """`servers`: address and key of each. `unpublished`: accept servers without the run's weights.

        `decode`: computes the text of turns that were paused.
        """
        self.unpublished, self._decode = unpublished, decode
        self.clients = [SGLangClient(url, key, spec) for url, key in servers]
        self._urls = [url for url, _ in servers]
        self.in_flight, self.busy = [0] * len(self.clients), BusySpans()
        self.gone: set[int] = set()
        self._all = self._allowed = frozenset(range(len(self.clients)))
        self._lost = 0
        self._places: dict[str, int] = {}
        self._running = asyncio.Event()  # not set while paused
        self._running.set()
        self._requests: set[asyncio.Task[Any]] = set()
        self._turns: dict[str, dict[tuple[int, tuple[int, ...]], Turn]] = {}  # of each group, by seed and prompt

    def use(self, servers: Collection[int]) -> None:
        """From now on send requests to these servers only, even if they were unreachable before."""
        self._allowed = frozenset(servers)
        self.gone = {*self._all - self._allowed}

    def assign(self, affinity: str, server: int) -> None:
        """Have `server` sample all turns of `affinity` while it is reachable."""
        self._places[affinity] = server
        if len(self._places) > REMEMBERED:
            del self._places[next(iter(self._places))]  # the oldest

    @contextmanager
    def group(self, affinity: str, server: int, turns: Iterable[PausedTurn]) -> Iterator[None]:
        """Within the block, `server` samples all turns of `affinity`, and `paused` returns them.

        `turns`: sampled before a pause, in an earlier start; they are not sampled again after equal prompts.
        """
        self.assign(affinity, server)
        self._turns[affinity] = {(seed, turn.prompt_ids): turn for seed, turn in turns}
        try:
            yield
        finally:
            del self._turns[affinity]

    def pause(self) -> None:
        """From now on turns wait for `resume`; those that a server aborts keep their tokens."""
        self._running.clear()
        for client in self.clients:
            client.paused = True

    async def paused(self) -> dict[str, list[PausedTurn]]:
        """Once the servers have aborted all turns: the turns so far of each `group`."""
        if self._requests:
            _, late = await asyncio.wait(self._requests, timeout=ABORT_SECONDS)
            for request in late:
                request.cancel()
        return {
            affinity: [(seed, turn) for (seed, _), turn in turns.items()] for affinity, turns in self._turns.items()
        }

    def resume(self) -> None:
        """Let turns go on."""
        for client in self.clients:
            client.paused = False
        self._running.set()

    async def generate(
        self,
        prompt_ids: tuple[int, ...],
        *,
        affinity: str,
        messages: Sequence[Message] = (),
        **options: Unpack[TurnOptions],
    ) -> Turn:
        """See SGLangClient.generate; one server samples all turns of an `affinity` while it is reachable.

        Sampling uses `prompt_ids`; `messages` are for assistants without ids (assistant.py).

        A server without the run's weights counts as unreachable: a worker that Ray restarted does not know which
        servers are not in use.
        """
        turns, key = self._turns.get(affinity, {}), (options["seed"], prompt_ids)
        turn = turns.get(key, Turn(prompt_ids, (), (), (), Finish.ABORT, ""))
        while turn.finish is Finish.ABORT:
            part = await self._unpaused(partial(self._go_on, turn, affinity, options))
            if part is None:
                continue
            turn = turns[key] = part
            if self._running.is_set():
                break
        return turn

    async def log_probs(
        self, prompt_ids: tuple[int, ...], token_ids: tuple[int, ...], affinity: str
    ) -> tuple[float, ...]:
        """The log-probs of `token_ids` after `prompt_ids` at temperature 1, by the server of `affinity`.

        Waits while turns are paused. Raises EngineError.
        """

        async def read(client: SGLangClient) -> tuple[float, ...]:
            values, version = await client.log_probs(prompt_ids, token_ids)
            self._check_published(client, [version])
            return values

        while True:
            try:
                values = await self._unpaused(partial(self._ask, affinity, read))
            except EngineError:
                if self._running.is_set():
                    raise
                continue  # aborted for a pause
            if values is not None:
                return values

    async def _unpaused(self, request: Callable[[], Coroutine[Any, Any, _Answer]]) -> _Answer | None:
        """The result of `request`, which is sent once turns are not paused; None if `paused` cancelled it."""
        if not self._running.is_set():
            with uncounted():
                await self._running.wait()
        task = asyncio.create_task(request())
        self._requests.add(task)
        try:
            await asyncio.wait([task])
        finally:
            self._requests.discard(task)
            task.cancel()
        return None if task.cancelled() else task.result()

    def _check_published(self, client: SGLangClient, versions: Sequence[int]) -> None:
        """Raises ServerGone if the weights that answered are not the run's."""
        if UNPUBLISHED in versions and not self.unpublished:
            raise ServerGone(f"{client.url}: has not received the run's weights")

    async def _go_on(self, turn: Turn, affinity: str, options: TurnOptions) -> Turn:
        """The turn with what a server samples after its tokens, until it ends or is aborted for a pause."""
        sampled, decode = len(turn.token_ids), self._decode
        remaining: TurnOptions = {**options, "max_new_tokens": options["max_new_tokens"] - sampled}

        async def sample(client: SGLangClient) -> Turn:
            part = await client.generate(turn.stream, **remaining)
            self._check_published(client, part.versions)
            return part

        try:
            part = await self._ask(affinity, sample)
        except Paused:
            return turn
        if part.finish is Finish.ABORT:
            part = _without_last_token(part)
        if not sampled:
            return part
        token_ids, text = turn.token_ids + part.token_ids, part.text
        if decode and part.finish is not Finish.ABORT:
            text = decode(turn.prompt_ids, token_ids[:-1] if part.finish is Finish.STOP else token_ids)
        return replace(
            part,
            prompt_ids=turn.prompt_ids,
            token_ids=token_ids,
            log_probs=turn.log_probs + part.log_probs,
            versions=turn.versions + part.versions,
            text=text,
        )

    async def tool_calls(self, text: str, schemas: Sequence[Mapping[str, Any]]) -> list[ToolCall]:
        """See SGLangClient.tool_calls; any server may answer."""
        return await self._ask(None, lambda client: client.tool_calls(text, schemas))

    def take_counters(self) -> dict[str, int]:
        """Prefilled and cached tokens (see SGLangClient) and servers lost since the last call."""
        counts = Counter({"servers_lost": self._lost})
        self._lost = 0
        for client in self.clients:
            counts.update(client.counters)
            client.counters.clear()
        return dict(counts)

    async def close(self) -> None:
        for client in self.clients:
            await client.close()

    async def _ask(self, affinity: str | None, request: Callable[[SGLangClient], Awaitable[_Answer]]) -> _Answer:
        """Send a request to the server of `affinity`, on failure to the next. Raises ServerGone after all failed."""
        failure = ServerGone("no SGLang server is in use at present")
        for _ in self._allowed:
            if not self._allowed:  # changed since the last attempt
                break
            server = self._place(affinity)
            self.in_flight[server] += 1
            try:
                with self.busy.call(self._urls[server]):
                    return await request(self.clients[server])
            except ServerGone as error:
                failure = error
                self._lose(server)
            finally:
                self.in_flight[server] -= 1
        raise failure

    def _place(self, affinity: str | None) -> int:
        if affinity is None:
            return min(self._all - self.gone, key=self.in_flight.__getitem__)
        server = self._places.get(affinity)
        if server is None or server in self.gone:
            server = choose(affinity, self.in_flight, self.gone)
            self.assign(affinity, server)
        return server

    def _lose(self, server: int) -> None:
        if server not in self.gone:
            self._lost += 1
            self.gone.add(server)
        if len(self.gone) == len(self.clients):  # no server is left: later requests retry all
            self.gone = {*self._all - self._allowed}


def _without_last_token(part: Turn) -> Turn:
    """An aborted part without the token of the pass that aborted it, in which SGLang looks for no end of the turn."""
    kept = max(0, len(part.token_ids) - 1)
    return replace(
        part, token_ids=part.token_ids[:kept], log_probs=part.log_probs[:kept], versions=part.versions[:kept]
    )
