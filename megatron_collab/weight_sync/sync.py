"""Publishes new weights to the servers; a version goes live at a server only when it is complete there.

    ranks:    [write bucket 0] [write bucket 1] [write 2, once 0 is read] ...
    servers:  pause, begin     [read bucket 0]  [read bucket 1]           ...  end, go on: the version is live

The run's transport takes weights straight from the shards of the trainer's ranks into the parameters of the servers, or
saves a folder for them. A server that fails anywhere is skipped and stays paused; the others continue. The pool decides
its fate.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from megatron_collab.checkpoint.hf import save_hf
from megatron_collab.inference.pool import ServerPool
from megatron_collab.inference.spec import ServerSpec
from megatron_collab.models.hf_to_megatron import ModelShape
from megatron_collab.runtime import hub
from megatron_collab.runtime.process import RunStopped, beat
from megatron_collab.runtime.rank0 import from_leader, shared, wait_until
from megatron_collab.weight_sync.http_protocol import ServerCall, ServerCalls
from megatron_collab.weight_sync.in_place import InPlace
from megatron_collab.weight_sync.plan import BUCKET_BYTES, SyncSpec
from megatron_collab.weight_sync.store_protocol import Peer
from megatron_collab.weight_sync.transports.base import FolderTransport
from megatron_collab.weight_sync.transports.registry import transport_class, transport_options

TRIES = 3  # attempts to publish a version before the run ends: all servers may fail at once


class PublishError(RunStopped):
    """No server has the version; the message says why."""


class WeightSync:
    """Moves the trained weights into the servers. Every rank has an instance; only rank 0's knows the server pool."""

    def __init__(
        self,
        sync: SyncSpec,
        spec: ServerSpec,
        chunks: Sequence[torch.nn.Module],
        shape: ModelShape,
        pool: ServerPool | None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Collective. `spec`: of the policy's servers; `chunks`: this rank's parts of the policy; `pool`: on rank 0."""
        self.version: int | None = None
        self._pool, self._timeout, self._idle_timeout = pool, sync.call_timeout, sync.idle_timeout
        self._callers = ThreadPoolExecutor(spec.placement.replicas)
        self._number = 0
        self._known: dict[int, int] = {}  # server index -> its generation when it last received weights
        kind = transport_class(sync.publish, spec.placement)
        self._way: ByFolder | InPlace  # of the weights to the servers
        if issubclass(kind, FolderTransport):
            self._way = ByFolder(sync, spec, chunks, kind)
        else:
            self._way = InPlace(sync, spec, chunks, shape, bucket_bytes)

    def __enter__(self) -> WeightSync:
        return self

    def __exit__(self, *_: object) -> None:
        self._way.close()
        self._callers.shutdown(wait=False)  # a hung call ends with its server

    def sync(self, version: int) -> None:
        """Publish the current weights as `version` and route the workers to the servers that have it; collective.

        Waits until a server is available, and retries if all of them fail. Raises PublishError on every rank if no
        server has the version after that, ServerError if a server cannot be kept alive.
        """
        beat(f"the weight sync of version {version}")
        for tried in range(1, TRIES + 1):
            wait_until(lambda: self._rank_0_pool.ready(self._idle_timeout))
            try:
                self.publish(version)
                break
            except PublishError:
                if tried == TRIES:
                    raise
        from_leader(lambda: self._rank_0_pool.serve())

    @property
    def _rank_0_pool(self) -> ServerPool:
        assert self._pool is not None
        return self._pool

    @torch.no_grad()
    def publish(self, version: int) -> None:
        """Publish the current weights as `version`; collective, returns when the servers sample from them.

        A server that fails stops sampling and is reported to the pool. Raises PublishError on every rank if no server
        has the version.
        """
        self._number += 1
        present = self._pool.present() if self._pool else []
        calls = ServerCalls([ServerCall(server, self._timeout) for server in present], self._callers)
        peers = shared(lambda: [Peer(s.index, s.tp, self._known.get(s.index) != s.generation) for s in present])
        if not peers:
            raise PublishError("no server is available to receive weights")
        self._way.publish(self._number, version, calls, peers)
        failures = shared(lambda: {call.server.index: reason for call, reason in calls.failures.items()})
        for index in failures:
            self._way.transport.drop(index)
        for server in present:
            self._known[server.index] = server.generation
            if server.index in failures:
                del self._known[server.index]
                self._rank_0_pool.lost(server, failures[server.index])
        if len(failures) == len(peers):
            raise PublishError("; ".join(failures.values()))
        self.version = version


class ByFolder:
    """Saves a folder that the servers load themselves."""

    def __init__(
        self, sync: SyncSpec, spec: ServerSpec, chunks: Sequence[torch.nn.Module], kind: type[FolderTransport]
    ) -> None:
        """Arguments as in WeightSync; `kind`: the run's transport."""

        def save(folder: Path) -> None:
            save_hf(chunks, folder, hub.folder(spec.model))

        self.transport = kind(transport_options(sync.publish, spec.placement), spec.host.folder / "publish", save)
        self._pause = sync.pause

    def publish(self, number: int, version: int, calls: ServerCalls, peers: Sequence[Peer]) -> None:
        """Publish `number` of the run; as InPlace."""
        folder = self.transport.save()
        calls.run(lambda call: call.read_folder(folder, version, self._pause))
        self.transport.clear(number)

    def close(self) -> None:
        self.transport.close()
