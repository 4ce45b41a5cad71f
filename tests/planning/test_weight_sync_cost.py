"""The calculated cost of a plan, against figures worked out by hand."""

from __future__ import annotations

import pytest

from megatron_collab.config import CONF, compose
from megatron_collab.launch.trainer_specs import trainer_layout
from megatron_collab.models import hf_config
from megatron_collab.planning.weight_sync_cost import Bandwidth, Sharding, SyncCost, sync_cost
from megatron_collab.weight_sync import plan
from tests.helpers import policy_servers

SPEEDS = {Bandwidth.MEMORY: 1000e9, Bandwidth.NODE: 100e9, Bandwidth.NETWORK: 10e9}
BYTES = 2 * 8.03026e9  # of Llama 3.1 8B in bfloat16


def planned(nodes: int, ranks: int, *overrides: str) -> SyncCost:
    """The cost for the 8B model on `nodes` nodes of `ranks` ranks each."""
    layout = [f"launch.nodes={nodes}", f"launch.nproc_per_node={ranks}", "rollout.server.replicas=1", "parallel.pp=1"]
    layout += ["parallel.vpp=1", "rollout.server.fp8=false"]
    config = compose(["experiment=train_70b", *layout, *overrides])
    shape = hf_config.read(CONF / "shapes" / "Llama-3.1-8B-Instruct.json")
    spec = policy_servers(config)
    sync_plan = plan.plan_sync(shape, trainer_layout(config), spec.layout, 2)
    return sync_cost(config, spec.placement, shape, sync_plan, SPEEDS)


def test_equal_cuts_on_the_same_devices_send_nothing() -> None:
    cost = planned(1, 8, "parallel.tp=8", "rollout.server.tp=8")
    assert cost.paths == {(Sharding.SAME, Bandwidth.MEMORY): pytest.approx(BYTES, rel=1e-3)}
    assert cost.sent == {rank: pytest.approx(BYTES / 8, rel=1e-3) for rank in range(8)}
    assert cost.seconds == pytest.approx(cost.floor, rel=1e-2)
    assert cost.floor == pytest.approx(BYTES / (8 * 1000e9), rel=1e-3)


def test_a_second_stage_sends_its_half_in_the_same_cut() -> None:
    cost = planned(1, 8, "parallel.tp=4", "parallel.pp=2", "rollout.server.tp=4")
    assert set(cost.paths) == {(Sharding.SAME, Bandwidth.MEMORY), (Sharding.SAME, Bandwidth.NODE)}
    assert cost.paths[Sharding.SAME, Bandwidth.NODE] == pytest.approx(BYTES / 2, rel=1e-3)
    assert cost.floor == pytest.approx(BYTES / 2 / (4 * 100e9), rel=1e-3)


def test_two_servers_on_other_nodes_receive_resharded_tensors() -> None:
    """TP2 to TP1: only norms are sharded alike in trainer and server."""
    servers = ["rollout.server.colocated=false", "rollout.server.replicas=2", "rollout.server.tp=1"]
    cost = planned(2, 2, "parallel.tp=2", *servers)
    norms = 2 * 2 * 65 * 4096
    assert cost.paths[Sharding.SAME, Bandwidth.NETWORK] == norms
    assert cost.paths[Sharding.OTHER, Bandwidth.NETWORK] == pytest.approx(2 * BYTES - norms, rel=1e-3)
    assert set(cost.received) == {(0, 0), (1, 0)}
    assert cost.seconds == pytest.approx(BYTES / 10e9, rel=0.02) and cost.seconds >= cost.floor


def test_other_devices_of_a_node_use_its_links() -> None:
    cost = planned(1, 2, "parallel.tp=2", "rollout.server.tp=2", "rollout.server.colocated=false")
    assert set(cost.paths) == {(Sharding.SAME, Bandwidth.NODE)}


def test_each_server_receives_the_parameters_of_the_other_node_from_it() -> None:
    """Two nodes, a stage on each: half of the model crosses to each of four servers, by its own devices' links."""
    servers = ["rollout.server.tp=2", "rollout.server.replicas=4"]
    cost = planned(2, 4, "parallel.tp=2", "parallel.pp=2", *servers)
    bytes_by_link = {
        link: sum(size for (_, bandwidth), size in cost.paths.items() if bandwidth is link) for link in Bandwidth
    }
    assert bytes_by_link[Bandwidth.NETWORK] == pytest.approx(4 * BYTES / 2, rel=1e-3)
    assert bytes_by_link[Bandwidth.MEMORY] == pytest.approx(4 * BYTES / 2, rel=1e-3)
    assert bytes_by_link[Bandwidth.NODE] == 0
    assert cost.seconds == pytest.approx(BYTES / 2 / 2 / 10e9, rel=0.02)  # by two devices of a server


def test_a_server_over_two_nodes_receives_the_layers_of_the_other_nodes_stage() -> None:
    """An eighth of the model to each of eight ranks, half of which the ranks of the same node hold."""
    servers = ["rollout.server.tp=8", "rollout.server.nnodes=2"]
    cost = planned(2, 4, "parallel.tp=4", "parallel.pp=2", *servers)
    bytes_by_link = {
        link: sum(size for (_, bandwidth), size in cost.paths.items() if bandwidth is link) for link in Bandwidth
    }
    assert bytes_by_link[Bandwidth.NETWORK] == pytest.approx(BYTES / 2, rel=1e-3)
    assert bytes_by_link[Bandwidth.MEMORY] + bytes_by_link[Bandwidth.NODE] == pytest.approx(BYTES / 2, rel=1e-3)
    assert set(cost.received) == {(0, target) for target in range(8)}
