"""New weights into the servers, as a version that is committed only when all of it has arrived."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from operator import attrgetter
from types import TracebackType

import torch
import torch.distributed as dist

from megatron_collab.actor.model import DTYPES
from megatron_collab.actor.weights import named_shards, place, values
from megatron_collab.config import Config
from megatron_collab.publish import plan, transport
from megatron_collab.publish.hf_map import ModelShape
from megatron_collab.publish.transport import Link, PublishError
from megatron_collab.rollout.sglang import SGLangServer

BUCKET_BYTES = 512 << 20


class Publisher:
    """Moves the trained weights into the servers. Every rank has one; rank 0's knows the servers."""

    def __init__(
        self,
        config: Config,
        chunks: Sequence[torch.nn.Module],
        shape: ModelShape,
        servers: Sequence[SGLangServer],
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Collective. `chunks` are this rank's parts of the policy.

        `servers` must be healthy at the first publish; ranks other than 0 pass none.
        """
        self.version: int | None = None
        self._dtype = DTYPES[config.model.dtype]
        self._shards = dict(named_shards(chunks))
        self._buckets = plan.buckets(shape, self._dtype.itemsize, bucket_bytes)
        self._writes = plan.writes(self._buckets, shape, self._shards.keys(), place())
        # Two segments: one is written while the servers read the other.
        count = min(2, len(self._buckets))
        self._segments = transport.shared_segments(count, max(bucket.size for bucket in self._buckets))
        self._links = [Link(server.url, server.api_key, server.tp, config.launch.timeout) for server in servers]
        self._senders = ThreadPoolExecutor(max(1, len(self._links)))

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._segments.clear()
        self._senders.shutdown(wait=False)  # a call that hangs ends with the server

    @torch.no_grad()
    def publish(self, version: int) -> None:
        """Give the servers the present weights as `version`; collective, returns when they sample from them.

        PublishError on every rank if that fails anywhere; the version is then not committed and the servers,
        which may hold a mixture, sample no more.
        """
        calls = self._start(Link.begin)
        for number, bucket in enumerate(self._buckets):
            segment = self._segments[number % 2]
            self._fill(segment, number)
            self._settle(calls)  # from here on every rank has written this segment, and the other one is free
            calls = self._start(Link.send, segment, bucket, self._dtype, bucket is self._buckets[-1])
        self._settle(calls)
        self._settle(self._start(Link.commit, version))
        self.version = version

    def _fill(self, segment: torch.Tensor, number: int) -> None:
        targets = transport.views(segment, self._buckets[number], self._dtype)
        for source, writes in groupby(self._writes[number], attrgetter("source")):
            shard = values(self._shards[source])
            for write in writes:
                targets[write.target][write.target_index].copy_(shard[write.source_index])

    def _start(self, call: Callable[..., None], *arguments: object) -> list[Future[None]]:
        """Begin a call to every server in the background; none where another rank makes it."""
        return [self._senders.submit(call, link, *arguments) for link in self._links]

    def _settle(self, calls: Sequence[Future[None]]) -> None:
        """Wait for the calls and for all ranks; PublishError on each of them if one failed."""
        failure = next((error for call in calls if (error := call.exception())), None)
        found: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(found, str(failure) if failure else None)
        for message in found:
            if message is not None:
                raise PublishError(message) from failure
