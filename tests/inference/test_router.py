"""Routing of conversations: the choice as a pure function, and the router with servers that come and go."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from megatron_collab.inference import client
from megatron_collab.inference.client import EngineError, ServerGone
from megatron_collab.inference.router import Router
from megatron_collab.inference.server import UNPUBLISHED
from megatron_collab.inference.spec import ClientSpec
from megatron_collab.llm.served import LOAD_FACTOR, choose
from megatron_collab.settings import SamplingConfig
from megatron_collab.types import Finish, Turn
from tests.inference.test_client import ANSWER, stream, stream_turn

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
NAMES = [f"train-3-{i}" for i in range(400)]

loads = st.lists(st.integers(0, 50), min_size=1, max_size=8)


@pytest.mark.seconds
@given(st.text(), loads, st.data())
def test_the_chosen_server_lives_and_holds_less_than_its_share(
    affinity: str, in_flight: list[int], data: st.DataObject
) -> None:
    servers = range(len(in_flight))
    gone = data.draw(st.sets(st.sampled_from(servers), max_size=len(in_flight) - 1))
    chosen = choose(affinity, in_flight, gone)
    alive = [in_flight[server] for server in servers if server not in gone]
    assert chosen not in gone
    assert in_flight[chosen] < math.ceil(LOAD_FACTOR * (sum(alive) + 1) / len(alive))


@given(st.text(), st.integers(1, 8))
def test_an_affinity_has_one_server_while_nothing_is_in_flight(affinity: str, servers: int) -> None:
    assert choose(affinity, [0] * servers) == choose(affinity, [0] * servers)


@given(st.text(), st.integers(2, 8), st.data())
def test_a_server_that_goes_moves_only_what_was_on_it(affinity: str, servers: int, data: st.DataObject) -> None:
    lost = data.draw(st.integers(0, servers - 1))
    before, after = choose(affinity, [0] * servers), choose(affinity, [0] * servers, {lost})
    assert after == before or before == lost


def test_affinities_are_spread_evenly() -> None:
    counts = Counter(choose(name, [0] * 4) for name in NAMES)
    assert all(70 <= counts[server] <= 130 for server in range(4))


def test_groups_that_come_at_once_are_spread_by_their_load() -> None:
    in_flight = [0] * 4
    for name in NAMES:
        in_flight[choose(name, in_flight)] += 8
    assert max(in_flight) <= LOAD_FACTOR * sum(in_flight) / 4 + 8


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "BACKOFF_SECONDS", 0.001)


class Servers:
    """Stand-ins for servers; `requests` has the server of each request, in order."""

    def __init__(self) -> None:
        self.requests: list[int] = []
        self.broken: set[int] = set()
        self.unpublished: set[int] = set()
        self.released = asyncio.Event()
        self.released.set()

    def handler(self, server: int) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            if server in self.broken:
                assert request.transport is not None
                request.transport.close()
                return web.Response()
            self.requests.append(server)
            await self.released.wait()
            if server in self.unpublished:
                return await stream(request, ANSWER | {"meta_info": ANSWER["meta_info"] | {"weight_version": "-1"}})
            return await stream_turn(request)

        return handle


def with_servers(count: int, play: Callable[[Servers, Router], Awaitable[None]]) -> None:
    async def run() -> None:
        servers, addresses = Servers(), []
        async with AsyncExitStack() as stack:
            for server in range(count):
                application = web.Application()
                application.router.add_post("/generate", servers.handler(server))
                running = await stack.enter_async_context(TestServer(application))
                addresses.append((str(running.make_url("")).rstrip("/"), "secret"))
            router = Router(addresses, ClientSpec(60.0, "qwen25"))
            stack.push_async_callback(router.close)
            await play(servers, router)

    asyncio.run(run())


async def ask(router: Router, affinities: Sequence[str]) -> list[Turn]:
    return await asyncio.gather(
        *(
            router.generate((7, i), max_new_tokens=4, sampling=SamplingConfig(), seed=i, affinity=affinity)
            for i, affinity in enumerate(affinities)
        )
    )


def test_an_affinity_stays_with_its_server_whatever_the_load() -> None:
    async def play(servers: Servers, router: Router) -> None:
        await ask(router, ["a"])
        await ask(router, ["b", "a", "a", "a", "a", "a", "a", "a"])
        await ask(router, ["a"] * 8)
        of_a = servers.requests[0]
        assert servers.requests.count(of_a) >= 1 + 7 + 8
        assert router.in_flight == [0, 0, 0]

    with_servers(3, play)


def test_an_assigned_affinity_is_sampled_by_its_server_while_that_is_in_use() -> None:
    async def play(servers: Servers, router: Router) -> None:
        for number, name in enumerate(NAMES[:6]):
            router.assign(name, number % 3)
        await ask(router, NAMES[:6])
        assert sorted(servers.requests) == [0, 0, 1, 1, 2, 2]
        router.use([0, 2])
        servers.requests.clear()
        await ask(router, [NAMES[1]])
        await ask(router, [NAMES[2]])
        assert 1 not in servers.requests and servers.requests[-1] == 2

    with_servers(3, play)


def test_a_busy_server_is_passed_over_for_new_affinities() -> None:
    async def play(servers: Servers, router: Router) -> None:
        servers.released.clear()
        first = asyncio.create_task(ask(router, ["a"] * 20))
        while sum(router.in_flight) < 20:
            await asyncio.sleep(0)
        busy = max(range(2), key=lambda server: router.in_flight[server])
        second = asyncio.create_task(ask(router, NAMES[:10]))
        while sum(router.in_flight) < 30:
            await asyncio.sleep(0)
        assert router.in_flight[busy] == 20
        assert router.in_flight[1 - busy] == 10
        servers.released.set()
        await asyncio.gather(first, second)

    with_servers(2, play)


def test_a_lost_server_is_left_out_and_counted() -> None:
    async def play(servers: Servers, router: Router) -> None:
        await ask(router, NAMES[:30])
        servers.broken.add(1)
        servers.requests.clear()
        turns = await ask(router, NAMES[:30])
        assert [turn.prompt_ids for turn in turns] == [(7, i) for i in range(30)]
        assert set(servers.requests) == {0, 2} and len(servers.requests) == 30
        assert router.take_counters()["servers_lost"] == 1
        servers.broken.clear()
        await ask(router, NAMES[:30])
        assert 1 not in servers.requests
        assert router.take_counters()["servers_lost"] == 0

    with_servers(3, play)


def test_only_servers_in_use_get_requests() -> None:
    async def play(servers: Servers, router: Router) -> None:
        router.use([0, 2])
        await ask(router, NAMES[:30])
        assert set(servers.requests) == {0, 2}
        servers.broken = {0, 2}
        with pytest.raises(ServerGone):
            await ask(router, NAMES[:1])
        assert 1 not in servers.requests
        servers.broken = set()
        await ask(router, NAMES[:30])
        assert 1 not in servers.requests

    with_servers(3, play)


def test_a_server_that_came_back_gets_requests_again() -> None:
    async def play(servers: Servers, router: Router) -> None:
        servers.broken = {1}
        await ask(router, NAMES[:30])
        router.use([0])
        servers.broken = set()
        servers.requests.clear()
        await ask(router, NAMES[:30])
        assert set(servers.requests) == {0}
        router.use([0, 1])
        await ask(router, NAMES[30:90])
        assert set(servers.requests) == {0, 1}

    with_servers(2, play)


def test_a_server_without_the_runs_weights_counts_as_gone() -> None:
    async def play(servers: Servers, router: Router) -> None:
        servers.unpublished = {1}
        turns = await ask(router, NAMES[:30])
        assert {version for turn in turns for version in turn.versions} == {12}
        assert 1 in servers.requests and router.gone == {1}
        router.unpublished = True
        router.use([1])
        assert (await ask(router, NAMES[:1]))[0].versions == (-1, -1, -1)

    with_servers(2, play)


def test_without_a_server_requests_fail_at_once() -> None:
    async def play(servers: Servers, router: Router) -> None:
        router.use([])
        with pytest.raises(ServerGone, match="no SGLang server is in use"):
            await ask(router, ["a"])
        assert servers.requests == []

    with_servers(2, play)


def test_no_server_left_is_an_error_and_the_next_request_tries_again() -> None:
    async def play(servers: Servers, router: Router) -> None:
        servers.broken = {0, 1}
        with pytest.raises(ServerGone, match="/generate: "):
            await ask(router, ["a"])
        servers.broken.clear()
        assert len(await ask(router, ["a"])) == 1

    with_servers(2, play)


def test_a_refusal_is_no_reason_to_ask_another_server() -> None:
    paths: list[str] = []

    async def refuse(request: web.Request) -> web.Response:
        paths.append(request.path)
        return web.Response(status=400, text="too long")

    async def run() -> None:
        application = web.Application()
        application.router.add_post("/generate", refuse)
        async with TestServer(application) as server:
            router = Router([(str(server.make_url("")).rstrip("/"), "secret")] * 2, ClientSpec(300.0, "qwen25"))
            try:
                with pytest.raises(EngineError, match="too long"):
                    await ask(router, ["a"])
            finally:
                await router.close()

    asyncio.run(run())
    assert len(paths) == 1


def test_counters_add_up_over_the_servers_since_the_last_time() -> None:
    async def play(servers: Servers, router: Router) -> None:
        await ask(router, NAMES[:10])
        assert router.take_counters() == {"prefill_tokens": 10 * 1, "cached_tokens": 10 * 2, "servers_lost": 0}
        assert router.take_counters() == {"servers_lost": 0}

    with_servers(2, play)


class AbortingClient:
    """Samples tokens 10, 11, … after a prompt, until the server aborts what is asked; later requests end at 13.

    `bodies` has the prompt and the budget of each request, `version` is that of the weights.
    """

    def __init__(self) -> None:
        self.paused, self.version = False, 0
        self.bodies: list[tuple[tuple[int, ...], int]] = []
        self.counters = Counter[str]()
        self.aborted = asyncio.Event()

    async def generate(self, prompt_ids: tuple[int, ...], *, max_new_tokens: int, **options: Any) -> Turn:
        self.bodies.append((prompt_ids, max_new_tokens))
        first = max(9, prompt_ids[-1]) + 1
        last, finish = 13, Finish.STOP
        if not self.aborted.is_set():
            await self.aborted.wait()
            last, finish = 12, Finish.ABORT
        tokens = tuple(range(first, last + 1))
        return Turn(prompt_ids, tokens, (-0.5,) * len(tokens), (self.version,) * len(tokens), finish, "part")


def pausing(play: Callable[[Router, AbortingClient], Awaitable[None]]) -> None:
    async def run() -> None:
        router = Router([("", "")], ClientSpec(60.0, "qwen25"), decode=lambda prompt, ids: f"{[*prompt]} {[*ids]}")
        client: Any = AbortingClient()
        router.clients = [client]
        await play(router, client)

    asyncio.run(run())


HALF = Turn((1, 2), (10, 11), (-0.5, -0.5), (0, 0), Finish.ABORT, "part")
WHOLE = Turn((1, 2), (10, 11, 12, 13), (-0.5,) * 4, (0, 0, 1, 1), Finish.STOP, "[1, 2] [10, 11, 12]")


async def sampled(router: Router) -> Turn:
    (turn,) = await ask_for(router, 7)
    return turn


async def ask_for(router: Router, *seeds: int) -> list[Turn]:
    options = {"max_new_tokens": 9, "sampling": SamplingConfig(), "affinity": "a"}
    return await asyncio.gather(*(router.generate((1, 2), seed=seed, **options) for seed in seeds))


def test_a_paused_turn_goes_on_after_its_tokens_with_the_next_weights(virtual_time: None) -> None:
    """The last token of an aborted request is sampled again: it might have ended the turn."""

    async def play(router: Router, client: AbortingClient) -> None:
        with router.group("a", 0, []):
            turn = asyncio.create_task(sampled(router))
            await asyncio.sleep(1.0)
            router.pause()
            client.aborted.set()
            assert await router.paused() == {"a": [(7, HALF)]}
            await asyncio.sleep(1000.0)
            assert not turn.done() and len(client.bodies) == 1
            client.version = 1
            router.resume()
            assert await turn == WHOLE
            assert await router.paused() == {"a": [(7, WHOLE)]}
        assert client.bodies == [((1, 2), 9), ((1, 2, 10, 11), 7)]
        assert await router.paused() == {}

    pausing(play)


def test_turns_of_an_earlier_start_are_not_sampled_again(virtual_time: None) -> None:
    async def play(router: Router, client: AbortingClient) -> None:
        client.version = 1
        client.aborted.set()
        with router.group("a", 0, [(7, HALF), (8, WHOLE), (9, replace(WHOLE, prompt_ids=(1, 3)))]):
            assert await ask_for(router, 7, 8) == [WHOLE, WHOLE]
            assert client.bodies == [((1, 2, 10, 11), 7)]
            await ask_for(router, 9)
            assert client.bodies[1:] == [((1, 2), 9)], "a user who answers otherwise has another turn"

    pausing(play)


def test_a_request_that_a_paused_server_holds_is_sent_again(virtual_time: None) -> None:
    async def play(router: Router, client: AbortingClient) -> None:
        turn = asyncio.create_task(sampled(router))
        await asyncio.sleep(1.0)
        router.pause()
        assert await router.paused() == {}
        client.aborted.set()
        router.resume()
        assert (await turn).token_ids == (10, 11, 12, 13)
        assert client.bodies == [((1, 2), 9)] * 2

    pausing(play)


class ReadingClient:
    """Gives log-probs of tokens once `released`; `faults` are raised first."""

    def __init__(self, *faults: EngineError) -> None:
        self.paused, self.requests, self.faults = False, 0, [*faults]
        self.url, self.version, self.released = "", 3, asyncio.Event()

    async def log_probs(self, prompt_ids: tuple[int, ...], token_ids: tuple[int, ...]) -> tuple[tuple[float, ...], int]:
        self.requests += 1
        await self.released.wait()
        if self.faults:
            raise self.faults.pop()
        return (-0.5,) * len(token_ids), self.version


@pytest.mark.parametrize("aborts", [False, True])
def test_log_probs_of_given_tokens_wait_for_the_end_of_a_pause(aborts: bool, virtual_time: None) -> None:
    """Whether the paused server aborts the request, or holds it until it is cancelled."""

    async def play(router: Router, _: AbortingClient) -> None:
        client: Any = ReadingClient(*[EngineError("aborted")] * aborts)
        router.clients = [client]
        reading = asyncio.create_task(router.log_probs((1, 2), (3, 4), "a"))
        await asyncio.sleep(1.0)
        router.pause()
        if aborts:
            client.released.set()
        assert await router.paused() == {}
        client.released.set()
        await asyncio.sleep(1000.0)
        assert not reading.done() and client.requests == 1
        router.resume()
        assert await reading == (-0.5, -0.5) and client.requests == 2
        client.faults.append(EngineError("too long"))
        with pytest.raises(EngineError, match="too long"):
            await router.log_probs((1, 2), (3, 4), "a")

    pausing(play)


def test_a_server_without_the_runs_weights_gives_no_log_probs(virtual_time: None) -> None:
    async def play(router: Router, _: AbortingClient) -> None:
        client: Any = ReadingClient()
        client.version = UNPUBLISHED
        client.released.set()
        router.clients = [client]
        with pytest.raises(ServerGone, match="has not received the run's weights"):
            await router.log_probs((1, 2), (3, 4), "a")

    pausing(play)


def test_a_turn_that_a_server_aborts_without_a_pause_stays_aborted(virtual_time: None) -> None:
    async def play(router: Router, client: AbortingClient) -> None:
        turn = asyncio.create_task(sampled(router))
        await asyncio.sleep(1.0)
        client.aborted.set()
        assert (await turn).finish is Finish.ABORT

    pausing(play)
