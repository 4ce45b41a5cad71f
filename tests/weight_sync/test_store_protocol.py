"""Stores of two places: keys of one are not in the other, and no rank waits for a released server."""

from __future__ import annotations

import os
from collections.abc import Iterator

import psutil
import pytest
import torch.distributed as dist

from megatron_collab.weight_sync.store_protocol import Address, Peer, PlaceStore, connect, host

BUCKETS = 3


@pytest.fixture
def hosted() -> Iterator[list[tuple[Address, dist.Store]]]:
    yield [host("prefix", 10.0) for _ in range(2)]


def test_a_store_listens_on_loopback_alone(hosted: list[tuple[Address, dist.Store]]) -> None:
    ports = {address[1] for address, _ in hosted}
    open_ports = [c.laddr for c in psutil.Process(os.getpid()).net_connections() if c.status == psutil.CONN_LISTEN]
    assert len(ports) == 2
    assert [at.ip for at in open_ports if at.port in ports] == ["127.0.0.1"] * 2


def test_what_is_written_and_read_in_a_place_is_known_there(hosted: list[tuple[Address, dist.Store]]) -> None:
    here, other = (PlaceStore(connect(address, "prefix", 10.0), 1) for address, _ in hosted)
    here.set_written(0, 5)
    here.set_loaded(0, 2, 1)
    of_the_host = PlaceStore(hosted[0][1], 1)
    of_the_host.wait_written(0, [5])
    assert of_the_host.late(0, [(2, 1)], 0.1) == set()
    assert other.late(0, [(2, 1)], 0.1) == {2} and of_the_host.late(0, [(2, 0), (2, 1), (3, 0)], 0.1) == {2, 3}
    assert not other._store.list_keys()


def test_a_released_server_blocks_no_rank(hosted: list[tuple[Address, dist.Store]]) -> None:
    store = PlaceStore(hosted[0][1], 1)
    store.release(Peer(2, 2, False), BUCKETS)
    for bucket in range(BUCKETS):
        assert store.late(bucket, [(2, 0), (2, 1)], 0.1) == set()
    assert store.late(0, [(3, 0)], 0.1) == {3}


def test_only_the_keys_of_one_publish_are_cleared(hosted: list[tuple[Address, dist.Store]]) -> None:
    before, now = (PlaceStore(hosted[0][1], number) for number in (1, 2))
    for store in (before, now):
        store.set_written(0, 0)
    before.clear()
    assert not before._store.list_keys() and now._store.list_keys() == ["written/0/0"]


def test_a_store_ends_with_its_host(hosted: list[tuple[Address, dist.Store]]) -> None:
    """Servers then fail at once instead of waiting for ranks that are gone."""
    address, _ = hosted.pop()
    store = PlaceStore(connect(address, "prefix", 10.0), 1)
    del _
    with pytest.raises(dist.DistNetworkError):
        store.wait_written(0, [0])
