"""What ranks and servers tell each other while weights travel: keys in the store of the run.

A bucket needs no HTTP request and no collective: whoever waits for it is woken by a key.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

Address = tuple[str, int]


class Peer(NamedTuple):
    """Server number `server` as all ranks know it, with `tp` ranks; `new`: its process has not been published to."""

    server: int
    tp: int
    new: bool


def connect(address: Address, prefix: str, timeout: float) -> dist.Store:
    """A line of its own to the store at `address`: one that waits holds up all others who share it.

    Whatever is asked of it fails after `timeout` seconds, or when the store's process ends.
    """
    host, port = address
    limit = timedelta(seconds=timeout)
    store = dist.TCPStore(host, port, is_master=False, timeout=limit)
    return dist.PrefixStore(prefix, store)


class Board:
    """The keys of one publish, whose `number` no other has under the same prefix."""

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
        """Wait for `readers`: (server, rank). The servers of those that are still awaited after `patience` seconds."""
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
        """A server's rank will meet the trainer's ranks over the network, or it will not come."""
        self._store.set(self._ready(server, rank), str(int(ready)))

    def all_ready(self, server: int, tp: int, patience: float) -> bool:
        """Whether all ranks of a server will come, as they say within `patience` seconds."""
        keys = [self._ready(server, rank) for rank in range(tp)]
        return self._all_there(keys, patience) and all(self._store.get(key) == b"1" for key in keys)

    def answer(self, server: int, rank: int, found: dict[str, Any]) -> None:
        """What became of it at a server's rank; SGLang's own answer has no room for that."""
        self._store.set(self._answer(server, rank), json.dumps(found))

    def answered(self, server: int, rank: int) -> dict[str, Any] | None:
        """None if there is no answer yet."""
        key = self._answer(server, rank)
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def give_up(self, server: int, rank: int, buckets: int) -> None:
        """Nobody waits for that server's rank any more."""
        self.set_ready(server, rank, False)
        for bucket in range(buckets):
            self.set_loaded(bucket, server, rank)

    def abandon(self, server: int, tp: int, buckets: int) -> None:
        """Nobody waits for that server any more. What it reads from now on may be overwritten: it has not got all."""
        self._store.set(self._abandoned(server), "")  # first: whoever is woken by the rest writes on
        for rank in range(tp):
            self.give_up(server, rank, buckets)

    def abandoned(self, server: int) -> bool:
        return self._store.check([self._abandoned(server)])

    def clear(self, sources: int, peers: Iterable[Peer], buckets: int) -> None:
        """Remove all keys; nobody waits for one any more."""
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
