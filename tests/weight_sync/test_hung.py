"""A hanging server costs only itself, and a slow rank costs nothing: several ranks, SGLang played by threads."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from megatron_collab.inference.server import ServerError
from megatron_collab.launch.trainer_specs import sync_spec
from megatron_collab.models import hf_to_megatron
from megatron_collab.weight_sync import in_place, sync
from megatron_collab.weight_sync.http_protocol import ServerCall
from megatron_collab.weight_sync.in_place import InPlace
from megatron_collab.weight_sync.receiver import Receiver
from megatron_collab.weight_sync.store_protocol import PlaceStore, SyncStore
from megatron_collab.weight_sync.sync import PublishError, WeightSync
from megatron_collab.weight_sync.transports import shared_memory
from megatron_collab.weight_sync.transports.p2p import NetworkTransport
from tests.forked import Ended
from tests.helpers import policy_servers
from tests.ranks import run_side_by_side
from tests.weight_sync import test_receiver as fakes

pytestmark = [pytest.mark.processes, pytest.mark.slow]

# name: (ranks, nodes, transport, the request that server 1 does not answer, whether it has FP8)
HANGING = {
    f"{transport}-{moment}": (2, 1, transport, moment, False)
    for transport in ("memory", "network")
    for moment in ("pause", "receive", "read")
} | {"nodes-read": (4, 2, "memory", "read", True)}
# name: nodes of each server; there are two nodes, and server 1 refuses what it receives
REFUSING = {"refused on its node": 1, "refused on both nodes": 2}
TIMEOUT = 32.0  # launch.timeout: servers have half of it
SLOW, SLOW_RANKS = "slow-rank", 2
DEAD, DEAD_RANKS = "dead-rank", 4


@pytest.fixture(scope="module")
def ended() -> dict[str, list[Ended]]:
    """Exit code and result of every rank of every case."""
    cases = {name: case[0] for name, case in HANGING.items()} | dict.fromkeys(REFUSING, 4)
    return run_side_by_side(run, cases | {SLOW: SLOW_RANKS, DEAD: DEAD_RANKS})


def results_of(ranks: list[Ended]) -> list[dict[str, Any]]:
    assert [code for code, _ in ranks] == [0] * len(ranks)
    return [result for _, result in ranks]


@pytest.mark.parametrize("name", HANGING)
def test_a_server_that_hangs_is_left_out_and_the_other_has_the_version(
    ended: dict[str, list[Ended]], name: str
) -> None:
    """A server that keeps reading after it was abandoned, maybe overwritten data, is left out too."""
    results = results_of(ended[name])
    assert [result["version"] for result in results] == [1] * HANGING[name][0]
    assert list(results[0]["reasons"]) == ["1"]


@pytest.mark.parametrize("name", REFUSING)
def test_a_server_that_fails_holds_up_no_rank_of_its_nodes(ended: dict[str, list[Ended]], name: str) -> None:
    """Rank 0 notices; the other node's ranks, whose store it does not reach, are released before they lose patience."""
    results = results_of(ended[name])
    assert [result["version"] for result in results] == [1] * 4 and results[0]["reasons"] == {"1": "it takes nothing"}
    assert [result["abandoned"] for result in results] == [[1], [], [], []]


@pytest.mark.parametrize("name", ["nodes-read", *REFUSING])
def test_keys_of_buckets_are_in_the_store_of_their_node(ended: dict[str, list[Ended]], name: str) -> None:
    results = results_of(ended[name])
    assert {kind for result in results for kind in result["run"]} == {"answer", "abandoned", "ready"}
    for node, ranks in enumerate((results[:2], results[2:])):
        assert ranks[0]["node"] == ranks[1]["node"]
        keys = [key.split("/") for key in ranks[0]["node"]]
        assert {int(key[2]) for key in keys if key[0] == "written"} == {2 * node, 2 * node + 1}
        servers = {0, 1} if name == "refused on both nodes" else {node}
        assert {int(key[2]) for key in keys if key[0] == "loaded"} == servers
        assert {key[0] for key in keys} == {"written", "loaded"}


def test_a_failed_publish_waits_for_the_slowest_rank(ended: dict[str, list[Ended]]) -> None:
    """Otherwise the next one would wipe what that rank waits for."""
    results = results_of(ended[SLOW])
    assert [result["version"] for result in results] == [3] * SLOW_RANKS
    assert [result["through"] for result in results] == [[True] * 3] * SLOW_RANKS


def test_a_rank_that_dies_ends_the_publish_on_every_other(ended: dict[str, list[Ended]]) -> None:
    """Killed with a bucket from the other node: the ranks that take from it notice at once, and end the others."""
    assert ended[DEAD][-1] == (-signal.SIGKILL, None)
    messages = [result["said"] for result in results_of(ended[DEAD][:-1])]
    assert all(message and "imed out" not in message for message in messages)
    assert any(f"waits for ranks [2, {DEAD_RANKS - 1}] in round" in message for message in messages[:2])


def run(name: str) -> dict[str, Any]:
    """Run on each rank of a case; server 0 is healthy."""
    dist.init_process_group("gloo")
    if name == DEAD:
        return lose_a_rank()
    if name in REFUSING:
        result = hang(4, 2, "memory", "refuse", False, span=REFUSING[name])
    else:
        result = be_slow() if name == SLOW else hang(*HANGING[name])
    dist.barrier()  # the store is rank 0's
    return result


class HangingCall(fakes.ThreadCall):
    """Server 1 accepts connections and stays silent from `moment` on; at "read" it answers after a while."""

    moment = ""

    def _hangs(self, *moments: str) -> bool:
        return self.server.index == 1 and self.moment in moments

    def _post(self, path: str, **body: Any) -> None:
        if self._hangs("pause") or (self._hangs("receive") and path == "/update_weights_from_tensor"):
            ServerCall._post(self, path, **body)
        else:
            super()._post(path, **body)

    def receive(self, orders: Any, version: int) -> None:
        if self._hangs("refuse"):
            raise ServerError("it takes nothing")
        if self._hangs("receive"):
            ServerCall.receive(self, orders, version)
        else:
            super().receive(orders, version)


class RefusingCall(fakes.ThreadCall):
    def receive(self, orders: Any, version: int) -> None:
        raise ServerError("it takes nothing")


def stall(receiver: Receiver) -> None:
    """Read the first bucket only after every rank has abandoned this server."""
    while receiver._server == 1 and not SyncStore(receiver._store, 1).abandoned(1):
        time.sleep(0.05)


def stage_of(name: str) -> int:
    """Pipeline stage of a shard, of two."""
    layer = hf_to_megatron.LAYER.fullmatch(name)
    return int(layer[1]) if layer else int(not name.startswith("embedding."))


def note_makers() -> Callable[[], set[int]]:
    """From now on record which ranks created the segments that this process opens."""
    processes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(processes, os.getpid())
    opened, paths = shared_memory.opened, list[str]()
    shared_memory.opened = lambda handle: (paths.append(handle[0]), opened(handle))[1]
    return lambda: {processes.index(int(path.split("/")[2])) for path in paths}


def note_abandoned() -> list[int]:
    """From now on record the servers that this rank abandons."""
    abandon, servers = SyncStore.abandon, list[int]()
    SyncStore.abandon = lambda store, server, ranks: (servers.append(server), abandon(store, server, ranks))[1]
    return servers


def hang(ranks: int, nodes: int, transport: str, moment: str, quantized: bool, span: int = 1) -> dict[str, Any]:
    """Run on each rank: publish to a server that hangs and to one that does not.

    Of two nodes each has a server, or with `span` 2 a rank of both servers, and a stage.
    """
    config = fakes.configure(transport, quantized)
    config.launch.timeout, config.launch.nproc_per_node, config.publish.verify = TIMEOUT, ranks // nodes, 0
    config.launch.nodes, config.parallel.pp, config.rollout.server.nnodes = nodes, nodes, span
    HangingCall.moment, sync.ServerCall = moment, HangingCall
    if moment == "read":
        plan = Receiver._plan
        Receiver._plan = lambda self, *arguments: (stall(self), plan(self, *arguments))[1]
    shards = fakes.make_shards()
    node = dist.get_rank() * nodes // ranks
    own_shards = {name: shard for name, shard in shards.items() if nodes == 1 or stage_of(name) == node}
    in_place.named_shards = lambda chunks: own_shards.items()
    fleet = fakes.make_fleet(config) if dist.get_rank() == 0 else None
    silent = socket.create_server(("127.0.0.1", 0))
    if fleet:
        fleet.servers[1].url = f"http://127.0.0.1:{silent.getsockname()[1]}"
    makers = note_makers()
    spec = policy_servers(config)
    with WeightSync(sync_spec(config), spec, [], fakes.SHAPE, fleet, fakes.BUCKET // (1 + quantized)) as sender:
        assert len(sender._way.plan) > 4
        places = in_place.places_of(sync_spec(config), spec.placement, on_gpus=False)
        parts = sender._way.transport._writer.parts
        into = set() if transport == "network" else {places.keeper(node, t) for part in parts for t in part}
        assert makers() == into - {dist.get_rank()}  # it opens what it writes to, which is on its node
        assert into <= set(places.members(node))
        abandoned = note_abandoned()
        sender.publish(1)
        result: dict[str, Any] = {"version": sender.version, "abandoned": abandoned}
        result["run"] = sorted({key.split("/")[0] for key in SyncStore(sender._way._store, 1)._store.list_keys()})
        if transport == "memory":
            result["node"] = sorted(PlaceStore(sender._way.transport._store, 1)._store.list_keys())
        dist.barrier()  # the store is the first rank's
        if fleet:
            result["reasons"] = {str(index): reason for index, reason in fleet.reasons.items()}
            fakes.assert_holds(fleet.servers[0], policy_servers(config).layout, shards)
    return result


def be_slow() -> dict[str, Any]:
    """Run on each rank: publish twice to a server that takes nothing, then to one that takes all; the last is slow.

    `through`: whether all ranks had done with the store when this one left each publish.
    """
    config = fakes.configure("network", servers=1)
    config.launch.timeout, config.launch.nproc_per_node, config.publish.verify = 60.0, SLOW_RANKS, 0
    shards = fakes.make_shards()
    in_place.named_shards = lambda chunks: shards.items()
    fleet = fakes.make_fleet(config) if dist.get_rank() == 0 else None
    store, through = dist.distributed_c10d._get_default_store(), list[bool]()
    carry, deliver = NetworkTransport.carry, InPlace.publish

    def carry_late(*arguments: Any) -> None:
        if dist.get_rank() == SLOW_RANKS - 1:
            time.sleep(1)
        carry(*arguments)
        store.add("through", 1)

    def deliver_and_look(*arguments: Any) -> None:
        deliver(*arguments)
        through.append(store.add("through", 0) == SLOW_RANKS * (1 + len(through)))
        dist.barrier()

    NetworkTransport.carry, InPlace.publish = carry_late, deliver_and_look
    with WeightSync(sync_spec(config), policy_servers(config), [], fakes.SHAPE, fleet, fakes.BUCKET) as sender:
        sync.ServerCall = RefusingCall
        for version in (1, 2):
            try:
                sender.publish(version)
                raise AssertionError
            except PublishError as error:
                assert "it takes nothing" in str(error)
            if fleet:
                fleet.reasons.clear()
        sync.ServerCall = fakes.ThreadCall
        sender.publish(3)
        if fleet:
            fakes.assert_holds(fleet.servers[0], policy_servers(config).layout, shards)
        return {"version": sender.version, "through": through}


def lose_a_rank() -> dict[str, Any]:
    """As a rank of four on two nodes: publish while the last one is killed. `said`: the error of the others."""
    written = PlaceStore.set_written

    def die(store: PlaceStore, bucket: int, source: int) -> None:
        if bucket == 2 and source == DEAD_RANKS - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        written(store, bucket, source)

    PlaceStore.set_written = die
    try:
        hang(DEAD_RANKS, 2, "memory", "", False)
        return {"said": ""}
    except RuntimeError as error:
        return {"said": str(error)}
