"""The start of Ray: retried, without leaving a process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray

from megatron_collab.runtime import ray_cluster
from megatron_collab.runtime.process import RunStopped, wait_for
from tests.helpers import listening

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("failures", [2, ray_cluster.STARTS])
def test_a_start_of_ray_that_fails_is_tried_again_and_leaves_no_process(
    failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def init(address: str, **options: object) -> None:
        started.append(subprocess.Popen(["sleep", "600"]))
        if len(started) <= failures:
            raise Exception("the current node timed out during startup")

    monkeypatch.setattr(ray_cluster, "ray", SimpleNamespace(init=init, shutdown=lambda: None))
    before = subprocess.Popen(["sleep", "600"])
    try:
        with (
            nullcontext() if failures < ray_cluster.STARTS else pytest.raises(RunStopped, match=r"3 times .* timed out")
        ):
            ray_cluster._start_ray(num_cpus=1)
        assert [process.wait(30) for process in started[:failures]] == [-signal.SIGKILL] * failures
        assert all(process.poll() is None for process in [before, *started[failures:]])
    finally:
        for process in [before, *started]:
            process.kill()
            process.wait()


Sockets = dict[psutil.Process, set[tuple[str, int]]]


def family() -> list[psutil.Process]:
    """This process and all its descendants."""
    this = psutil.Process()
    return [this, *this.children(recursive=True)]


@pytest.fixture(scope="module")
def before() -> Sockets:
    """Ports on which the family listens before Ray starts, such as the torch store of an earlier test."""
    return listening(family())


AGENTS = ("/dashboard/agent.py", "/agent/main.py")
BLOCK_AGENTS = """
import pathlib, sys, time
is_agent = any(argument.endswith({agents}) for argument in sys.orig_argv)
while is_agent and not pathlib.Path({release!r}).exists():
    time.sleep(0.1)
"""


def is_agent(process: psutil.Process) -> bool:
    return any(argument.endswith(AGENTS) for argument in process.cmdline())


@pytest.fixture(scope="module")
def agents_at_start(before: Sockets, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sockets]:
    """A session whose agents import nothing until it has started; the addresses at which they listen then."""
    folder = tmp_path_factory.mktemp("agents")
    (folder / "sitecustomize.py").write_text(BLOCK_AGENTS.format(agents=AGENTS, release=str(folder / "release")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        with ray_cluster.ray_session(2):
            agents = listening(process for process in family() if is_agent(process))
            (folder / "release").touch()
            yield agents


@pytest.fixture(scope="module")
def session(agents_at_start: Sockets) -> None:
    """A cluster on this machine."""


def test_a_node_starts_before_its_agents(agents_at_start: Sockets) -> None:
    assert len(agents_at_start) == 2 and not any(agents_at_start.values())


def test_workers_have_the_priority_of_the_process_that_started_ray(session: None) -> None:
    assert ray.get(ray.remote(lambda: os.nice(0)).options(num_cpus=0).remote()) == os.nice(0)


def test_ray_starts_without_monitors(session: None) -> None:
    """No autoscaler, log monitor or dashboard: only what an actor needs."""
    commands = " ".join(word for process in family() for word in process.cmdline())
    assert "gcs_server" in commands and "dashboard/agent.py" in commands
    assert [file for file in ("monitor.py", "log_monitor.py", "dashboard/dashboard.py") if file in commands] == []


def test_a_stranger_without_the_token_is_refused(session: None, tmp_path: Path) -> None:
    address = ray.get_runtime_context().gcs_address
    ask = f"from ray._raylet import GcsClient; print(GcsClient(address={address!r}).get_all_node_info())"
    known = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    stranger = subprocess.run(
        [sys.executable, "-c", ask], env={**known, "HOME": str(tmp_path)}, capture_output=True, text=True, timeout=60
    )
    assert stranger.returncode != 0
    assert "InvalidAuthToken" in stranger.stderr


def test_nothing_of_ray_listens_beyond_loopback(before: Sockets, session: None) -> None:
    ray.get(ray.remote(lambda: None).options(num_cpus=0).remote())
    # The node, the agents and the worker begin to listen after the start; this process, the store and the node at once.
    assert wait_for(lambda: sum(bool(sockets) for sockets in listening(family()).values()) >= 6, 60.0)
    after = listening(family())
    names = {process: " ".join(process.cmdline())[:100] for process in after}
    opened = {process: sockets - before.get(process, set()) for process, sockets in after.items()}
    assert sum(bool(sockets) for sockets in opened.values()) >= 5, "this process, the store, the node, agents, a worker"
    hosts = {(names[process], host) for process, sockets in opened.items() for host, _ in sockets}
    assert {(name, host) for name, host in hosts if host not in {"127.0.0.1", "::ffff:127.0.0.1"}} == set()
