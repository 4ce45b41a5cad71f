"""The weight sync of a run on paper: the plan, what a trainer rank writes of it, and what servers are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from megatron_collab.checkpoint.hf import named_shards
from megatron_collab.config import Config
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.planning.rehearsal.ledger import HOST, Ledger
from megatron_collab.planning.rehearsal.servers import Order, Place
from megatron_collab.trainer.megatron.config import DTYPES
from megatron_collab.weight_sync.node_routing import Places, lacking, places_of, sent, written
from megatron_collab.weight_sync.plan import SyncPlan, plan_sync, server_layout, trainer_layout, uses_memory
from megatron_collab.weight_sync.sender import Sender
from megatron_collab.weight_sync.sync import parameters_of, row_of
from megatron_collab.weight_sync.transports.shared_memory import segment_sizes

BUCKETS = "weight sync buckets"


@dataclass(frozen=True)
class Publishing:
    """How a run of `shape` gives its weights to its servers."""

    config: Config
    shape: ModelShape
    plan: SyncPlan
    places: Places

    @classmethod
    def of(cls, config: Config, shape: ModelShape) -> Publishing:
        item = DTYPES[config.model.dtype].itemsize
        plan = plan_sync(shape, trainer_layout(config), server_layout(config), item)
        return cls(config, shape, plan, places_of(config, on_gpus=True))

    @torch.no_grad()
    def write(self, rank: int, chunks: Sequence[torch.nn.Module], ledger: Ledger) -> list[Tensor]:
        """Write all rounds of a trainer rank into its segments and buffer, which stay allocated: give them back."""
        shards, dtype, plan = dict(named_shards(chunks)), DTYPES[self.config.model.dtype], self.plan
        places, place = self.places, self.places.of_rank(rank)
        own = Sender(written(plan, places, rank), lambda target, piece: [place], shards, dtype)
        if not uses_memory(self.config):
            with ledger.booking(BUCKETS):
                buffers = [torch.zeros(own.largest, dtype=torch.uint8) for _ in plan[:2]]
            for number in range(len(plan)):
                own.write(number, own.packed(number, buffers[number % 2]))
            return buffers
        away = Sender(
            sent(plan, places, rank), lambda target, piece: lacking(places, target, piece.holders), shards, dtype
        )
        with ledger.booking(BUCKETS if self.config.rollout.server.colocated else HOST):
            kept = {
                t: [torch.empty(size, dtype=torch.uint8) for size in sizes]
                for t, sizes in segment_sizes(plan, places, rank).items()
            }
        with ledger.booking(BUCKETS):
            buffer = torch.zeros(away.largest, dtype=torch.uint8)
        with ledger.booking(HOST):  # of other ranks, on their devices
            other = torch.empty(max(bucket.size for row in plan for bucket in row), dtype=torch.uint8)
        for number, parts in enumerate(own.parts):
            segments = {t: kept[t][number % len(kept[t])] if t in kept else other for t in parts}
            own.write(number, {t: segments[t][slice(*part)] for t, part in parts.items()})
            away.write(number, away.packed(number, buffer))
        return [buffer, *chain(*kept.values())]

    def order(self, hf: dict[str, Any]) -> Order:
        """The distinct ranks of a server, with what each is sent; `hf`: the model's config.json."""
        layout, dtype = server_layout(self.config), self.config.model.dtype
        found: dict[Any, Place] = {}
        for rank in range(layout.tp):
            parameters, _ = parameters_of(self.shape, layout, rank, dtype)
            buckets = [
                (row[rank].size, [row_of(piece, piece.source) for piece in row[rank].slices]) for row in self.plan
            ]
            alike = tuple(parameters.items()), max(len(rows) for _, rows in buckets)
            found.setdefault(alike, Place(rank, parameters, buckets))
        tokens = self.config.rollout.server.max_total_tokens
        if tokens is None:
            tokens = self.config.rollout.server.max_running_requests * self.config.rollout.context_length
        return Order(hf, layout, dtype, tokens, list(found.values()))
