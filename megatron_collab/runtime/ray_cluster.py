"""The Ray cluster of a run, joined at RAY_ADDRESS or started on this machine, and its actors."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import psutil
import ray
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]  # compiled

from megatron_collab.patches.ray import start_without_agents, start_without_monitors, stay_on_loopback
from megatron_collab.runtime import network
from megatron_collab.runtime.files import ScratchFolder
from megatron_collab.runtime.process import RESUMES, Preempted, RunStopped, beat, raise_if_preempted, wait_for

logger = logging.getLogger(__name__)

STARTS = 3  # consecutive failures to start Ray that end the run
# Ray's own limits: until its store answers, and until a process finds its node. How long the node may take to register
# with the store cannot be set: 30 s in Ray 2.60 (ray/_private/node.py); a start that exceeds them is repeated.
_START_LIMITS = ("RAY_gcs_server_port_wait_time_s", "RAY_raylet_start_wait_time_s")
_START_SECONDS = 60  # instead of Ray's 30, which a busy machine exceeds
_AGENTS, _AGENTS_START = 2, 30.0  # dashboard and runtime environments; timeout in seconds
_CLUSTER_SECONDS = 30.0  # time for anything to listen at RAY_ADDRESS
_HEALTH_SECONDS = 60.0  # time for Ray to answer there, with the start of Ray's command on a busy machine
_CLUSTER = ("gcs_server", "raylet")  # processes that a cluster of this machine cannot lose
_REQUESTS = 100_000  # concurrent ones per actor; more would wait in a hidden queue
_cluster: dict[psutil.Process, str] = {}  # those of the cluster that this process has started, with their names


@contextmanager
def ray_session(processes: int, nodes: int = 1, start_timeout: float = 0.0) -> Iterator[None]:
    """Connect to the Ray cluster at RAY_ADDRESS if that is set, else start one on this machine that ends with the run.

    A cluster is joined through a Ray node on this machine. Raises RunStopped if it still has fewer than `nodes` nodes
    after `start_timeout` seconds (rollout.server.start_timeout). Ray's ports require its token; a local cluster, which
    prestarts `processes` workers, is on loopback with a new token.
    """
    os.environ |= network.without_proxy()  # Ray's own processes and its workers inherit it
    quiet = {"log_to_driver": False, "logging_level": "error"}
    with ExitStack() as stack:
        if os.environ.get("RAY_ADDRESS", "local") != "local":
            stack.callback(ray.shutdown)
            _join(**quiet)
            _await_nodes(nodes, start_timeout)
        else:
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
            # By default Ray starts workers at nice 15; they would starve beside busy ranks.
            os.environ.setdefault("RAY_worker_niceness", "0")
            folder = stack.enter_context(ScratchFolder())
            stack.callback(_cluster.clear)
            stopped = stack.enter_context(ExitStack())  # exits after ray.shutdown, which a kill may interrupt
            stack.callback(ray.shutdown)
            _start_ray(num_cpus=processes, _temp_dir=str(folder), **quiet)
            stopped.callback(_reaper().communicate)
        yield


def _start_ray(**options: Any) -> None:
    """Start Ray on this machine, with retries. RunStopped after STARTS."""
    start_without_monitors()
    start_without_agents(lambda: network.bindable("port", 0))
    stay_on_loopback()
    for name in _START_LIMITS:
        os.environ.setdefault(name, str(_START_SECONDS))
    children_before = set(psutil.Process().children())
    for remaining in reversed(range(STARTS)):
        beat()
        raise_if_preempted()
        try:
            ray.init("local", include_dashboard=False, **options)
            names = {child: child.name() for child in set(psutil.Process().children()) - children_before}
            _cluster.update({child: name for child, name in names.items() if name in _CLUSTER})
            return
        except Exception as error:  # Ray has no specific type
            ray.shutdown()
            for child in set(psutil.Process().children()) - children_before:  # else the failed start's processes stay
                child.kill()
            if not remaining:
                raise RunStopped(f"Ray did not start, {STARTS} times in a row: {error}") from error
            logger.warning(f"start {STARTS - remaining} of {STARTS} of Ray failed, starting it again: {error}")


def raise_if_lost() -> None:
    """Raise RunStopped if a process of the cluster that this process has started has ended; cheap.

    Ray itself would end this process, but a minute later and without a reason.
    """
    for process, name in _cluster.items():
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            raise RunStopped(f"Ray has lost a process of the run, {name}; {RESUMES}")


def _join(**options: Any) -> None:
    """Connect to the cluster at RAY_ADDRESS. Raises RunStopped if it does not answer: Ray would retry for minutes."""
    address = os.environ["RAY_ADDRESS"]
    try:
        place = urlsplit(address if "://" in address else f"//{address}")
        if place.port and not wait_for(lambda: _answers(place.hostname, place.port), _CLUSTER_SECONDS):
            raise TimeoutError(f"nothing answers there within {_CLUSTER_SECONDS:g} s")
        if place.scheme != "ray":  # Ray's client limits its attempts
            _check_health(address)
        with warnings.catch_warnings(action="ignore"):  # of Ray's client, which also raises
            ray.init(**options)
    except Preempted:
        raise
    except (Exception, SystemExit) as error:  # Ray has no specific type, and exits if a cluster stops answering
        reason = f"no Ray cluster there ({' '.join(str(error).split())})"
        raise RunStopped(
            f"RAY_ADDRESS={address}: {reason}; start Ray, or unset it for a cluster of this run"
        ) from error


def _check_health(address: str) -> None:
    """Raises RuntimeError unless the store of a Ray cluster answers at `address`, a place or "auto".

    Ray's own command asks it: in this process, a port of another program would hold ray.init for minutes. No option
    limits its attempts, and each of them writes to the console. A token of this user switches authentication on at
    "auto", as in ray.init and `ray start`; the command itself does not look for one.
    """
    has_token = address == "auto" and AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True)
    variables = ({"RAY_AUTH_MODE": "token"} if has_token else {}) | os.environ
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=variables, **pipes) as check:
        try:
            ended = wait_for(lambda: check.poll() is not None, _HEALTH_SECONDS)
        finally:
            check.kill()
        lines = check.communicate()[1].splitlines()
    if check.returncode:
        raise RuntimeError(
            lines[-1] if ended and lines else f"what listens there does not answer in {_HEALTH_SECONDS:g} s"
        )


def _answers(host: str | None, port: int | None) -> bool:
    with suppress(OSError):
        socket.create_connection((host or network.HOST, port or 0), timeout=_CLUSTER_SECONDS).close()
        return True
    return False


def _await_nodes(needed: int, timeout: float) -> None:
    """Return once the cluster has as many nodes as the run. Raises RunStopped after the timeout."""

    def alive() -> int:
        return sum(node["Alive"] for node in ray.nodes())

    if not wait_for(lambda: alive() >= needed, timeout):
        raise RunStopped(
            f"RAY_ADDRESS={os.environ['RAY_ADDRESS']}: {alive()} Ray nodes after "
            f"rollout.server.start_timeout={timeout:g} s, and launch.nodes={needed}; start Ray on all of them"
        )


def _reaper() -> subprocess.Popen[str]:
    """A process that kills Ray's agents when its input ends; without their raylet they would live for another minute.

    The raylet starts the agents in the background: on a busy machine ray.init returns before they run.
    """
    raylets = [child for child in psutil.Process().children() if child.name() == "raylet"]
    agents: list[str] = []

    def agents_running() -> bool:
        agents.clear()
        for child in (child for raylet in raylets for child in raylet.children()):
            with suppress(psutil.NoSuchProcess):
                agents.extend([str(child.pid)] if "agent" in " ".join(child.cmdline()).lower() else [])
        return len(agents) == _AGENTS

    wait_for(agents_running, _AGENTS_START)
    command = ["sh", "-c", 'read line; kill -9 "$@" 2>/dev/null', "reaper", *agents]
    return subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)


def start_actor(kind: type, *arguments: Any, name: str | None = None) -> Any:
    """The handle of a new Ray actor `kind(*arguments)` on any node; the actor ends with its last handle.

    If its process dies, Ray restarts it and retries its running tasks. Other actors look it up by `name`: a handle
    passed as an argument could be invalid when the actor is restarted.
    """
    # More retries than restarts: until Ray notices that a node is gone, each attempt to reach it is one.
    options = {"num_cpus": 0.01, "max_restarts": 3, "max_task_retries": 20, "max_concurrency": _REQUESTS}
    actor = ray.remote(**options, scheduling_strategy="SPREAD")
    return actor(kind).options(name=name).remote(*arguments)
