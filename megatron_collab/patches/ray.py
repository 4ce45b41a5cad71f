"""Patches of Ray: a cluster that ends with its run starts without the processes for long-lived clusters."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron_collab.patches import Patch


def start_without_monitors() -> None:
    """Disable Ray's monitors and dashboard. Call before Ray is started on this machine; can be repeated."""
    from ray._private.node import Node

    def nothing(*_: Any, **__: Any) -> None: ...

    for name in ("start_monitor", "start_log_monitor", "start_api_server"):
        setattr(Node, name, nothing)


def stay_on_loopback() -> None:
    """Keep Ray on loopback. Call before Ray is started as a cluster of this machine only; can be repeated."""
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = False


_ray = partial(Patch, "ray")

PATCHES = (
    _ray(
        "no monitors and no dashboard",
        why="The autoscaler, the copier of logs and the dashboard's server, of which a run uses none: three processes, "
        "2 s of CPU and half of the seconds that Ray takes to start.",
        upstream="ray/_private/node.py:1643 (start_head_processes, start_ray_processes)",
        until="ray.init has options for them, as the RayParams that it makes have",
        test="tests/runtime/test_ray_cluster.py::test_ray_starts_without_monitors",
        uses=tuple(f"ray._private.node.Node.start_{name}" for name in ("monitor", "log_monitor", "api_server")),
    ),
    _ray(
        "a cluster of one machine is on loopback",
        why="Its processes would listen on every interface. Ray replaces a node's address that is 127.0.0.1 by another "
        "of the machine, unless it assumes a platform without clusters.",
        upstream="ray/_private/services.py:811 (get_node_ip_address)",
        until="ray.init takes _node_ip_address=127.0.0.1 as it is",
        test="tests/runtime/test_ray_cluster.py::test_nothing_of_ray_listens_beyond_loopback",
        uses=("ray._private.ray_constants.ENABLE_RAY_CLUSTER",),
    ),
)
