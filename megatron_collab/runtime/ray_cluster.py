"""The Ray cluster of a run: joined at RAY_ADDRESS or started on this machine, and actors on it."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import psutil
import ray

from megatron_collab.config import Config
from megatron_collab.patches.ray import start_without_monitors, stay_on_loopback
from megatron_collab.runtime import network
from megatron_collab.runtime.files import ScratchFolder
from megatron_collab.runtime.process import RunStopped, beat, raise_if_preempted, wait_for

STARTS = 3  # failures of Ray's start in a row that end the run
_AGENTS, _AGENTS_START = 2, 30.0  # of the dashboard and of runtime environments; seconds that they may take
_REQUESTS = 100_000  # that an actor may have at once; the rest would wait in a hidden queue


@contextmanager
def ray_session(config: Config) -> Iterator[None]:
    """Connect to the Ray cluster at RAY_ADDRESS if that is set, else start one on this machine that ends with the run.

    A cluster is joined through a Ray node on this machine; RunStopped where it has fewer nodes than the run after
    rollout.server.start_timeout seconds. Ray's ports need its token; a local cluster is on loopback, with a new one.
    """
    os.environ |= network.without_proxy()  # Ray's own processes and its workers inherit it
    quiet = {"log_to_driver": False, "logging_level": "error"}
    with ExitStack() as stack:
        if "RAY_ADDRESS" in os.environ:
            stack.callback(ray.shutdown)
            ray.init(**quiet)
            _await_nodes(config)
        else:
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
            # Ray's default is to start workers at nice 15, which starve beside busy ranks.
            os.environ.setdefault("RAY_worker_niceness", "0")
            folder = stack.enter_context(ScratchFolder())
            stopped = stack.enter_context(ExitStack())  # left after Ray has stopped, which a kill may interrupt
            stack.callback(ray.shutdown)
            processes = config.rollout.workers + config.reward.workers  # Ray starts a process a CPU in advance
            _start_ray(num_cpus=processes, _temp_dir=str(folder), **quiet)
            stopped.callback(_reaper().communicate, "\n")
        yield


def _start_ray(**options: Any) -> None:
    """Start Ray on this machine; RunStopped after STARTS failures: its own limit of 30 s is short on a busy machine."""
    start_without_monitors()
    stay_on_loopback()
    others = set(psutil.Process().children())
    for left in reversed(range(STARTS)):
        beat()
        raise_if_preempted()
        try:
            ray.init("local", include_dashboard=False, **options)
            return
        except Exception as error:  # Ray has no type for it
            ray.shutdown()
            for child in set(psutil.Process().children()) - others:  # processes of the failed start would go on
                child.kill()
            if not left:
                raise RunStopped(f"Ray did not start, {STARTS} times in a row: {error}") from error


def _await_nodes(config: Config) -> None:
    """Return once the cluster has as many nodes as the run; RunStopped after the timeout."""
    wanted, timeout = config.launch.nodes, config.rollout.server.start_timeout

    def found() -> int:
        return sum(node["Alive"] for node in ray.nodes())

    if not wait_for(lambda: found() >= wanted, timeout):
        raise RunStopped(
            f"RAY_ADDRESS={os.environ['RAY_ADDRESS']}: {found()} Ray nodes after "
            f"rollout.server.start_timeout={timeout:g} s, and launch.nodes={wanted}; start Ray on all of them"
        )


def _reaper() -> subprocess.Popen[str]:
    """A process that kills Ray's agents, which live on for a minute, when its input ends without a line.

    The raylet starts them by and by: on a busy machine Ray has started before they are there.
    """
    raylets = [child for child in psutil.Process().children() if child.name() == "raylet"]
    agents: list[str] = []

    def there() -> bool:
        agents.clear()
        for child in (child for raylet in raylets for child in raylet.children()):
            with suppress(psutil.NoSuchProcess):
                agents.extend([str(child.pid)] if "agent" in " ".join(child.cmdline()).lower() else [])
        return len(agents) == _AGENTS

    wait_for(there, _AGENTS_START)
    command = ["sh", "-c", 'read line || kill -9 "$@"', "reaper", *agents]
    return subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)


def start_actor(kind: type, *arguments: Any, name: str | None = None) -> Any:
    """The handle of a new Ray actor `kind(*arguments)` on any node; the actor ends with its last handle.

    When its process dies it is restarted and its running tasks are retried. Others look it up by `name`: a handle
    among the arguments could be gone when the actor is restarted.
    """
    options = {"num_cpus": 0.01, "max_restarts": 3, "max_task_retries": 3, "max_concurrency": _REQUESTS}
    actor = ray.remote(**options, scheduling_strategy="SPREAD")
    return actor(kind).options(name=name).remote(*arguments)
