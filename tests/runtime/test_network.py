"""The interface decides addresses, an unknown one is refused; free ports lie below the kernel's ephemeral range."""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch.distributed as dist

from megatron_collab.config import Config
from megatron_collab.runtime import network
from megatron_collab.runtime.network import HOST
from megatron_collab.runtime.process import RunStopped
from tests.helpers import configured, free_port, refused


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
    assert network.address(on("ib0")) == "10.1.0.7"
    assert network.address(on(None)) == HOST
    assert network.variables(on("ib0")) == {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=ib0"}
    assert network.variables(on(None)) == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}


@pytest.mark.parametrize("interface", ["ib7", "eth1"])
def test_an_interface_without_an_address_is_refused(machine: None, interface: str) -> None:
    said = refused(f"launch.interface={interface}")
    assert said.startswith(f"launch.interface={interface}: no interface with an IPv4 address on ")
    assert said.endswith("it has lo (127.0.0.1), ib0 (10.1.0.7)")


def test_several_nodes_need_an_interface() -> None:
    assert refused("launch.nodes=2").startswith("launch.nodes=2: needs launch.interface, ")


def test_rank_0_hears_from_every_node(monkeypatch: pytest.MonkeyPatch) -> None:
    config = on("lo", nodes=2)
    config.rollout.server.start_timeout = 0.5
    store = dist.TCPStore(HOST, 0, is_master=True, timeout=timedelta(seconds=60))

    def as_rank(rank: int) -> list[str]:
        for name, value in {"RANK": rank, "LOCAL_RANK": rank % 2, "GROUP_RANK": rank // 2}.items():
            monkeypatch.setenv(name, str(value))
        return network.meet(config, store)

    with pytest.raises(
        RunStopped, match=r"the ranks of node 1 have not started after rollout\.server\.start_timeout=0\.5 s"
    ):
        as_rank(0)
    assert as_rank(3) == []
    with pytest.raises(RunStopped):
        as_rank(0)
    assert as_rank(2) == []
    assert as_rank(0) == [HOST, HOST]


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(network, "_KERNEL_PORTS", tmp_path / "range")
    return tmp_path / "range"


def test_servers_of_a_machine_draw_from_different_ports(kernel: Path) -> None:
    kernel.write_text("20400\t60999\n")
    drawn = [{network.bindable("port", 0, part=part, parts=3) for _ in range(40)} for part in range(3)]
    assert all(port % 3 == (20_000 + part) % 3 for part in range(3) for port in drawn[part])
    assert all(20_000 <= port < 20_400 for some in drawn for port in some)


def test_a_kernel_that_hands_out_all_of_them_is_named(kernel: Path) -> None:
    kernel.write_text("32768\t60999\n")
    given = free_port()
    kernel.write_text("15000\t60999\n")
    with pytest.raises(ValueError, match=r"^rollout\.server\.port=0: the kernel's ephemeral ports begin at 15000"):
        network.bindable("rollout.server.port", 0)
    assert network.bindable("rollout.server.port", given) == given
