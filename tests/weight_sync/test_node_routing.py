"""Every node's segments get every element once, from a rank of the node if one has it; numbers only."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from megatron_collab.config import CONF, compose
from megatron_collab.launch.trainer_specs import sync_spec, trainer_layout
from megatron_collab.models import hf_config
from megatron_collab.models.hf_to_sglang import ServerLayout
from megatron_collab.models.parallel_layout import TrainerLayout
from megatron_collab.runtime import device
from megatron_collab.weight_sync import plan
from megatron_collab.weight_sync.in_place import _devices
from megatron_collab.weight_sync.node_routing import Places, hops, sent, written
from megatron_collab.weight_sync.plan import Slice, SyncPlan
from megatron_collab.weight_sync.transports.registry import places_of
from tests.helpers import policy_servers
from tests.weight_sync.random_layouts import draw, seeds
from tests.weight_sync.test_plan import ITEM, Shards, run, trainer_shards

Place = tuple[int, int, int]  # round, server rank, number of a slice in its bucket


def holds(shards: Shards, piece: Slice, block: np.ndarray) -> bool:
    """Whether the rank's shard of that name contains this block; every element of the model is a distinct number."""
    return piece.shard in shards and np.array_equal(shards[piece.shard][piece.shard_index], block)


def carried(sync_plan: SyncPlan, places: Places, node: int) -> tuple[SyncPlan, Counter[Place], set[Place]]:
    """What a node's segments receive: the plan with the actual sources, how often, and what crossed between nodes."""
    number = {
        (k, t, piece.offset): n
        for k, row in enumerate(sync_plan)
        for t, bucket in enumerate(row)
        for n, piece in enumerate(bucket.slices)
    }
    came: dict[Place, int] = {}
    times: Counter[Place] = Counter()
    crossed: set[Place] = set()
    for rank in places.members(node):
        for k, items in enumerate(written(sync_plan, places, rank)):
            for t, piece in items:
                came[k, t, number[k, t, piece.offset]] = rank
                times[k, t, number[k, t, piece.offset]] += 1
    for k, row in enumerate(hops(sync_plan, places)):
        for hop in row:
            if places.of_rank(hop.keeper) != node:
                continue
            assert places.of_rank(hop.source) != node and hop.keeper == places.keeper(node, hop.target)
            covered = [piece for piece in sync_plan[k][hop.target].slices if hop.start <= piece.offset < hop.stop]
            assert covered[0].offset == hop.start and covered[-1].offset + covered[-1].size == hop.stop
            packed = sent(sync_plan, places, hop.source)[k]
            for piece in covered:
                assert (hop.target, piece) in packed
                place = k, hop.target, number[k, hop.target, piece.offset]
                came[place] = hop.source
                times[place] += 1
                crossed.add(place)
    rounds = tuple(
        tuple(
            replace(
                bucket,
                slices=tuple(
                    replace(piece, source=came.get((k, t, n), piece.source)) for n, piece in enumerate(bucket.slices)
                ),
            )
            for t, bucket in enumerate(row)
        )
        for k, row in enumerate(sync_plan)
    )
    return rounds, times, crossed


@pytest.mark.parametrize("seed", seeds(60))
def test_every_node_gets_every_element_once(seed: int) -> None:
    shape, trainer, server = draw(seed)
    rng = random.Random(seed)
    count = rng.choice([2, 3, 4])
    if trainer.ranks % count:  # otherwise a tensor parallel group may span two nodes
        trainer = replace(trainer, ranks=trainer.ranks * count)
    span = rng.choice([divisor for divisor in range(1, count + 1) if count % divisor == 0 and server.tp % divisor == 0])
    parts, colocated = rng.choice([1, 2]), rng.random() < 0.5
    places = Places(count, trainer.ranks // count, parts, server.tp // span, colocated, span)
    shards = trainer_shards(shape, trainer)
    sync_plan = plan.plan_sync(shape, trainer, server, ITEM, 8192)
    every = {
        (k, t, n): piece
        for k, row in enumerate(sync_plan)
        for t, bucket in enumerate(row)
        for n, piece in enumerate(bucket.slices)
    }
    blocks = {place: shards[piece.source][piece.shard][piece.shard_index] for place, piece in every.items()}
    for place, piece in every.items():
        holders = [rank for rank, rank_shards in enumerate(shards) if holds(rank_shards, piece, blocks[place])]
        assert holders == list(piece.holders)
    gets: Counter[Place] = Counter()
    for node in range(count):
        node_plan, times, crossed = carried(sync_plan, places, node)
        here = {place: piece for place, piece in every.items() if places.has(node, place[1])}
        assert times == Counter(here.keys())
        gets.update(here.keys())
        run(node_plan, shards, shape, server)
        members = places.members(node)
        for place, piece in here.items():
            near = any(holds(shards[rank], piece, blocks[place]) for rank in members)
            assert (place in crossed) == (not near)
            k, t, n = place
            source = node_plan[k][t].slices[n].source
            assert places.writer(node, t, piece) == (source if near else places.keeper(node, t))
            if places.colocated and holds(shards[places.keeper(node, t)], piece, blocks[place]):
                assert source == places.keeper(node, t)
    assert gets == Counter(dict.fromkeys(every, count // span)), "each part of a server is on one of its nodes"


def test_on_one_node_ranks_of_the_targets_devices_write_what_they_hold_and_nothing_crosses() -> None:
    """Trainer of TP2, PP2, DP2, servers of TP4: of stage 0 rank 3 has what server rank 3 needs, rank 1 has no part."""
    shape, trainer = draw(0)[0], TrainerLayout(tp=2, pp=2, ranks=8)
    shape = replace(shape, layers=4, kv_heads=4, heads=8, ffn=8, vocab=256, experts=None)
    sync_plan, places = plan.plan_sync(shape, trainer, ServerLayout(4), ITEM), Places(1, 8, 1, 4, colocated=True)
    assert not any(hops(sync_plan, places))
    holders = {0: {0, 2}, 1: {0, 2}, 2: {1, 3}, 3: {1, 3}}
    for rank in range(4):
        for target, piece in written(sync_plan, places, rank)[0]:
            if "norm" in piece.target:
                assert rank == target
            else:
                assert rank == target if target in holders[target] else rank in holders[target]


@pytest.mark.seconds
def test_of_a_70b_model_every_link_carries_the_same() -> None:
    """16 nodes of 8, TP8 PP4: in every round every device sends and receives three quarters of a bucket."""
    options = ["launch.nodes=16", "launch.nproc_per_node=8", "parallel.tp=8", "parallel.pp=4"]
    options += ["rollout.server.tp=8", "rollout.server.replicas=16", "rollout.server.fp8=false"]
    config = compose(["experiment=train_70b", *options])
    shape = hf_config.read(CONF / "shapes" / "Llama-3.3-70B-Instruct.json")
    sync_plan = plan.plan_sync(shape, trainer_layout(config), policy_servers(config).layout, 2)
    places = places_of(sync_spec(config), policy_servers(config).placement, on_gpus=True)
    assert places == Places(16, 8, 1, 8, colocated=True)
    for buckets, row in zip(sync_plan, hops(sync_plan, places), strict=True):
        out, into = Counter[int](), Counter[int]()
        for hop in row:
            assert hop.source % 8 == hop.keeper % 8 == hop.target
            out[hop.source] += hop.stop - hop.start
            into[hop.keeper] += hop.stop - hop.start
        for ends in (out, into):
            assert len(ends) == 128
            most = max(ends.values())
            assert most <= 1.05 * 0.75 * max(bucket.size for bucket in buckets)  # stages with the vocabulary have more
    largest = max(sum(piece.size for _, piece in items) for rank in range(8) for items in sent(sync_plan, places, rank))
    assert largest <= plan.BUCKET_BYTES / 16 * 1.05  # what a rank packs to send


@pytest.mark.parametrize(
    "options",
    [
        ["experiment=train_8b"],
        ["experiment=train_8b", "parallel.tp=4", "rollout.server.replicas=2", "rollout.server.tp=2"],
        ["experiment=train_8b", "launch.nodes=2", "launch.interface=ib0", "rollout.server.replicas=8"],
        ["experiment=train_70b"],
        ["experiment=train_70b", "rollout.server.replicas=8", "rollout.server.tp=16", "rollout.server.nnodes=2"],
        ["experiment=train_70b", "rollout.server.replicas=16", "rollout.server.tp=8", "rollout.server.nnodes=2"],
    ],
    ids=" ".join,
)
def test_on_gpus_a_colocated_server_reads_memory_of_its_own_device(
    options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch-memory-saver maps what a server copies into for the server's device alone."""
    monkeypatch.setattr(device, "select", lambda setting: device.Device("cuda", "nccl"))
    config = compose(options)
    spec, here = policy_servers(config), config.launch.nproc_per_node
    placement, places = spec.placement, places_of(sync_spec(config), spec.placement, on_gpus=True)
    users: Counter[tuple[int, int]] = Counter()
    for server in range(placement.replicas):
        segments = [segment.index for segment in _devices(spec, server)]
        width = placement.tp // placement.nnodes
        assert segments == [placement.first_device(server) + t % width for t in range(placement.tp)]
        for t, segment in enumerate(segments):
            place = places.of_server(server, t)
            assert places.has(place, t) and places.first_server(place) == server
            assert segment == places.keeper(place, t) % here
            node = placement.nodes_of(server)[t // width]
            assert {rank // here for rank in places.members(place)} == {node}
            users[node, segment] += 1
    assert users == Counter(dict.fromkeys(users, 1)), "no two servers share a device"


def test_over_the_network_all_servers_are_alike() -> None:
    config = compose(["experiment=train_70b", "publish.transport=network"])
    places = places_of(sync_spec(config), policy_servers(config).placement, on_gpus=True)
    assert places.count == 1 and not places.colocated
