"""Store keys that coordinate a weight sync between trainer ranks and servers.

A bucket needs no HTTP request and no collective: a key in the run's store wakes the processes that wait for it.
"""

from __future__ import annotations

import json
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
    host, port = address
    limit = timedelta(seconds=timeout)
    store = dist.TCPStore(host, port, is_master=False, timeout=limit)
    return dist.PrefixStore(prefix, store)


class Board:
    """The keys of one weight sync; `number` is unique under the store's prefix."""

    def __init__(self, store: dist.Store, number: int) -> None:
        self.number = number
        self._store = store

    def set_written(self, bucket: int, source: int) -> None:
        """Trainer rank `source` has written its part of every server rank's bucket."""
        self._store.set(self._written(bucket, source), "")

    def wait_written(self, bucket: int, sources: Iterable[int]) -> None:
        self._store.wait([self._written(bucket, source) for source in sources])

    def set_loaded(self, bucket: int, server: int, rank: int) -> None:
        """A server's rank has read its bucket, whose memory may be written again."""
        self._store.set(self._loaded(bucket, server, rank), "")

    def late(self, bucket: int, readers: Iterable[tuple[int, int]], patience: float) -> set[int]:
        """Wait for `readers`, (server, rank); the servers of those that have not read within `patience` seconds."""
        keys = {self._loaded(bucket, *reader): reader[0] for reader in readers}
        if self._all_there(list(keys), patience):
            return set()
        return {server for key, server in keys.items() if not self._store.check([key])}

    def set_sent(self, bucket: int, sources: int) -> None:
        """One of `sources` trainer ranks is sending its part of every server rank's bucket over the network."""
        if self._store.add(self._count(bucket), 1) == sources:
            self._store.set(self._sent(bucket), "")

    def wait_sent(self, bucket: int) -> None:
        """Wait for all sources."""
        self._store.wait([self._sent(bucket)])

    def set_ready(self, server: int, rank: int, ready: bool) -> None:
        """A server's rank will join the process group with the trainer's ranks, or it will not."""
        self._store.set(self._ready(server, rank), str(int(ready)))

    def all_ready(self, server: int, tp: int, patience: float) -> bool:
        """Whether all ranks of a server announce within `patience` seconds that they will join."""
        keys = [self._ready(server, rank) for rank in range(tp)]
        return self._all_there(keys, patience) and all(self._store.get(key) == b"1" for key in keys)

    def answer(self, server: int, rank: int, found: dict[str, Any]) -> None:
        """The result at a server's rank; SGLang's HTTP answer cannot carry it."""
        self._store.set(self._answer(server, rank), json.dumps(found))

    def answered(self, server: int, rank: int) -> dict[str, Any] | None:
        """None if there is no answer yet."""
        key = self._answer(server, rank)
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def give_up(self, server: int, rank: int, buckets: int) -> None:
        """Release all waits for that server's rank."""
        self.set_ready(server, rank, False)
        for bucket in range(buckets):
            self.set_loaded(bucket, server, rank)

    def abandon(self, server: int, tp: int, buckets: int) -> None:
        """Release all waits for that server. What it reads may be overwritten: its weights stay incomplete."""
        self._store.set(self._abandoned(server), "")  # first: the keys that follow wake writers, which then continue
        for rank in range(tp):
            self.give_up(server, rank, buckets)

    def abandoned(self, server: int) -> bool:
        return self._store.check([self._abandoned(server)])

    def clear(self, sources: int, peers: Iterable[Peer], buckets: int) -> None:
        """Remove all keys, once no process waits for one."""
        keys = [self._written(bucket, source) for bucket in range(buckets) for source in range(sources)]
        for bucket in range(buckets):
            keys += [self._count(bucket), self._sent(bucket)]
        for peer in peers:
            keys.append(self._abandoned(peer.server))
            for rank in range(peer.tp):
                keys += [self._ready(peer.server, rank), self._answer(peer.server, rank)]
                keys += [self._loaded(bucket, peer.server, rank) for bucket in range(buckets)]
        for key in keys:
            self._store.delete_key(key)

    def _all_there(self, keys: list[str], patience: float) -> bool:
        try:
            self._store.wait(keys, timedelta(seconds=patience))
        except dist.DistStoreError:
            return False
        return True

    def _written(self, bucket: int, source: int) -> str:
        return f"{self.number}/written/{bucket}/{source}"

    def _loaded(self, bucket: int, server: int, rank: int) -> str:
        return f"{self.number}/loaded/{bucket}/{server}/{rank}"

    def _count(self, bucket: int) -> str:
        return f"{self.number}/count/{bucket}"

    def _sent(self, bucket: int) -> str:
        return f"{self.number}/sent/{bucket}"

    def _abandoned(self, server: int) -> str:
        return f"{self.number}/abandoned/{server}"

    def _ready(self, server: int, rank: int) -> str:
        return f"{self.number}/ready/{server}/{rank}"

    def _answer(self, server: int, rank: int) -> str:
        return f"{self.number}/answer/{server}/{rank}"
