"""New weights into the servers, as a version that is live at each of them only when it has all of it.

    ranks:    [write bucket 0] [write bucket 1] [write 2, once 0 is read] ...
    servers:  pause, begin     [read bucket 0]  [read bucket 1]           ...  end, go on: the version is live

A server that fails anywhere is left out and stays paused; the others go on. What becomes of it is the pool's matter.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_collab.checkpoint.hf import save_hf
from megatron_collab.config import Config
from megatron_collab.inference.pool import ServerPool
from megatron_collab.models.hf_to_megatron import ModelShape
from megatron_collab.runtime import heartbeat
from megatron_collab.runtime.rank0 import from_leader, shared, wait_until
from megatron_collab.weight_sync.http_protocol import PublishError, ServerCall, ServerCalls
from megatron_collab.weight_sync.in_place import InPlace
from megatron_collab.weight_sync.plan import BUCKET_BYTES
from megatron_collab.weight_sync.store_protocol import Peer

TRIES = 3  # to give the servers a version before the run ends: all of them may fail at once


class WeightSync:
    """Moves the trained weights into the servers. Every rank has one; rank 0's knows the pool of servers."""

    def __init__(
        self,
        config: Config,
        chunks: Sequence[torch.nn.Module],
        shape: ModelShape,
        pool: ServerPool | None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Collective. `chunks` are this rank's parts of the policy; ranks other than 0 pass no pool."""
        self.version: int | None = None
        self._config, self._chunks, self._shape, self._pool = config, chunks, shape, pool
        self._mode = "retract" if config.rollout.max_staleness else "abort"
        # A server that hangs must be left out before the collectives of the ranks give up.
        self._timeout = config.launch.timeout / 2
        self._look = config.launch.timeout / 4  # seconds: the other ranks wait in a collective meanwhile
        self._callers = ThreadPoolExecutor(config.rollout.server.replicas)
        self._number = 0
        self._known: dict[int, int] = {}  # by index, the generation of a server that has been given weights
        self._in_place: InPlace | None = None
        if config.publish.transport != "disk":
            self._in_place = InPlace(config, chunks, shape, bucket_bytes, self._timeout)

    def __enter__(self) -> WeightSync:
        return self

    def __exit__(self, *_: object) -> None:
        if self._in_place is not None:
            self._in_place.carrier.close()
        self._callers.shutdown(wait=False)  # a call that hangs ends with the server

    def sync(self, version: int) -> None:
        """Give the servers the present weights as `version`, and have the workers ask those that have it; collective.

        Waits until a server is there, and tries again where all of them fail on the way. PublishError on every rank
        where no server has the version after that, ServerError where one cannot be kept alive.
        """
        heartbeat.at(f"the weight sync of version {version}")
        for tried in range(1, TRIES + 1):
            wait_until(lambda: self._of_rank_0.ready(self._look))
            try:
                self.publish(version)
                break
            except PublishError:
                if tried == TRIES:
                    raise
        from_leader(lambda: self._of_rank_0.serve())

    @property
    def _of_rank_0(self) -> ServerPool:
        assert self._pool is not None
        return self._pool

    @torch.no_grad()
    def publish(self, version: int) -> None:
        """Give the servers the present weights as `version`; collective, returns when they sample from them.

        A server that cannot be given them samples no more, and the pool is told. PublishError on every rank if no
        server has the version.
        """
        self._number += 1
        present = self._pool.present() if self._pool else []
        links = ServerCalls([ServerCall(server, self._timeout) for server in present], self._callers)
        peers = shared(
            lambda: [
                Peer(server.index, server.tp, self._known.get(server.index) != server.generation) for server in present
            ]
        )
        if not peers:
            raise PublishError("no server is there to be given weights")
        if self._in_place is not None:
            every = self._config.publish.verify
            verify = every > 0 and self._number % every == 0
            self._in_place.deliver(self._number, version, links, peers, self._mode, verify)
        else:
            self._by_disk(version, links)
        failures = shared(lambda: {link.server.index: reason for link, reason in links.failures.items()})
        if self._in_place is not None:
            for index in failures:
                self._in_place.carrier.drop(index)
        self._known |= {server.index: server.generation for server in present}
        for server in present:
            if server.index in failures:
                del self._known[server.index]
                self._of_rank_0.lost(server, failures[server.index])
        if len(failures) == len(peers):
            raise PublishError("; ".join(failures.values()))
        self.version = version

    def _by_disk(self, version: int, links: ServerCalls) -> None:
        folder = Path(self._config.run.dir) / "publish"  # one that a killed run left behind is replaced
        save_hf(self._chunks, folder, Path(self._config.model.path), self._shape)

        def bring(link: ServerCall) -> None:
            link.pause(self._mode)
            link.read_folder(str(folder.resolve()), version)
            link.go_on()

        links.each(bring)
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
