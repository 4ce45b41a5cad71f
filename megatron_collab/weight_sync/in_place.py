"""Weights straight from the shards of the trainer's ranks into the parameters of the servers, bucket after bucket."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_collab.checkpoint.hf import named_shards
from megatron_collab.config import Config
from megatron_collab.models import hf_to_sglang
from megatron_collab.models.hf_to_megatron import ModelShape
from megatron_collab.runtime import device, hang_detector
from megatron_collab.runtime.rank0 import shared
from megatron_collab.trainer.megatron.config import DTYPES
from megatron_collab.weight_sync.encoding import Sums, combined, fp8_scales
from megatron_collab.weight_sync.http_protocol import PublishError, ServerCall, ServerCalls
from megatron_collab.weight_sync.node_routing import hops, lacking, nodes, sent, written
from megatron_collab.weight_sync.plan import Slice, plan_sync, server_layout, trainer_layout, uses_memory
from megatron_collab.weight_sync.sender import Sender
from megatron_collab.weight_sync.store_protocol import Board, Peer, connect
from megatron_collab.weight_sync.transports.internode import Relay
from megatron_collab.weight_sync.transports.p2p import NetworkTransport
from megatron_collab.weight_sync.transports.shared_memory import SharedMemoryTransport


class InPlace:
    """By memory of the nodes or by the network, as publish.transport says; on every rank."""

    def __init__(
        self, config: Config, chunks: Sequence[torch.nn.Module], shape: ModelShape, bucket_bytes: int, timeout: float
    ) -> None:
        """Collective. A server that has not got all after `timeout` seconds has failed; half of it may be silence."""
        self._shape, self._server, self._dtype = shape, server_layout(config), config.model.dtype
        dtype = DTYPES[config.model.dtype]
        self._plan = plan_sync(shape, trainer_layout(config), self._server, dtype.itemsize, bucket_bytes)
        self._nodes = nodes(config)
        rank, shards = dist.get_rank(), dict(named_shards(chunks))
        node, home = self._nodes.of_rank(rank), next(iter(shards.values())).device
        self.writer = Sender(written(self._plan, self._nodes, rank), lambda piece: [node], shards, dtype)
        self._prefix, self._timeout = f"publish/{shared(lambda: secrets.token_hex(8))}", timeout
        self._address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # Two lines: one waits for buckets while rank 0's calls are under way on the other.
        limit = hang_detector.collective_timeout(config.launch.timeout).total_seconds()
        self._store, self._calls_store = (connect(self._address, self._prefix, limit) for _ in range(2))
        self._before: Board | None = None  # of the last publish
        self.carrier: SharedMemoryTransport | NetworkTransport
        if uses_memory(config):
            away = Sender(
                sent(self._plan, self._nodes, rank), lambda piece: lacking(self._nodes, piece.holders), shards, dtype
            )
            relay = Relay(away, hops(self._plan, self._nodes), home, config.launch.timeout)
            self.carrier = SharedMemoryTransport(
                self._plan, self._nodes, self.writer, relay, _devices(config), timeout / 2
            )
        else:
            self.carrier = NetworkTransport(self.writer, self._address, self._prefix, home, timeout / 2)

    def deliver(
        self, number: int, version: int, links: ServerCalls, peers: Sequence[Peer], mode: str, verify: bool
    ) -> None:
        """Publish number `number` to all servers; collective. `links` are rank 0's, and know who failed."""
        board, calls = Board(self._store, number), Board(self._calls_store, number)
        addresses = self.carrier.addresses(board, [peer for peer in peers if peer.new])
        sums: Sums | None = {} if verify else None
        found: dict[ServerCall, list[int]] = {}

        def bring(link: ServerCall) -> None:
            index = link.server.index
            orders: list[dict[str, Any]] = [
                {"take": {"publish": number, "verify": verify}} for _ in range(link.server.tp)
            ]
            for rank, address in enumerate(addresses.get(index, ())):
                orders[rank]["attach"] = self._attach(index, rank) | address
            try:
                link.pause(mode)
                link.begin()
                link.receive([json.dumps(order) for order in orders], version)
                found[link] = _answers(link, calls)
            except PublishError:
                calls.abandon(index, link.server.tp, len(self._plan.rounds))
                raise

        links.start(bring)
        self.carrier.carry(board, peers, sums)
        if dist.get_rank() == 0 and self._before is not None:  # while the last buckets are read
            self._before.clear()  # every rank was through with it when that publish ended
        self._before = board
        links.settle()
        dist.barrier()  # every rank has said whom it has abandoned, and waits for nothing on the board
        for link in links.left():
            if calls.abandoned(link.server.index):
                links.failures[link] = f"{link.server.url}: did not take the weights for {self._timeout / 2:g} s"
        if sums is not None:
            self._compare(links, found, sums)
        links.each(_commit)

    def _attach(self, server: int, rank: int) -> dict[str, Any]:
        """Arguments of a server rank's Receiver."""
        node = self._nodes.of_server(server)

        def row(piece: Slice) -> tuple[Any, ...]:
            bounds = [(cut.start, cut.stop) for cut in piece.target_index]
            return (
                self._nodes.writer(node, rank, piece),
                piece.target,
                bounds,
                piece.offset,
                piece.size,
                piece.quantised,
            )

        parameters: dict[str, str] = {}
        constants: dict[str, float] = {}
        for parameter in hf_to_sglang.table(self._shape, self._server, rank):
            dtype = "float8_e4m3fn" if parameter.quantised else self._dtype
            if parameter.constant is not None:
                constants[parameter.name], dtype = parameter.constant, "float32"
            parameters[parameter.name] = f"{dtype} {parameter.shape}"
            if parameter.quantised:
                parameters[f"{parameter.name}_scale_inv"] = f"float32 {fp8_scales(parameter.shape)}"
        return {
            "store": self._address,
            "prefix": self._prefix,
            "timeout": self._timeout,
            "server": server,
            "rank": rank,
            "dtype": self._dtype,
            "parameters": parameters,
            "constants": constants,
            "rounds": [[row(piece) for piece in buckets[rank].slices] for buckets in self._plan.rounds],
        }

    def _compare(self, links: ServerCalls, found: Mapping[ServerCall, Sequence[int]], sums: Sums) -> None:
        """What every server holds against what was sent to its node; collective."""
        every: list[Sums] = [{}] * dist.get_world_size()
        dist.all_gather_object(every, sums)
        for link in links.left():
            node = self._nodes.of_server(link.server.index)
            for rank, held in enumerate(found[link]):
                sent = combined([own.get((node, rank), 0) for own in every])
                if held != sent:
                    links.failures[link] = (
                        f"{link.server.url}: rank {rank}: holds other weights than were sent: "
                        f"checksum {held:x}, not {sent:x}"
                    )


def _devices(config: Config) -> list[torch.device]:
    """Where the ranks of a node's first server compute."""
    server = config.rollout.server
    if device.select(config.launch.device).type == "cpu":
        return [torch.device("cpu")] * server.tp
    first = 0 if server.colocated else config.launch.nproc_per_node
    return [torch.device(device.GPU, first + rank) for rank in range(server.tp)]


def _commit(link: ServerCall) -> None:
    link.end()
    link.go_on()


def _answers(link: ServerCall, board: Board) -> list[int]:
    """What the ranks of a server hold, as checksums; PublishError where one did not get all."""
    silent: dict[str, Any] = {"error": "gave no answer; see its log"}
    answers = [board.answered(link.server.index, rank) or silent for rank in range(link.server.tp)]
    errors = [f"rank {rank}: {answer['error']}" for rank, answer in enumerate(answers) if "error" in answer]
    if errors:
        raise PublishError(f"{link.server.url}: {'; '.join(errors)}")
    return [answer["checksum"] for answer in answers]
