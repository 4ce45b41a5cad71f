"""Store keys that coordinate a weight sync between trainer ranks and servers.

A bucket needs no HTTP request and no collective: a key in a store wakes the processes that wait for it. Keys of buckets
in shared memory, thousands for a large model, are in the store of their place (see node_routing.py): a single store
would take as long as the weights. All other keys are in the run's store.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

Address = tuple[str, int]


class Peer(NamedTuple):
    """Server number `server` with `tp` ranks; `new`: its process has received no weights yet."""

    server: int
    tp: int
    new: bool


def connect(address: Address, prefix: str, timeout: float) -> dist.Store:
    """A new connection to the store at `address`: a wait on a shared one blocks its other users.

    Every operation fails after `timeout` seconds, or when the store's process ends.
    """
    store = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=timeout))
    return dist.PrefixStore(prefix, store)


def host(prefix: str, timeout: float) -> tuple[Address, dist.Store]:
    """Start a store in this process on a free loopback port: its address, and a connection like those of `connect`.

    The store has no password, like the run's store: any process on the machine can read and write it. It ends when
    the connection does.
    """
    listener = socket.create_server(("127.0.0.1", 0))  # torch's own listens on every interface
    address: Address = listener.getsockname()
    kind = {"is_master": True, "wait_for_workers": False, "timeout": timedelta(seconds=timeout)}
    return address, dist.PrefixStore(prefix, dist.TCPStore(*address, **kind, master_listen_fd=listener.detach()))


class _Keys:
    """Keys of one weight sync; `number` is unique under the store's prefix."""

    def __init__(self, store: dist.Store, number: int) -> None:
        self.number = number
        self._store = dist.PrefixStore(str(number), store)

    def clear(self) -> None:
        """Remove all keys, once no process waits for one."""
        for key in self._store.list_keys():
            self._store.delete_key(key)

    def _all_set(self, keys: list[str], timeout: float) -> bool:
        try:
            self._store.wait(keys, timedelta(seconds=timeout))
        except dist.DistStoreError:
            return False
        return True


class PlaceStore(_Keys):
    """Keys in the store of a place: which buckets in its segments are written and read."""

    def set_written(self, bucket: int, source: int) -> None:
        """Trainer rank `source` has written its part of every server rank's bucket."""
        self._store.set(f"written/{bucket}/{source}", "")

    def wait_written(self, bucket: int, sources: Iterable[int]) -> None:
        self._store.wait([f"written/{bucket}/{source}" for source in sources])

    def set_loaded(self, bucket: int, server: int, rank: int) -> None:
        """A server's rank has read its bucket; the memory may be overwritten."""
        self._store.set(f"loaded/{bucket}/{server}/{rank}", "")

    def late(self, bucket: int, readers: Iterable[tuple[int, int]], timeout: float) -> set[int]:
        """Wait for `readers`, (server, rank); returns the servers that have not read within `timeout` seconds."""
        keys = {f"loaded/{bucket}/{server}/{rank}": server for server, rank in readers}
        if self._all_set(list(keys), timeout):
            return set()
        return {server for key, server in keys.items() if not self._store.check([key])}

    def release(self, peer: Peer, buckets: int) -> None:
        """End all waits for an abandoned server."""
        for bucket in range(buckets):
            for rank in range(peer.tp):
                self.set_loaded(bucket, peer.server, rank)


class SyncStore(_Keys):
    """Keys in the run's store, which all trainer ranks and servers reach."""

    def set_sent(self, bucket: int, sources: int) -> None:
        """One of `sources` trainer ranks is sending its part of every server rank's bucket over the network."""
        if self._store.add(f"sending/{bucket}", 1) == sources:
            self._store.set(f"sent/{bucket}", "")

    def wait_sent(self, bucket: int) -> None:
        """Wait for all sources."""
        self._store.wait([f"sent/{bucket}"])

    def set_ready(self, server: int, rank: int, ready: bool) -> None:
        """Announce whether a server's rank will join the process group with the trainer's ranks."""
        self._store.set(f"ready/{server}/{rank}", str(int(ready)))

    def all_ready(self, server: int, tp: int, timeout: float) -> bool:
        """Whether all ranks of a server announce within `timeout` seconds that they will join."""
        keys = [f"ready/{server}/{rank}" for rank in range(tp)]
        return self._all_set(keys, timeout) and all(self._store.get(key) == b"1" for key in keys)

    def answer(self, server: int, rank: int, result: dict[str, Any]) -> None:
        """Report the result of a server's rank; SGLang's HTTP response cannot carry it."""
        self._store.set(f"answer/{server}/{rank}", json.dumps(result))

    def answered(self, server: int, rank: int) -> dict[str, Any]:
        """The result of a server's rank; an `error` if it has not reported yet."""
        key = f"answer/{server}/{rank}"
        return (
            json.loads(self._store.get(key)) if self._store.check([key]) else {"error": "gave no answer; see its log"}
        )

    def abandon(self, server: int, ranks: Iterable[int]) -> None:
        """End all waits for a server; `ranks` of it count as not joining, whatever they announced.

        Buckets may be overwritten while it reads: its weights stay incomplete.
        """
        self._store.set(f"abandoned/{server}", "")  # first: the keys below wake senders, which then check it
        for rank in ranks:
            self.set_ready(server, rank, False)

    def abandoned(self, server: int) -> bool:
        return self._store.check([f"abandoned/{server}"])
