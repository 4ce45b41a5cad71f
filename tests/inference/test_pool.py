"""A fleet of one real server: it restarts at the same address when killed, and samples again after a release."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from megatron_collab.inference.client import EngineError, SGLangClient
from megatron_collab.inference.pool import ServerPool
from megatron_collab.inference.server import UNPUBLISHED, SGLangServer
from megatron_collab.inference.spec import Placement
from megatron_collab.settings import SamplingConfig
from tests.conftest import Served
from tests.inference.test_server import PROMPTS, sample, with_client

pytestmark = pytest.mark.processes

REQUESTS = [(prompt, seed) for seed, prompt in enumerate(PROMPTS[:4])]


def fleet_of(
    server: SGLangServer, announced: list[Sequence[int]], colocated: bool, tokens: int | None = None
) -> ServerPool:
    spec = replace(server.spec, placement=Placement(shared=1 if colocated else 0), max_total_tokens=tokens)
    return ServerPool([server], spec, announced.append)


def test_a_released_server_samples_what_it_sampled_before(
    servers: dict[str, Served], capsys: pytest.CaptureFixture[str]
) -> None:
    server = servers["untied"].server
    before = sample(server, REQUESTS, at_once=True)
    has = server.cache_tokens()
    fleet = fleet_of(server, [], colocated=True, tokens=2 * has)
    fleet.begin()
    message = f"has a KV cache of {has} tokens instead of rollout.server.max_total_tokens={2 * has}"
    printed = "".join(capsys.readouterr())  # the warning is on stderr
    assert message in printed and f"SGLang servers have a KV cache of at least {has} tokens each" in printed
    assert server.released == {"kv_cache", "weights"}
    with pytest.raises(EngineError, match="no answer within"):
        with_client(server, impatient)
    assert fleet.ready(seconds=60)
    assert server.released == {"kv_cache"}
    publish(server)
    fleet.serve()
    assert server.released == set() and server.alive()
    assert sample(server, REQUESTS, at_once=True) == before
    fleet.sleep()  # requests have been served, and it was idle
    assert fleet.ready(seconds=60)
    publish(server)
    fleet.serve()
    assert sample(server, REQUESTS, at_once=True) == before


def publish(server: SGLangServer) -> None:
    """The last step of a publish."""
    server.resume("kv_cache")
    server.ask("/continue_generation", {})


async def impatient(client: SGLangClient) -> None:
    client.spec = replace(client.spec, timeout=1.0)
    await client.generate(PROMPTS[0], max_new_tokens=1, sampling=SamplingConfig(), seed=0)


@pytest.mark.slow
def test_a_killed_server_is_started_again_at_the_same_address(servers: dict[str, Served]) -> None:
    server = servers["tied"].server
    address, generation = (server.url, server.api_key), server.generation
    announced: list[Sequence[int]] = []
    fleet = fleet_of(server, announced, colocated=False)
    fleet.begin()
    killed = server.process.pid
    os.kill(killed, signal.SIGKILL)
    while not announced:
        fleet.watch()
        time.sleep(0.01)
    assert fleet.lost_all() and announced == [[]]
    assert fleet.present() == [], "it takes its time, and nobody waits for it"
    while not fleet.ready(seconds=1):
        pass
    fleet.serve()
    assert announced == [[], [0]]
    assert (server.url, server.api_key) == address
    assert server.generation == generation + 1 and server.process.pid != killed
    assert fleet.take_counters() == {"servers/lost": 1.0, "servers/back": 1.0}
    turns = sample(server, REQUESTS, at_once=True)
    assert {version for turn in turns for version in turn.versions} == {UNPUBLISHED}, "nobody may train on them"
