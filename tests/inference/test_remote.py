"""Servers of Ray actors: start, detection of their end, end with the actor. Most tests do not wait for readiness."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import ray
from torch.distributed import TCPStore

from megatron_collab.inference.remote import Machines, RemoteProcess, SpreadProcess
from megatron_collab.inference.server import ServerError, ServerProcess, SGLangServer
from megatron_collab.inference.spec import Placement, ServerSpec
from megatron_collab.runtime.network import HOST
from megatron_collab.runtime.ray_cluster import ray_session
from tests.conftest import serving_config
from tests.helpers import make_model, policy_servers
from tests.inference.test_server import PROMPTS, sample

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ServerSpec:
    return policy_servers(serving_config(make_model(tmp_path_factory.mktemp("remote") / "model")))


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with ray_session(2):
        yield Machines(None)


def server_at(url: str) -> list[psutil.Process]:
    """The main process of the server at `url`."""
    port = str(urlsplit(url).port)
    processes = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "--weight-version" in command and command[command.index("--port") + 1] == port:
            processes.append(process)
    return processes


def wait_until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_server_elsewhere_starts_and_ends_as_one_here(spec: ServerSpec, machines: Machines, tmp_path: Path) -> None:
    automatic = replace(spec, host=replace(spec.host, device="auto"))
    process = RemoteProcess(machines, HOST, automatic, tmp_path / "log", 0, "key")
    try:
        assert process._arguments[0].host.device == "cpu", "as here, whatever is there"
        url = process.url
        assert url.startswith(f"http://{HOST}:") and process.ended() is None
        (server,) = server_at(url)
        keeper = server.ppid()
        assert keeper != os.getpid()
        server.send_signal(signal.SIGKILL)
        wait_until(process.ended)
        assert process.ended() == "it ended with code -9"

        process.stop()
        process.start()
        assert process.url == url, "those who ask it know only this address"
        wait_until(lambda: server_at(url))
        (server,) = server_at(url)
        assert server.ppid() != keeper
        os.kill(server.ppid(), signal.SIGKILL)
        wait_until(process.ended)
        assert "died" in str(process.ended())
        wait_until(lambda: not server_at(url))

        process.stop()
        process.start()
        wait_until(lambda: server_at(url))
        assert process.ended() is None
    finally:
        process.stop()
    wait_until(lambda: not server_at(url))


def test_a_busy_port_of_another_machine_is_reported(spec: ServerSpec, machines: Machines, tmp_path: Path) -> None:
    port = int(ray.get_runtime_context().gcs_address.rpartition(":")[2])
    spec = replace(spec, host=replace(spec.host, port=port))
    process = RemoteProcess(machines, HOST, spec, tmp_path / "log", 0, "key")
    with pytest.raises(ServerError, match=rf"rollout\.server\.port={port}: address already in use"):
        _ = process.url
    wait_until(process.ended)
    assert "address already in use" in str(process.ended())
    process.stop()


def test_a_machine_that_is_not_in_the_cluster(spec: ServerSpec, machines: Machines, tmp_path: Path) -> None:
    process = RemoteProcess(machines, "192.0.2.1", spec, tmp_path / "log", 0, "key")
    assert process.ended() == "no node of the Ray cluster has the server's address 192.0.2.1"
    with pytest.raises(ServerError, match="no node of the Ray cluster has the server's address 192"):
        _ = process.url
    process.stop()


@pytest.mark.slow
def test_a_server_over_two_nodes_samples_and_starts_anew_with_both_parts(spec: ServerSpec, tmp_path: Path) -> None:
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    spec = replace(spec, placement=Placement(tp=2, nnodes=2))
    start = partial(SpreadProcess, [ServerProcess, ServerProcess], f"{HOST}:{store.port}")
    with SGLangServer(spec, tmp_path / "sglang-0.log", 0, start) as server:
        server.wait_healthy(400.0)
        turns = sample(server, [(prompt, seed) for seed, prompt in enumerate(PROMPTS[:4])], at_once=True)
        first, second = server.process._parts  # type: ignore[attr-defined]
        assert server.url == first.url
        os.killpg(second.pid, signal.SIGKILL)
        wait_until(server.process.ended)
        log = tmp_path / "sglang-0-node1.log"
        assert server.process.ended() == f"node 1 of its 2 (log: {log}): it ended with code -9"
        server.restart()
        server.wait_healthy(400.0)
        assert sample(server, [(prompt, seed) for seed, prompt in enumerate(PROMPTS[:4])], at_once=True) == turns
