"""Publishes new weights to the servers; a version goes live at a server only when it is complete there.

    ranks:    [write bucket 0] [write bucket 1] [write 2, once 0 is read] ...
    servers:  pause, begin     [read bucket 0]  [read bucket 1]           ...  end, go on: the version is live

The run's transport takes weights straight from the shards of the trainer's ranks into the parameters of the servers, or
saves a folder for them. A server that fails anywhere is skipped and stays paused; the others continue. The pool decides
its fate.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_collab.checkpoint.hf import named_factors, named_shards, save_hf
from megatron_collab.config import Config
from megatron_collab.inference.pool import ServerPool
from megatron_collab.inference.server import ServerError
from megatron_collab.inference.spec import ServerSpec
from megatron_collab.models import hf_to_sglang
from megatron_collab.models.hf_to_megatron import ModelShape
from megatron_collab.models.hf_to_sglang import ServerLayout
from megatron_collab.runtime import device, hang_detector, hub
from megatron_collab.runtime.process import RunStopped, beat
from megatron_collab.runtime.rank0 import from_leader, shared, wait_until
from megatron_collab.trainer.megatron.config import DTYPES
from megatron_collab.weight_sync.encoding import Sums, read
from megatron_collab.weight_sync.fp8_blocks import fp8_scales
from megatron_collab.weight_sync.http_protocol import ServerCall, ServerCalls
from megatron_collab.weight_sync.node_routing import Item, written
from megatron_collab.weight_sync.plan import (
    BUCKET_BYTES,
    Slice,
    first_round,
    plan_sync,
    trainer_layout,
)
from megatron_collab.weight_sync.receiver import Row
from megatron_collab.weight_sync.sender import Sender
from megatron_collab.weight_sync.store_protocol import Peer, SyncStore, connect
from megatron_collab.weight_sync.transports.base import FolderTransport, Transport, TransportSetup
from megatron_collab.weight_sync.transports.registry import (
    places_of,
    transport_class,
    transport_options,
    transport_spec,
)

TRIES = 3  # attempts to publish a version before the run ends: all servers may fail at once


class PublishError(RunStopped):
    """No server has the version; the message says why."""


class WeightSync:
    """Moves the trained weights into the servers. Every rank has an instance; only rank 0's knows the server pool."""

    def __init__(
        self,
        config: Config,
        spec: ServerSpec,
        chunks: Sequence[torch.nn.Module],
        shape: ModelShape,
        pool: ServerPool | None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Collective. `spec`: of the policy's servers; `chunks`: this rank's parts of the policy; `pool`: on rank 0."""
        self.version: int | None = None
        self._config, self._spec, self._server = config, spec, spec.layout
        self._chunks, self._shape, self._pool = chunks, shape, pool
        self._mode = "retract" if config.rollout.max_staleness else "abort"
        # A server without all weights by then has failed, before the ranks' collectives time out. Up to half of that
        # may be idle time, or a wait for servers, while the other ranks wait in a collective.
        self._timeout, self._idle_timeout = config.launch.timeout / 2, config.launch.timeout / 4
        self._callers = ThreadPoolExecutor(spec.placement.replicas)
        self._clearer = ThreadPoolExecutor(1)
        self._clearing: Future[None] | None = None
        self._number = 0
        self._known: dict[int, int] = {}  # server index -> its generation when it last received weights
        self._transport = self._make_transport(bucket_bytes)

    def _make_transport(self, bucket_bytes: int) -> Transport:
        """The run's transport; collective."""
        publish, placement = self._config.publish, self._spec.placement
        kind, options = transport_class(publish, placement), transport_options(publish, placement)
        if issubclass(kind, FolderTransport):
            return kind(options, Path(self._config.run.dir) / "publish", self._save_hf)
        return kind(self._setup(options, bucket_bytes))

    def _save_hf(self, folder: Path) -> None:
        save_hf(self._chunks, folder, hub.folder(self._config.model.path))

    def _setup(self, options: Any, bucket_bytes: int) -> TransportSetup:
        """Plan and connections of a transport that fills the servers' parameters; collective."""
        config, dtype, rank = self._config, DTYPES[self._config.model.dtype], dist.get_rank()
        on_gpus = device.select(config.launch.device).type == device.GPU
        self._places = places_of(config, self._spec.placement, on_gpus)
        self._plan = plan_sync(self._shape, trainer_layout(config), self._server, dtype.itemsize, bucket_bytes)
        self._prefix = f"publish/{shared(lambda: secrets.token_hex(8))}"
        self._address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # Two connections: one waits for buckets while rank 0's calls use the other.
        limit = hang_detector.collective_timeout(config.launch.timeout).total_seconds()
        self._store, self._calls_store = (connect(self._address, self._prefix, limit) for _ in range(2))
        shards = dict(named_shards(self._chunks))
        place, home = self._places.of_rank(rank), next(iter(shards.values())).device
        merge = self._server.lora is None
        if not merge:
            shards |= named_factors(self._chunks)

        def make_sender(rounds: Sequence[Sequence[Item]], receivers: Callable[[int, Slice], Iterable[int]]) -> Sender:
            return Sender(rounds, receivers, shards, dtype, merge)

        return TransportSetup(
            options=options,
            plan=self._plan,
            places=self._places,
            writer=make_sender(written(self._plan, self._places, rank), lambda target, piece: [place]),
            make_sender=make_sender,
            device=home,
            server_devices=_devices(self._spec, self._places.first_server(place)),
            address=self._address,
            prefix=self._prefix,
            limit=limit,
            idle_timeout=self._idle_timeout,
            timeout=config.launch.timeout,
        )

    def __enter__(self) -> WeightSync:
        return self

    def __exit__(self, *_: object) -> None:
        self._transport.close()
        self._callers.shutdown(wait=False)  # a hung call ends with its server
        self._clearer.shutdown(wait=False)

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
        if isinstance(self._transport, FolderTransport):
            self._by_folder(version, calls, self._transport)
        else:
            self._in_place(version, calls, peers)
        failures = shared(lambda: {call.server.index: reason for call, reason in calls.failures.items()})
        for index in failures:
            self._transport.drop(index)
        for server in present:
            self._known[server.index] = server.generation
            if server.index in failures:
                del self._known[server.index]
                self._rank_0_pool.lost(server, failures[server.index])
        if len(failures) == len(peers):
            raise PublishError("; ".join(failures.values()))
        self.version = version

    def _by_folder(self, version: int, calls: ServerCalls, transport: FolderTransport) -> None:
        folder = transport.save()
        calls.run(lambda call: call.read_folder(folder, version, self._mode))
        transport.clear(self._number)

    def _in_place(self, version: int, calls: ServerCalls, peers: Sequence[Peer]) -> None:
        """Transfer into the servers' parameters; `calls` are made by rank 0 and record the failures."""
        store, calls_store = (SyncStore(connection, self._number) for connection in (self._store, self._calls_store))
        new_peers = [peer for peer in peers if peer.new]
        first = first_round(self._plan, self._server, bool(new_peers))
        interval = self._config.publish.verify
        with_base = self._server.lora is not None and first == 0  # the base model may be sent only once in a run
        verify = interval > 0 and (self._number % interval == 0 or with_base)
        addresses = self._transport.addresses(store, new_peers)
        sums: Sums | None = {} if verify else None
        checksums: dict[ServerCall, list[int]] = {}  # by server, the checksums that its ranks report

        def transfer(call: ServerCall) -> None:
            index, tp = call.server.index, call.server.tp
            take = {"publish": self._number, "first": first, "verify": verify}
            orders: list[dict[str, Any]] = [{"take": take} for _ in range(tp)]
            for rank, address in enumerate(addresses.get(index, ())):
                orders[rank]["attach"] = self._attach(index, rank) | {"arguments": address}
            try:
                call.pause(self._mode)
                call.begin()
                call.receive([json.dumps(order) for order in orders], version)
                answers = [calls_store.answered(index, rank) for rank in range(tp)]
                errors = [f"rank {rank}: {answer['error']}" for rank, answer in enumerate(answers) if "error" in answer]
                if errors:
                    raise ServerError(f"{call.server.url}: {'; '.join(errors)}")
                checksums[call] = [answer["checksum"] for answer in answers]
            except ServerError:
                calls_store.abandon(index, range(tp))
                raise

        def commit(call: ServerCall) -> None:
            call.end()
            call.resume()

        calls.start(transfer)
        self._transport.carry(store, peers, sums, first)
        calls.settle()
        dist.barrier()  # every rank has recorded the servers it abandoned, and no longer waits on the store
        for call in calls.without_failure():
            if calls_store.abandoned(call.server.index):
                calls.failures[call] = f"{call.server.url}: did not take the weights for {self._idle_timeout:g} s"
        if sums is not None:
            self._compare(calls, checksums, sums)
        calls.run(commit)
        if self._clearing is not None:
            self._clearing.result()  # long done
        # Keys of the previous publish: a server that was skipped in this one may still read its keys.
        self._clearing = self._clearer.submit(self._clear, self._number - 1)

    def _clear(self, number: int) -> None:
        """Remove the keys of a publish (thousands for a large model) while the servers sample."""
        if dist.get_rank() == 0:
            SyncStore(self._calls_store, number).clear()
        self._transport.clear(number)

    def _attach(self, server: int, rank: int) -> dict[str, Any]:
        """Arguments of a server rank's Receiver, except those of its transport."""
        place = self._places.of_server(server, rank)
        dtype = self._config.model.dtype

        def row(piece: Slice) -> Row:
            return row_of(piece, self._places.writer(place, rank, piece))

        parameters, constants = parameters_of(self._shape, self._server, rank, dtype)
        return {
            "store": self._address,
            "prefix": self._prefix,
            "timeout": self._timeout,
            "server": server,
            "rank": rank,
            "dtype": dtype,
            "parameters": parameters,
            "constants": constants,
            "rounds": [[row(piece) for piece in buckets[rank].slices] for buckets in self._plan],
            "transport": transport_spec(self._config.publish, self._spec.placement),
        }

    def _compare(self, calls: ServerCalls, checksums: dict[ServerCall, list[int]], sums: Sums) -> None:
        """Compare the checksums of every server with those sent to its place; collective."""
        sent_sums: list[dict[tuple[int, int], int]] = [{}] * dist.get_world_size()
        dist.all_gather_object(sent_sums, {receiver: read([total]) for receiver, total in sums.items()})
        for call in calls.without_failure():
            for rank, actual in enumerate(checksums[call]):
                place = self._places.of_server(call.server.index, rank)
                expected = read(rank_sums.get((place, rank), 0) for rank_sums in sent_sums)
                if actual != expected:
                    calls.failures[call] = (
                        f"{call.server.url}: rank {rank}: its weights differ from those sent: "
                        f"checksum {actual:x}, not {expected:x}"
                    )


def row_of(piece: Slice, source: int) -> Row:
    """The wire form (`Row`) of a slice for a server's rank; `source`: the trainer rank that announces it."""
    bounds = [(cut.start, cut.stop) for cut in piece.target_index]
    return Row(source, piece.target, bounds, piece.offset, piece.size, piece.quantized)


def parameters_of(
    shape: ModelShape, server: ServerLayout, rank: int, dtype: str
) -> tuple[dict[str, str], dict[str, float]]:
    """(dtype and shape of every parameter of a server's rank, constants of those that are filled instead of sent)."""
    table = (*hf_to_sglang.table(shape, server, rank), *hf_to_sglang.adapters(shape, server, rank))
    constants = {entry.name: entry.constant for entry in table if entry.constant is not None}
    parameters: dict[str, str] = {}
    for entry in table:
        kind = "float8_e4m3fn" if entry.quantized else "float32" if entry.name in constants else dtype
        parameters[entry.name] = f"{kind} {entry.shape}"
        if entry.quantized:
            parameters[f"{entry.name}_scale_inv"] = f"float32 {fp8_scales(entry.shape)}"
    return parameters, constants


def _devices(spec: ServerSpec, server: int) -> list[torch.device]:
    """The device of each rank of this server, on its node."""
    placement = spec.placement
    if device.select(spec.host.device).type == "cpu":
        return [torch.device("cpu")] * placement.tp
    first = placement.first_device(server)
    return [torch.device(device.GPU, first + rank % placement.ranks_per_node) for rank in range(placement.tp)]
