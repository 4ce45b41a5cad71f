"""Routes conversations to servers: those with a common prefix go to the same one, which rank 0 may have assigned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar, Unpack

from megatron_collab.inference.client import ServerGone, SGLangClient, TurnOptions
from megatron_collab.inference.server import UNPUBLISHED
from megatron_collab.inference.spec import ClientSpec
from megatron_collab.llm.served import choose
from megatron_collab.types import Message, ToolCall, Turn

REMEMBERED = 100_000  # affinities that are kept; enough for many steps of a run

_Answer = TypeVar("_Answer")


class Router:
    """Samples turns for a worker from all SGLang servers and keeps each conversation on one of them.

    `in_flight` counts the requests of each server; `gone` has the servers that are not in use or became unreachable.
    """

    def __init__(self, servers: Sequence[tuple[str, str]], spec: ClientSpec, unpublished: bool = False) -> None:
        """`servers`: address and key of each. `unpublished`: accept servers without the run's weights."""
        self.unpublished = unpublished
        self.clients = [SGLangClient(url, key, spec) for url, key in servers]
        self.in_flight = [0] * len(self.clients)
        self.gone: set[int] = set()
        self._all = self._allowed = frozenset(range(len(self.clients)))
        self._lost = 0
        self._places: dict[str, int] = {}

    def use(self, servers: Collection[int]) -> None:
        """From now on send requests to these servers only, even if they were unreachable before."""
        self._allowed = frozenset(servers)
        self.gone = {*self._all - self._allowed}

    def assign(self, affinity: str, server: int) -> None:
        """Have `server` sample all turns of `affinity` while it is reachable."""
        self._places[affinity] = server
        if len(self._places) > REMEMBERED:
            del self._places[next(iter(self._places))]  # the oldest

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

        async def sample(client: SGLangClient) -> Turn:
            turn = await client.generate(prompt_ids, **options)
            if UNPUBLISHED in turn.versions and not self.unpublished:
                raise ServerGone(f"{client.url}: has not received the run's weights")
            return turn

        return await self._ask(affinity, sample)

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
