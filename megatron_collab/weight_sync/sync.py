"""New weights into the servers, as a version that is live at each of them only when it has all of it.

    ranks:    [write bucket 0] [write bucket 1] [write 2, once 0 is read] ...
    servers:  pause, begin     [read bucket 0]  [read bucket 1]           ...  end, go on: the version is live

They go straight from the shards of the trainer's ranks into the parameters of the servers, or by a folder on disk. A
server that fails anywhere is left out and stays paused; the others go on. What becomes of it is the pool's matter.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_collab.checkpoint.hf import named_factors, named_shards, save_hf
from megatron_collab.config import Config
from megatron_collab.inference.pool import ServerPool
from megatron_collab.inference.server import ServerError
from megatron_collab.models import hf_to_sglang
from megatron_collab.models.hf_to_megatron import ModelShape
from megatron_collab.models.hf_to_sglang import ServerLayout
from megatron_collab.models.parallel_layout import first_gpu, server_ranks_per_node
from megatron_collab.runtime import device, hang_detector, hub
from megatron_collab.runtime.process import RunStopped, beat
from megatron_collab.runtime.rank0 import from_leader, shared, wait_until
from megatron_collab.trainer.megatron.config import DTYPES
from megatron_collab.weight_sync.encoding import Sums, read
from megatron_collab.weight_sync.fp8_blocks import fp8_scales
from megatron_collab.weight_sync.http_protocol import ServerCall, ServerCalls
from megatron_collab.weight_sync.node_routing import hops, lacking, places_of, sent, written
from megatron_collab.weight_sync.plan import (
    BUCKET_BYTES,
    Slice,
    first_round,
    plan_sync,
    server_layout,
    trainer_layout,
    uses_memory,
)
from megatron_collab.weight_sync.receiver import Row
from megatron_collab.weight_sync.sender import Sender
from megatron_collab.weight_sync.store_protocol import Peer, SyncStore, connect
from megatron_collab.weight_sync.transports.p2p import NetworkTransport
from megatron_collab.weight_sync.transports.shared_memory import Relay, SharedMemoryTransport

TRIES = 3  # to give the servers a version before the run ends: all of them may fail at once


class PublishError(RunStopped):
    """No server has the version; the message says why."""


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
        # A server that has not got all by then has failed, before the collectives of the ranks give up; half of it may
        # be silence, or a look for servers, while the other ranks wait in a collective.
        self._timeout, self._idle_timeout = config.launch.timeout / 2, config.launch.timeout / 4
        self._callers = ThreadPoolExecutor(config.rollout.server.replicas)
        self._clearer = ThreadPoolExecutor(1)
        self._clearing: Future[None] | None = None
        self._number = 0
        self._known: dict[int, int] = {}  # by index, the generation of a server that has been given weights
        self._carrier: SharedMemoryTransport | NetworkTransport | None = None
        if config.publish.transport != "disk":
            self._carrier = self._transport(bucket_bytes)

    def _transport(self, bucket_bytes: int) -> SharedMemoryTransport | NetworkTransport:
        """By memory of the nodes or by the network, as publish.transport says; collective."""
        config, dtype, rank = self._config, DTYPES[self._config.model.dtype], dist.get_rank()
        on_gpus = device.select(config.launch.device).type == device.GPU
        self._server, self._places = server_layout(config), places_of(config, on_gpus)
        self._plan = plan_sync(self._shape, trainer_layout(config), self._server, dtype.itemsize, bucket_bytes)
        self._prefix = f"publish/{shared(lambda: secrets.token_hex(8))}"
        self._address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # Two connections: one waits for buckets while rank 0's calls are under way on the other.
        limit = hang_detector.collective_timeout(config.launch.timeout).total_seconds()
        self._store, self._calls_store = (connect(self._address, self._prefix, limit) for _ in range(2))
        shards, places = dict(named_shards(self._chunks)), self._places
        place, home = places.of_rank(rank), next(iter(shards.values())).device
        merge = self._server.lora is None
        if not merge:
            shards |= named_factors(self._chunks)
        writer = Sender(written(self._plan, places, rank), lambda target, piece: [place], shards, dtype, merge)
        if not uses_memory(config):
            return NetworkTransport(writer, self._address, self._prefix, home, self._idle_timeout)
        crosses = sent(self._plan, places, rank)
        away = Sender(crosses, lambda target, piece: lacking(places, target, piece.holders), shards, dtype, merge)
        relay = Relay(away, hops(self._plan, places), home, config.launch.timeout)
        devices = _devices(config, places.first_server(place))
        timeout = self._idle_timeout
        return SharedMemoryTransport(self._plan, places, writer, relay, devices, timeout, self._prefix, limit)

    def __enter__(self) -> WeightSync:
        return self

    def __exit__(self, *_: object) -> None:
        if self._carrier is not None:
            self._carrier.close()
        self._callers.shutdown(wait=False)  # a call that hangs ends with the server
        self._clearer.shutdown(wait=False)

    def sync(self, version: int) -> None:
        """Give the servers the present weights as `version`, and have the workers ask those that have it; collective.

        Waits until a server is there, and tries again where all of them fail on the way. PublishError on every rank
        where no server has the version after that, ServerError where one cannot be kept alive.
        """
        beat(f"the weight sync of version {version}")
        for tried in range(1, TRIES + 1):
            wait_until(lambda: self._of_rank_0.ready(self._idle_timeout))
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
        calls = ServerCalls([ServerCall(server, self._timeout) for server in present], self._callers)
        peers = shared(lambda: [Peer(s.index, s.tp, self._known.get(s.index) != s.generation) for s in present])
        if not peers:
            raise PublishError("no server is there to be given weights")
        if self._carrier is None:
            self._by_disk(version, calls)
        else:
            self._in_place(version, calls, peers, self._carrier)
        failures = shared(lambda: {call.server.index: reason for call, reason in calls.failures.items()})
        if self._carrier is not None:
            for index in failures:
                self._carrier.drop(index)
        for server in present:
            self._known[server.index] = server.generation
            if server.index in failures:
                del self._known[server.index]
                self._of_rank_0.lost(server, failures[server.index])
        if len(failures) == len(peers):
            raise PublishError("; ".join(failures.values()))
        self.version = version

    def _by_disk(self, version: int, calls: ServerCalls) -> None:
        folder = Path(self._config.run.dir) / "publish"  # one that a killed run left behind is replaced
        save_hf(self._chunks, folder, hub.folder(self._config.model.path))
        calls.each(lambda call: call.read_folder(folder, version, self._mode))
        if dist.get_rank() == 0:
            shutil.rmtree(folder)

    def _in_place(
        self, version: int, calls: ServerCalls, peers: Sequence[Peer], carrier: SharedMemoryTransport | NetworkTransport
    ) -> None:
        """`calls` are rank 0's, and know who failed."""
        store, of_calls = (SyncStore(each, self._number) for each in (self._store, self._calls_store))
        new = [peer for peer in peers if peer.new]
        first = first_round(self._plan, self._server, bool(new))
        every = self._config.publish.verify
        with_base = self._server.lora is not None and first == 0  # which may be sent once in a run
        verify = every > 0 and (self._number % every == 0 or with_base)
        addresses = carrier.addresses(store, new)
        sums: Sums | None = {} if verify else None
        found: dict[ServerCall, list[int]] = {}  # by server, the checksums of what its ranks hold

        def bring(call: ServerCall) -> None:
            index, tp = call.server.index, call.server.tp
            take = {"publish": self._number, "first": first, "verify": verify}
            orders: list[dict[str, Any]] = [{"take": take} for _ in range(tp)]
            for rank, address in enumerate(addresses.get(index, ())):
                orders[rank]["attach"] = self._attach(index, rank) | address
            try:
                call.pause(self._mode)
                call.begin()
                call.receive([json.dumps(order) for order in orders], version)
                answers = [of_calls.answered(index, rank) for rank in range(tp)]
                errors = [f"rank {rank}: {answer['error']}" for rank, answer in enumerate(answers) if "error" in answer]
                if errors:
                    raise ServerError(f"{call.server.url}: {'; '.join(errors)}")
                found[call] = [answer["checksum"] for answer in answers]
            except ServerError:
                of_calls.abandon(index, range(tp))
                raise

        def commit(call: ServerCall) -> None:
            call.end()
            call.go_on()

        calls.start(bring)
        carrier.carry(store, peers, sums, first)
        calls.settle()
        dist.barrier()  # every rank has said whom it has abandoned, and waits for nothing on the store
        for call in calls.left():
            if of_calls.abandoned(call.server.index):
                calls.failures[call] = f"{call.server.url}: did not take the weights for {self._idle_timeout:g} s"
        if sums is not None:
            self._compare(calls, found, sums)
        calls.each(commit)
        if self._clearing is not None:
            self._clearing.result()  # long done
        # Of the publish before: a server that was left out of this one may still read.
        self._clearing = self._clearer.submit(self._clear, self._number - 1, carrier)

    def _clear(self, number: int, carrier: SharedMemoryTransport | NetworkTransport) -> None:
        """Remove the keys of a publish, thousands in a large model, while the servers sample."""
        if dist.get_rank() == 0:
            SyncStore(self._calls_store, number).clear()
        carrier.clear(number)

    def _attach(self, server: int, rank: int) -> dict[str, Any]:
        """Arguments of a server rank's Receiver."""
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
        }

    def _compare(self, calls: ServerCalls, found: dict[ServerCall, list[int]], sums: Sums) -> None:
        """What every server holds against what was sent to its place; collective."""
        every: list[dict[tuple[int, int], int]] = [{}] * dist.get_world_size()
        dist.all_gather_object(every, {receiver: read([found]) for receiver, found in sums.items()})
        for call in calls.left():
            for rank, held in enumerate(found[call]):
                place = self._places.of_server(call.server.index, rank)
                expected = read(own.get((place, rank), 0) for own in every)
                if held != expected:
                    calls.failures[call] = (
                        f"{call.server.url}: rank {rank}: holds other weights than were sent: "
                        f"checksum {held:x}, not {expected:x}"
                    )


def row_of(piece: Slice, source: int) -> Row:
    """A slice as a server's rank is told of it; `source`: the rank that announces it."""
    bounds = [(cut.start, cut.stop) for cut in piece.target_index]
    return Row(source, piece.target, bounds, piece.offset, piece.size, piece.quantised)


def parameters_of(
    shape: ModelShape, server: ServerLayout, rank: int, dtype: str
) -> tuple[dict[str, str], dict[str, float]]:
    """Dtype and shape of every parameter that a server's rank must have; the numbers that some are filled with."""
    table = (*hf_to_sglang.table(shape, server, rank), *hf_to_sglang.adapters(shape, server, rank))
    constants = {entry.name: entry.constant for entry in table if entry.constant is not None}
    parameters: dict[str, str] = {}
    for entry in table:
        kind = "float8_e4m3fn" if entry.quantised else "float32" if entry.name in constants else dtype
        parameters[entry.name] = f"{kind} {entry.shape}"
        if entry.quantised:
            parameters[f"{entry.name}_scale_inv"] = f"float32 {fp8_scales(entry.shape)}"
    return parameters, constants


def _devices(config: Config, server: int) -> list[torch.device]:
    """Where the ranks of this server compute, each on its node."""
    tp, here = config.rollout.server.tp, server_ranks_per_node(config)
    if device.select(config.launch.device).type == "cpu":
        return [torch.device("cpu")] * tp
    first = first_gpu(config, server)
    return [torch.device(device.GPU, first + rank % here) for rank in range(tp)]
