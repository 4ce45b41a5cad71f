"""This rank's share of a batch as packed micro-batches, and results mapped back to the tokens of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    """Sequences on this rank's device, `packed` into T positions, N of whose predictions are requested.

    `token_ids` and `position_ids` are int64 [1, T]. Of each requested prediction: `positions` (where it is in T),
    `labels` (the token it predicts) and `sequence` (its sample's number within the micro-batch), int64 [N]; `columns`
    float32 [N] by name; `where` its token's place in all samples' tokens laid end to end. `samples` is the number of
    sequences.
    """

    token_ids: Tensor
    position_ids: Tensor
    packed: PackedSeqParams
    positions: Tensor
    labels: Tensor
    sequence: Tensor
    columns: dict[str, Tensor]
    where: np.ndarray
    samples: int


@dataclass(frozen=True)
class Share:
    """This rank's micro-batches of some samples; `lengths` are those of all samples, the same on every rank."""

    micro_batches: list[MicroBatch]
    lengths: list[int]

    def collect(self, found: Sequence[Tensor]) -> list[np.ndarray]:
        """Results of all ranks for the requested positions, float32 [S] for each sample on every rank; collective.

        `found[i]` is float [N] for micro-batch i; empty but on the last pipeline stage. Others are 0.
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

    Predictions are requested where the column `ask` is not 0; without one, everywhere.
    """
    parallel = config.parallel
    lengths = [len(token_ids) for token_ids in columns["token_ids"]]
    plan = packing.pack(
        [packing.positions(length) for length in lengths],
        parallel_state.get_data_parallel_world_size(),
        config.train.tokens_per_micro_batch * parallel.cp,
        align=alignment(config)[0],
        multiple_of=parallel.pp if parallel.vpp > 1 else 1,
    )
    starts = np.cumsum([0, *lengths[:-1]])
    mine = plan[parallel_state.get_data_parallel_rank()]
    return Share([_micro_batch(config, columns, indices, starts, device, ask) for indices in mine], lengths)


def _micro_batch(
    config: Config,
    columns: Columns,
    indices: packing.SampleIndices,
    starts: np.ndarray,
    device: torch.device,
    ask: str | None,
) -> MicroBatch:
    """The samples `indices`; `starts`, where every sample begins in all samples' tokens laid end to end."""
    packed = packing.collate(columns, indices, *alignment(config))
    cu_seqlens, sequence = packed["cu_seqlens"], packed["sequence"]
    cp, cp_rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    kept = packing.context_slice(cu_seqlens, cp, cp_rank) if cp > 1 else np.arange(cu_seqlens[-1])
    asked = sequence[kept] >= 0
    if ask is not None:
        asked &= packed[ask][kept] != 0
    positions = np.flatnonzero(asked)
    chosen = kept[positions]

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    bounds, longest = tensor(cu_seqlens), int(packed["max_seqlen"])
    return MicroBatch(
        token_ids=tensor(packed["token_ids"][:, kept]),
        position_ids=tensor(packed["position_ids"][:, kept]),
        packed=PackedSeqParams("thd", bounds, bounds, max_seqlen_q=longest, max_seqlen_kv=longest),
        positions=tensor(positions),
        labels=tensor(packed["labels"][0, chosen]),
        sequence=tensor(sequence[chosen]),
        columns={name: tensor(packed[name][chosen]) for name in columns if name != "token_ids"},
        # Position i of a sequence predicts its token i + 1.
        where=starts[list(indices)][sequence[chosen]] + chosen - cu_seqlens[:-1][sequence[chosen]] + 1,
        samples=len(indices),
    )
