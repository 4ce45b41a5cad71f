"""Simulates the weight sync of a run: the plan, the writes of a trainer rank, and the slices sent to servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from megatron_collab.checkpoint.hf import named_factors, named_shards
from megatron_collab.config import Config
from megatron_collab.inference.spec import ServerSpec
from megatron_collab.launch import server_specs
from megatron_collab.launch.trainer_specs import sync_spec, trainer_layout
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.rehearsal.ledger import HOST, Ledger
from megatron_collab.rehearsal.servers import Order, Place
from megatron_collab.trainer.megatron.config import DTYPES
from megatron_collab.weight_sync.in_place import parameters_of, row_of
from megatron_collab.weight_sync.node_routing import Places, lacking, sent, written
from megatron_collab.weight_sync.plan import SyncPlan, plan_sync
from megatron_collab.weight_sync.sender import Sender
from megatron_collab.weight_sync.transports.base import FolderTransport
from megatron_collab.weight_sync.transports.registry import places_of, transport_class

BUCKETS = "weight sync buckets"


@dataclass(frozen=True)
class Publishing:
    """Weight sync of a run with a model of `shape` to the servers of the `policy`."""

    config: Config
    policy: ServerSpec
    shape: ModelShape
    plan: SyncPlan
    places: Places

    @classmethod
    def of(cls, config: Config, shape: ModelShape) -> Publishing:
        policy = server_specs.training(config).policy
        plan = plan_sync(shape, trainer_layout(config), policy.layout, DTYPES[policy.dtype].itemsize)
        return cls(config, policy, shape, plan, places_of(sync_spec(config), policy.placement, on_gpus=True))

    @torch.no_grad()
    def write(self, rank: int, chunks: Sequence[torch.nn.Module], ledger: Ledger) -> list[Tensor]:
        """Write all rounds of a trainer rank; returns its segments and buffers, which stay allocated in a run.

        Writes use meta tensors: with tensors that the ledger counts they take five times as long.
        """
        plan, places, dtype = self.plan, self.places, DTYPES[self.config.model.dtype]
        transport = transport_class(self.config.publish, self.policy.placement)
        if issubclass(transport, FolderTransport):
            return []
        place = places.of_rank(rank)
        with _disable_current_modes(), torch.device("meta"):
            parameters = [*named_shards(chunks), *named_factors(chunks)]
            shards: Any = {name: torch.empty(shard.shape, dtype=shard.dtype) for name, shard in parameters}
            sender = Sender(written(plan, places, rank), lambda target, piece: [place], shards, dtype)
            if transport.needs_same_node:
                self._write_on_node(rank, sender, shards)
            else:
                _write_packed(sender)
        allocated = transport.bytes_held(plan, places, rank)
        with ledger.booking(BUCKETS if self.policy.placement.colocated else HOST):
            segments = [_bytes(size) for size in allocated.segments]
        with ledger.booking(BUCKETS):
            return [*segments, *(_bytes(size) for size in allocated.buffers)]

    def _write_on_node(self, rank: int, sender: Sender, shards: Any) -> None:
        """Write the slices for other places, packed, and those for this place, into whole buckets."""
        plan, places = self.plan, self.places
        crosses = sent(plan, places, rank)
        remote_sender = Sender(
            crosses,
            lambda target, piece: lacking(places, target, piece.holders),
            shards,
            DTYPES[self.config.model.dtype],
        )
        _write_packed(remote_sender)
        for number, parts in enumerate(sender.parts):
            sender.write(number, {t: _bytes(plan[number][t].size)[slice(*part)] for t, part in parts.items()})

    def order(self, hf: dict[str, Any]) -> Order:
        """The distinct ranks of a server with the slices sent to each; `hf`: the model's config.json."""
        layout, dtype = self.policy.layout, self.policy.dtype
        places: dict[Any, Place] = {}
        for rank in range(layout.tp):
            parameters, _ = parameters_of(self.shape, layout, rank, dtype)
            buckets = [
                (row[rank].size, [row_of(piece, piece.source) for piece in row[rank].slices]) for row in self.plan
            ]
            key = tuple(parameters.items()), max(len(rows) for _, rows in buckets)
            places.setdefault(key, Place(rank, parameters, buckets))
        return Order(hf, layout, dtype, self.policy.cache_tokens, list(places.values()))


def _bytes(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


def _write_packed(sender: Sender) -> None:
    buffer = _bytes(sender.largest)
    for number in range(len(sender.parts)):
        sender.write(number, sender.packed(number, buffer))
