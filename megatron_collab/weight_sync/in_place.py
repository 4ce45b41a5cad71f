"""Transfers new weights from the shards of the trainer's ranks into the parameters of the servers."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from megatron_collab.checkpoint.hf import named_factors, named_shards
from megatron_collab.inference.server import ServerError
from megatron_collab.inference.spec import ServerSpec
from megatron_collab.models import hf_to_sglang
from megatron_collab.models.hf_to_megatron import ModelShape
from megatron_collab.models.hf_to_sglang import ServerLayout
from megatron_collab.runtime import device, hang_detector
from megatron_collab.runtime.rank0 import shared
from megatron_collab.trainer.megatron.config import DTYPES
from megatron_collab.weight_sync.encoding import Sums, read
from megatron_collab.weight_sync.fp8_blocks import fp8_scales
from megatron_collab.weight_sync.http_protocol import ServerCall, ServerCalls
from megatron_collab.weight_sync.node_routing import Item, written
from megatron_collab.weight_sync.plan import Slice, SyncSpec, first_round, plan_sync
from megatron_collab.weight_sync.receiver import Row
from megatron_collab.weight_sync.sender import Sender
from megatron_collab.weight_sync.store_protocol import Peer, SyncStore, connect
from megatron_collab.weight_sync.transports.base import Transport, TransportSetup
from megatron_collab.weight_sync.transports.registry import (
    places_of,
    transport_class,
    transport_options,
    transport_spec,
)


class InPlace:
    """Fills the servers' parameters through the run's transport; every rank has an instance.

    `plan`: rounds of buckets; `places`: which ranks and servers belong together.
    """

    def __init__(
        self,
        sync: SyncSpec,
        spec: ServerSpec,
        chunks: Sequence[torch.nn.Module],
        shape: ModelShape,
        bucket_bytes: int,
    ) -> None:
        """Collective; arguments as in WeightSync."""
        self._sync, self._spec, self._shape = sync, spec, shape
        self._timeout, self._idle_timeout = sync.call_timeout, sync.idle_timeout
        on_gpus = device.select(spec.host.device).type == device.GPU
        self.places = places_of(sync, spec.placement, on_gpus)
        self.plan = plan_sync(shape, sync.trainer, spec.layout, DTYPES[spec.dtype].itemsize, bucket_bytes)
        self._prefix = f"publish/{shared(lambda: secrets.token_hex(8))}"
        self._address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # Two connections: one waits for buckets while rank 0's calls use the other.
        limit = hang_detector.collective_timeout(sync.timeout).total_seconds()
        self._store, self._calls_store = (connect(self._address, self._prefix, limit) for _ in range(2))
        self._clearer = ThreadPoolExecutor(1)
        self._clearing: Future[None] | None = None
        options = transport_options(sync.publish, spec.placement)
        kind = transport_class(sync.publish, spec.placement)
        self.transport: Transport = kind(self._setup(chunks, options, limit))

    def _setup(self, chunks: Sequence[torch.nn.Module], options: Any, limit: float) -> TransportSetup:
        """What the transport gets; `limit`: seconds that an operation of the run's store may take."""
        spec, dtype, rank = self._spec, DTYPES[self._spec.dtype], dist.get_rank()
        shards = dict(named_shards(chunks))
        place, home = self.places.of_rank(rank), next(iter(shards.values())).device
        merge = spec.layout.lora is None
        if not merge:
            shards |= named_factors(chunks)

        def make_sender(rounds: Sequence[Sequence[Item]], receivers: Callable[[int, Slice], Iterable[int]]) -> Sender:
            return Sender(rounds, receivers, shards, dtype, merge)

        return TransportSetup(
            options=options,
            plan=self.plan,
            places=self.places,
            writer=make_sender(written(self.plan, self.places, rank), lambda target, piece: [place]),
            make_sender=make_sender,
            device=home,
            server_devices=_devices(spec, self.places.first_server(place)),
            address=self._address,
            prefix=self._prefix,
            limit=limit,
            idle_timeout=self._idle_timeout,
            timeout=self._sync.timeout,
        )

    def close(self) -> None:
        self.transport.close()
        self._clearer.shutdown(wait=False)

    def publish(self, number: int, version: int, calls: ServerCalls, peers: Sequence[Peer]) -> None:
        """Transfer in publish `number` of the run; `calls` are made by rank 0 and record the failures; collective."""
        store, calls_store = (SyncStore(connection, number) for connection in (self._store, self._calls_store))
        new_peers = [peer for peer in peers if peer.new]
        first = first_round(self.plan, self._spec.layout, bool(new_peers))
        interval = self._sync.publish.verify
        with_base = self._spec.layout.lora is not None and first == 0  # the base model may be sent only once in a run
        verify = interval > 0 and (number % interval == 0 or with_base)
        addresses = self.transport.addresses(store, new_peers)
        sums: Sums | None = {} if verify else None
        checksums: dict[ServerCall, list[int]] = {}  # by server, the checksums that its ranks report

        def transfer(call: ServerCall) -> None:
            index, tp = call.server.index, call.server.tp
            take = {"publish": number, "first": first, "verify": verify}
            orders: list[dict[str, Any]] = [{"take": take} for _ in range(tp)]
            for rank, address in enumerate(addresses.get(index, ())):
                orders[rank]["attach"] = self._attach(index, rank) | {"arguments": address}
            try:
                call.pause(self._sync.pause)
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
        self.transport.carry(store, peers, sums, first)
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
        self._clearing = self._clearer.submit(self._clear, number - 1)

    def _clear(self, number: int) -> None:
        """Remove the keys of a publish (thousands for a large model) while the servers sample."""
        if dist.get_rank() == 0:
            SyncStore(self._calls_store, number).clear()
        self.transport.clear(number)

    def _attach(self, server: int, rank: int) -> dict[str, Any]:
        """Arguments of a server rank's Receiver, except those of its transport."""
        place = self.places.of_server(server, rank)
        dtype = self._spec.dtype

        def row(piece: Slice) -> Row:
            return row_of(piece, self.places.writer(place, rank, piece))

        parameters, constants = parameters_of(self._shape, self._spec.layout, rank, dtype)
        return {
            "store": self._address,
            "prefix": self._prefix,
            "timeout": self._timeout,
            "server": server,
            "rank": rank,
            "dtype": dtype,
            "parameters": parameters,
            "constants": constants,
            "rounds": [[row(piece) for piece in buckets[rank].slices] for buckets in self.plan],
            "transport": transport_spec(self._sync.publish, self._spec.placement),
        }

    def _compare(self, calls: ServerCalls, checksums: dict[ServerCall, list[int]], sums: Sums) -> None:
        """Compare the checksums of every server with those sent to its place; collective."""
        sent_sums: list[dict[tuple[int, int], int]] = [{}] * dist.get_world_size()
        dist.all_gather_object(sent_sums, {receiver: read([total]) for receiver, total in sums.items()})
        for call in calls.without_failure():
            for rank, actual in enumerate(checksums[call]):
                place = self.places.of_server(call.server.index, rank)
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
