"""Which server a conversation is played on: one for all that share a prefix, as long as it is not overloaded."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from megatron_collab.config import RolloutConfig, SamplingConfig
from megatron_collab.inference.client import ServerGone, SGLangClient
from megatron_collab.inference.server import UNPUBLISHED
from megatron_collab.types import ToolCall, Turn

# How far above the mean of the requests in flight a server may be and still be given new conversations.
LOAD_FACTOR = 1.25
REMEMBERED = 100_000  # affinities whose server is remembered: many steps of a run

_Answer = TypeVar("_Answer")


def choose(affinity: str, in_flight: Sequence[int], gone: Collection[int] = ()) -> int:
    """The server (an index) for conversations of `affinity` that are on none yet, none of those `gone`.

    Rendezvous hashing (Thaler and Ravishankar, 1998), so that a server that goes moves only what was on it, with
    bounded loads (Mirrokni, Thorup and Zadimoghaddam, arXiv 1608.01350): a server that holds LOAD_FACTOR times
    its share of the requests in flight is passed over.
    """
    alive = [server for server in range(len(in_flight)) if server not in gone]
    share = (sum(in_flight[server] for server in alive) + 1) / len(alive)
    ranked = sorted(alive, key=lambda server: _weight(affinity, server), reverse=True)
    return next(server for server in ranked if in_flight[server] < math.ceil(LOAD_FACTOR * share))


def _weight(affinity: str, server: int) -> bytes:
    return hashlib.blake2b(f"{server}/{affinity}".encode(), digest_size=8).digest()


class Router:
    """The policy of a worker: a client for each SGLang server, and which conversations are on which.

    `in_flight` is the requests that each server is answering, `gone` the servers that are left out: those that may
    not be asked now, and those that were lost meanwhile.
    """

    def __init__(self, servers: Sequence[tuple[str, str]], config: RolloutConfig, unpublished: bool = False) -> None:
        """`servers`: address and key of each. `unpublished`: weights that no run has published will do."""
        self.unpublished = unpublished
        self.clients = [SGLangClient(url, key, config) for url, key in servers]
        self.in_flight = [0] * len(self.clients)
        self.gone: set[int] = set()
        self._allowed = frozenset(range(len(self.clients)))
        self._lost = 0
        self._places: dict[str, int] = {}

    def use(self, servers: Collection[int]) -> None:
        """From now on ask these servers and no others, those that were lost before included."""
        self._allowed = frozenset(servers)
        self.gone = self._barred()

    async def generate(
        self, prompt_ids: tuple[int, ...], *, max_new_tokens: int, sampling: SamplingConfig, seed: int, affinity: str
    ) -> Turn:
        """See SGLangClient.generate; all turns of an `affinity` are sampled by one server, while it lives.

        A server that was started again and has not been published to counts as gone: a worker that Ray started again
        has not been told to leave it out.
        """

        async def sample(client: SGLangClient) -> Turn:
            turn = await client.generate(prompt_ids, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed)
            if UNPUBLISHED in turn.versions and not self.unpublished:
                raise ServerGone(f"{client.url}: has not been given the run's weights")
            return turn

        return await self._ask(affinity, sample)

    async def tool_calls(self, text: str, schemas: Sequence[Mapping[str, Any]]) -> list[ToolCall]:
        """See SGLangClient.tool_calls; any server will do."""
        return await self._ask(None, lambda client: client.tool_calls(text, schemas))

    def take_counters(self) -> dict[str, int]:
        """Tokens that servers computed and had cached (see SGLangClient), servers lost; since the last call."""
        taken = Counter({"servers_lost": self._lost})
        self._lost = 0
        for client in self.clients:
            taken.update(client.counters)
            client.counters.clear()
        return dict(taken)

    async def close(self) -> None:
        for client in self.clients:
            await client.close()

    async def _ask(self, affinity: str | None, request: Callable[[SGLangClient], Awaitable[_Answer]]) -> _Answer:
        """Have the server of `affinity` answer, or where it is gone the next; ServerGone once all were tried."""
        failure = ServerGone("no SGLang server may be asked at present")
        for _ in self._allowed:
            if not self._allowed:  # since the last try
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
            return min(set(range(len(self.clients))) - self.gone, key=self.in_flight.__getitem__)
        server = self._places.get(affinity)
        if server is None or server in self.gone:
            server = self._places[affinity] = choose(affinity, self.in_flight, self.gone)
            if len(self._places) > REMEMBERED:
                del self._places[next(iter(self._places))]  # the oldest
        return server

    def _lose(self, server: int) -> None:
        if server not in self.gone:
            self._lost += 1
            self.gone.add(server)
        if len(self.gone) == len(self.clients):  # nothing is left to choose from: later requests try all again
            self.gone = self._barred()

    def _barred(self) -> set[int]:
        return set(range(len(self.clients))) - self._allowed
