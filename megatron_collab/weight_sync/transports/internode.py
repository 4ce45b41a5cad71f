"""Weights from trainer rank to trainer rank: what a node's servers need and none of its ranks holds.

They use a separate process group with one process per device, as NCCL needs it; CPUs use gloo. NCCL was never run here.
A rank that dies or hangs ends the run, as in any collective.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_collab.weight_sync.encoding import Sums
from megatron_collab.weight_sync.node_routing import Hop
from megatron_collab.weight_sync.sender import Sender
from megatron_collab.weight_sync.transports.p2p import finish


class Relay:
    """On every rank. Sent slices are packed once into a buffer for all nodes; received ones go straight to segments."""

    def __init__(self, writer: Sender, hops: Sequence[Sequence[Hop]], device: torch.device, timeout: float) -> None:
        """Collective. `writer` has what this rank sends, `hops` are those of all ranks, by round.

        RuntimeError, also later, where another rank does not answer for `timeout` seconds.
        """
        self._writer, self._device, self._timeout = writer, device, timeout
        self._rank = dist.get_rank()
        self._hops = [
            [(tag, hop) for tag, hop in enumerate(row) if self._rank in (hop.source, hop.keeper)] for row in hops
        ]
        self._buffer = torch.zeros(writer.largest, dtype=torch.uint8, device=device)
        if any(hops):
            self._group = dist.new_group(timeout=timedelta(seconds=timeout))
            # NCCL has all ranks join at the first call, and not all have something in every round.
            dist.barrier(self._group)

    def receives(self, number: int) -> set[int]:
        """The server ranks for whose bucket this rank receives in a round."""
        return {hop.target for _, hop in self._hops[number] if hop.keeper == self._rank}

    @contextmanager
    def crossing(self, number: int, into: Mapping[int, Tensor], sums: Sums | None) -> Iterator[None]:
        """Run a round during the block; afterwards into[t], server rank t's bucket, is received and all sends are done.

        For `sums` see Sender.write.
        """
        own = self._hops[number]
        if not own:
            yield
            return
        parts = self._writer.packed(number, self._buffer)
        self._writer.write(number, parts, sums)
        operations = []
        for tag, hop in own:
            receives = hop.keeper == self._rank
            first = 0 if receives else self._writer.parts[number][hop.target][0]
            data = (into if receives else parts)[hop.target][hop.start - first : hop.stop - first]
            call, peer = (dist.irecv, hop.source) if receives else (dist.isend, hop.keeper)
            operations.append(dist.P2POp(call, data, peer, self._group, tag))
        works = dist.batch_isend_irecv(operations)
        yield
        deadline = time.monotonic() + self._timeout
        try:
            for work in works:
                finish(work, deadline, self._device)
        except RuntimeError as error:
            peers = {end for _, hop in own for end in (hop.source, hop.keeper)} - {self._rank}
            raise RuntimeError(
                f"publishing: trainer rank {self._rank} waits for ranks {sorted(peers)} in round {number}: {error}"
            ) from error
