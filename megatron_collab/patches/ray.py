"""Patches of Ray: a cluster that ends with its run starts without the processes for long-lived clusters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
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


def start_without_agents(free_port: Callable[[], int]) -> None:
    """Let a node start before its agents, however long those take to import. Can be repeated.

    `free_port` returns a port for the agent of runtime environments. The dashboard's agent has three, for metrics that
    a run does not read: their files say, as the agent itself does if it lacks packages, that nothing serves them.
    """
    from ray import _raylet
    from ray._private.node import Node

    start_raylet = getattr(Node.start_raylet, "__wrapped__", Node.start_raylet)

    @wraps(start_raylet)
    def start(self: Any, *arguments: Any, **options: Any) -> None:
        for kind in ("METRICS_AGENT", "METRICS_EXPORT", "DASHBOARD_AGENT_LISTEN"):
            name = getattr(_raylet, f"{kind}_PORT_NAME")
            _raylet.persist_port(self._session_dir, self._node_id, name, -1)  # type: ignore[attr-defined]  # compiled
        self._ray_params.runtime_env_agent_port = free_port()
        start_raylet(self, *arguments, **options)

    Node.start_raylet = start


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
    _ray(
        "a node that does not wait for its agents",
        why="The node ends if an agent has not written its ports within 15 s, a limit that no setting changes, and "
        "Ray notices only at its own limit. On a busy machine, or from a slow disk, their imports take longer.",
        upstream="src/ray/raylet/node_manager.cc (WaitForDashboardAgentPorts); ray-project/ray#65983",
        until="a variable sets that limit",
        test="tests/runtime/test_ray_cluster.py::test_a_node_starts_before_its_agents",
        uses=("ray._private.node.Node.start_raylet", "ray._raylet.persist_port"),
    ),
)
