"""This rank's share of a batch as packed micro-batches, and results mapped back to the tokens of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_collab.config import Config
from megatron_collab.models.parallel_layout import alignment
from megatron_collab.trainer import packing

# Per-sample arrays [S] by name: token_ids int64, all others float32.
Columns = Mapping[str, Sequence[np.ndarray]]


@dataclass(frozen=True)
class MicroBatch:
    """Packed sequences on this rank's device, and the N positions whose predictions are requested.

    `token_ids` and `position_ids` are int64 [1, T]; `cu_seqlens` int32 as in PackedSeqParams. Of each asked position:
    `positions` (where it is in T), `labels` (the token it predicts) and `sequence` (its sample's number within the
    micro-batch), int64 [N]; `columns` float32 [N] by name; `where` its token's place in all samples' tokens laid end
    to end. `samples` is the number of sequences.
    """

    token_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    positions: Tensor
    labels: Tensor
    sequence: Tensor
    columns: dict[str, Tensor]
    where: np.ndarray
    samples: int

    @cached_property
    def packed(self) -> PackedSeqParams:
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_kv=self.cu_seqlens,
            max_seqlen_q=self.max_seqlen,
            max_seqlen_kv=self.max_seqlen,
        )


@dataclass(frozen=True)
class Share:
    """This rank's micro-batches of some samples; `lengths` are those of all samples, the same on every rank."""

    micro_batches: list[MicroBatch]
    lengths: list[int]

    def collect(self, found: Sequence[Tensor]) -> list[np.ndarray]:
        """Results of all ranks for the requested positions, float32 [S] for each sample on every rank; collective.

        `found[i]` is float [N] for micro-batch i; empty but on the last pipeline stage. What nobody asked for is 0.
        """
        device = self.micro_batches[0].token_ids.device
        flat = torch.zeros(sum(self.lengths), device=device)
        if parallel_state.get_tensor_model_parallel_rank() == 0:  # its peers found the same
            for micro_batch, values in zip(self.micro_batches, found, strict=True) if found else ():
                flat[torch.from_numpy(micro_batch.where).to(device)] = values.float()
        dist.all_reduce(flat)
        return np.split(flat.cpu().numpy(), np.cumsum(self.lengths)[:-1])


def make_share(config: Config, columns: Columns, device: torch.device, ask: str | None = None) -> Share:
    """Pack samples into this rank's micro-batches; no collective, since every rank makes the same plan.

    Asked for are the positions where the column `ask` is not 0; without one, every prediction.
    """
    parallel = config.parallel
    lengths = [len(token_ids) for token_ids in columns["token_ids"]]
    align, total = alignment(config)
    plan = packing.pack(
        [packing.positions(length) for length in lengths],
        parallel_state.get_data_parallel_world_size(),
        config.train.tokens_per_micro_batch * parallel.cp,
        align=align,
        multiple_of=parallel.pp if parallel.vpp > 1 else 1,
    )
    starts = np.cumsum([0, *lengths[:-1]])
    mine = plan.ranks[parallel_state.get_data_parallel_rank()]
    return Share([_micro_batch(columns, indices, align, total, starts, device, ask) for indices in mine], lengths)


def _micro_batch(
    columns: Columns,
    indices: packing.SampleIndices,
    align: int,
    total: int,
    starts: np.ndarray,
    device: torch.device,
    ask: str | None,
) -> MicroBatch:
    packed = packing.collate(columns, indices, align=align, total=total)
    cu_seqlens, sequence = packed["cu_seqlens"], packed["sequence"]
    cp, cp_rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    kept = packing.context_slice(cu_seqlens, cp, cp_rank) if cp > 1 else np.arange(cu_seqlens[-1])
    asked = sequence[kept] >= 0
    if ask is not None:
        asked &= packed[ask][kept] != 0
    positions = np.flatnonzero(asked)
    chosen = kept[positions]
    of_sample = np.array([starts[index] for index in indices], np.int64)
    # Position i of a sequence speaks of its token i + 1.
    within = chosen - cu_seqlens[:-1][sequence[chosen]]
    tensors = {
        name: torch.from_numpy(np.ascontiguousarray(array)).to(device)
        for name, array in {
            "token_ids": packed["token_ids"][:, kept],
            "position_ids": packed["position_ids"][:, kept],
            "cu_seqlens": cu_seqlens,
            "positions": positions,
            "labels": packed["labels"][0, chosen],
            "sequence": sequence[chosen],
        }.items()
    }
    floats = {name: torch.from_numpy(packed[name][chosen]).to(device) for name in columns if name != "token_ids"}
    return MicroBatch(
        **tensors,
        max_seqlen=int(packed["max_seqlen"]),
        columns=floats,
        where=of_sample[sequence[chosen]] + within + 1,
        samples=len(indices),
    )
