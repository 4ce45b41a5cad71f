"""The interface decides addresses, an unknown one is refused; free ports lie below the kernel's ephemeral range.

No client sends a request to an address of the run through a proxy.
"""

from __future__ import annotations

import asyncio
import socket
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import httpx
import httpx2
import litellm
import psutil
import pytest
import requests
import torch.distributed as dist
from openai import OpenAIError

from megatron_collab.config import Config
from megatron_collab.runtime import network
from megatron_collab.runtime.network import HOST
from megatron_collab.runtime.process import RunStopped
from tests.helpers import configured, free_port, in_turn, refused
from tests.proxy import VARIABLES, RecordingProxy, recording_proxy

OTHER_NODE = "127.0.0.2"  # stands for an unknown address, on which nothing listens


@pytest.fixture(autouse=True)
def without_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(family: int, address: str) -> SimpleNamespace:
        return SimpleNamespace(family=family, address=address)

    interfaces = {
        "lo": [entry(socket.AF_INET, "127.0.0.1"), entry(socket.AF_INET6, "::1")],
        "ib0": [entry(socket.AF_INET, "10.1.0.7"), entry(socket.AF_INET, "10.2.0.7")],
        "eth1": [entry(socket.AF_PACKET, "02:fc:00:00:00:01")],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)


def on(interface: str | None, **launch: object) -> Config:
    return configured(Config(), {"launch.interface": interface} | {f"launch.{k}": v for k, v in launch.items()})


def test_the_address_is_that_of_the_interface(machine: None) -> None:
    assert network.address("ib0") == "10.1.0.7"
    assert network.address(None) == HOST
    variables = network.variables("ib0")
    assert variables["no_proxy"] == variables["NO_PROXY"] == "localhost,127.0.0.1,::1,10.1.0.7"
    assert variables.items() >= {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=ib0"}.items()
    assert network.variables(None).items() >= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}.items()


@pytest.mark.parametrize("interface", ["ib7", "eth1"])
def test_an_interface_without_an_address_is_refused(machine: None, interface: str) -> None:
    message = refused(f"launch.interface={interface}")
    assert message.startswith(f"launch.interface={interface}: no interface with an IPv4 address on ")
    assert message.endswith("it has lo (127.0.0.1), ib0 (10.1.0.7)")


def test_several_nodes_need_an_interface() -> None:
    assert refused("launch.nodes=2").startswith("launch.nodes=2: needs launch.interface, ")


@pytest.mark.processes
def test_rank_0_hears_from_every_node(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore(HOST, 0, is_master=True, timeout=timedelta(seconds=60))

    def as_rank(rank: int, seconds: float = 0.5) -> list[str]:
        for name, value in {"RANK": rank, "LOCAL_RANK": rank % 2, "GROUP_RANK": rank // 2}.items():
            monkeypatch.setenv(name, str(value))
        return network.meet(2, "lo", seconds, store)

    with pytest.raises(
        RunStopped, match=r"the ranks of node 1 have not started after rollout\.server\.start_timeout=0\.5 s"
    ):
        as_rank(0)
    assert as_rank(3) == []
    with pytest.raises(RunStopped):
        as_rank(0)
    assert as_rank(2) == []
    assert as_rank(0, 60.0) == [HOST, HOST]


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(network, "_KERNEL_PORTS", tmp_path / "range")
    return tmp_path / "range"


def test_servers_of_a_machine_draw_from_different_ports(kernel: Path) -> None:
    kernel.write_text("20400\t60999\n")
    drawn = [{network.bindable("port", 0, part=part, parts=3) for _ in range(40)} for part in range(3)]
    assert all(port % 3 == (20_000 + part) % 3 for part in range(3) for port in drawn[part])
    assert all(20_000 <= port < 20_400 for ports in drawn for port in ports)


def test_a_kernel_range_over_all_ports_is_reported(kernel: Path) -> None:
    kernel.write_text("32768\t60999\n")
    port = free_port()
    kernel.write_text("15000\t60999\n")
    with pytest.raises(ValueError, match=r"^rollout\.server\.port=0: the kernel's ephemeral ports begin at 15000"):
        network.bindable("rollout.server.port", 0)
    assert network.bindable("rollout.server.port", port) == port


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_cannot_exist_is_refused(port: int) -> None:
    with pytest.raises(ValueError, match=f"^rollout.server.port={port}: must be from 0 to 65535; "):
        network.bindable("rollout.server.port", port)


@pytest.mark.parametrize(
    "lower, upper, both",
    [
        (None, None, ["", ""]),
        ("a.org, 10.0.0.0/8", None, ["a.org,10.0.0.0/8,", "a.org,10.0.0.0/8,"]),
        (None, ".b.org,", [".b.org,", ".b.org,"]),
        ("a.org", "b.org", ["a.org,", "b.org,"]),
        ("", "b.org", ["", "b.org,"]),  # clients that read the lower-case name know no b.org
    ],
)
def test_the_hosts_that_the_user_excludes_from_the_proxy_stay(
    lower: str | None, upper: str | None, both: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("no_proxy", lower), ("NO_PROXY", upper)):
        if value is not None:
            monkeypatch.setenv(name, value)
    urls = [f"http://{OTHER_NODE}:20000", f"http://{OTHER_NODE}:20001", "http://127.0.0.1:20000", "http://[fd00::7]:80"]
    hosts = f"localhost,127.0.0.1,::1,{OTHER_NODE},fd00::7"
    assert [*network.without_proxy(urls).values()] == [entries + hosts for entries in both]
    for name, value in network.without_proxy().items():
        monkeypatch.setenv(name, value)
    assert [*network.without_proxy(urls).values()] == [entries + hosts for entries in both], "each once"


@pytest.mark.parametrize("name", ["no_proxy", "NO_PROXY"])
def test_a_user_who_wants_no_proxy_at_all_gets_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "*")
    assert network.without_proxy() == {"no_proxy": "*", "NO_PROXY": "*"}, "urllib knows no * beside others"


@pytest.fixture
def proxy() -> Iterator[RecordingProxy]:
    with recording_proxy() as proxy:
        yield proxy


def _litellm(url: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    asyncio.run(litellm.acompletion("hosted_vllm/m", messages, api_base=url, max_retries=0, timeout=5))


# Unverified: loading certificates takes long, and nothing answers.
CLIENTS: dict[str, Callable[[str], object]] = {
    "httpx": lambda url: httpx.get(url, verify=False),
    "httpx2": lambda url: httpx2.get(url, verify=False),
    "requests": lambda url: requests.get(url, timeout=5),
    "urllib": lambda url: urllib.request.build_opener().open(url, timeout=5),
    "litellm": _litellm,
}


@pytest.mark.processes
@pytest.mark.parametrize(("client", "case"), in_turn(CLIENTS, [str.lower, str.upper]))
def test_no_client_asks_an_address_of_the_run_through_a_proxy(
    client: str, case: Callable[[str], str], proxy: RecordingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(host: str) -> None:
        for scheme in ("http", "https"):
            with suppress(OSError, httpx.HTTPError, httpx2.HTTPError, OpenAIError):
                CLIENTS[client](f"{scheme}://{host}:{port}/v1")

    port = free_port()  # nothing listens there: a direct request is refused
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(case(name), proxy.url)
    monkeypatch.setenv(case("no_proxy"), "127.0.0.0/8,example.org")  # which clients do not take for a network
    for name, value in network.without_proxy([f"http://{OTHER_NODE}:20000"]).items():
        monkeypatch.setenv(name, value)
    for host in ("127.0.0.1", "localhost", OTHER_NODE):
        ask(host)
    if client != "urllib":  # which knows only an entry in brackets, and that is an error to httpx
        ask("[::1]")
    assert proxy.requests == []
    ask("10.255.255.1")
    assert len(proxy.requests) == 2, "what is elsewhere is asked through it, as the user wants"
