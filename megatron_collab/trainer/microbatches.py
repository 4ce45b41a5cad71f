"""Micro-batches: which samples go through the model together and on which rank, packed end to end, and results of them.

`pack` is pure: from lengths alone, so every rank computes the same plan and takes its own part of it.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_collab.config import Config
from megatron_collab.models.parallel_layout import alignment

# Per-sample arrays [S] by name: token_ids int64, all others float32.
Columns = Mapping[str, Sequence[np.ndarray]]
SampleIndices = tuple[int, ...]

# Length at which attention costs as much as the rest of a layer: 12 times a hidden size of 4,096; see `cost`.
_EVEN_LENGTH = 12 * 4096


def positions(tokens: int) -> int:
    """Positions a sample of `tokens` tokens takes in the model: all but the last predict their successors."""
    return max(1, tokens - 1)


def cost(lengths: np.ndarray) -> np.ndarray:
    """Cost of sequences of `lengths` positions, in positions without attention; float64.

    A layer of hidden size h has about 12 h^2 parameters, so a position takes 24 h^2 FLOPs forward, and 2 h S more for
    causal attention in a sequence of S: S (1 + S / (12 h)) in all (Narayanan et al. 2021, arXiv:2104.04473, appendix,
    with half of the attention for the causal mask). h is taken as 4,096.
    """
    return lengths * (1.0 + lengths / _EVEN_LENGTH)


def pack(
    lengths: Sequence[int], ranks: int, budget: int, *, align: int = 1, multiple_of: int = 1
) -> list[list[SampleIndices]]:
    """Spread samples of `lengths` positions over `ranks` data-parallel ranks in micro-batches, equally many on each.

    A micro-batch holds at most `budget` positions, each sequence counted up to a multiple of `align`, or a single
    longer sequence. Each rank has a multiple of `multiple_of` micro-batches, as an interleaved pipeline needs: the
    costliest are split, and empty ones added only where there are fewer samples than micro-batches.

    Micro-batches are dealt in rounds from the costliest down, each round one to a rank, the costliest to the rank with
    the least so far. So the ranks' totals differ by no more than the costs in some one round, and the ranks work on
    similar micro-batches at the same time, as expert parallelism needs. On a rank, costs rise and then fall: pipeline
    stages work on neighbouring micro-batches at once and wait for the costliest, and all wait for the first and last.
    """
    rounded = -(-np.asarray(lengths, np.int64) // align) * align
    costs = cost(rounded).tolist()
    step = ranks * multiple_of
    bins = _best_fit_decreasing(rounded, budget)
    count = max(1, -(-len(bins) // step)) * step
    ordered = sorted(_split(bins, costs, count), key=lambda weighed: -weighed[0])

    totals = [0.0] * ranks
    dealt: list[list[SampleIndices]] = [[] for _ in range(ranks)]
    for start in range(0, count, ranks):
        poorest_first = sorted(range(ranks), key=totals.__getitem__)
        for rank, (total, indices) in zip(poorest_first, ordered[start : start + ranks], strict=True):
            totals[rank] += total
            dealt[rank].append(tuple(indices))
    return [[*falling[::-2], *falling[len(falling) % 2 :: 2]] for falling in dealt]


def _best_fit_decreasing(lengths: np.ndarray, budget: int) -> list[list[int]]:
    """Indices by bin: the longest first, each into the bin with the least room that takes it."""
    order = np.argsort(-lengths, kind="stable")
    bins: list[list[int]] = []
    rooms: list[int] = []  # room and number of the bins with room left, in one integer, ascending
    for index, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        at = bisect_left(rooms, length * len(lengths))
        if at < len(rooms):
            room, number = divmod(rooms.pop(at), len(lengths))
        else:
            room, number = budget, len(bins)
            bins.append([])
        bins[number].append(index)
        if room > length:
            insort(rooms, (room - length) * len(lengths) + number)
    return bins


def _split(bins: list[list[int]], costs: list[float], count: int) -> list[tuple[float, list[int]]]:
    """`count` bins with their costs: the costliest that can be split are split, then empty ones are added."""
    whole = [(sum(costs[index] for index in indices), indices) for indices in bins]
    heap = [(-total, number) for number, (total, indices) in enumerate(whole) if len(indices) > 1]
    heapq.heapify(heap)
    while heap and len(whole) < count:
        number = heapq.heappop(heap)[1]
        halves: list[list[int]] = [[], []]
        totals = [0.0, 0.0]
        for index in whole[number][1]:  # the longest first
            lighter = int(totals[1] < totals[0])
            halves[lighter].append(index)
            totals[lighter] += costs[index]
        whole[number] = (totals[0], halves[0])
        whole.append((totals[1], halves[1]))
        for half in (number, len(whole) - 1):
            if len(whole[half][1]) > 1:
                heapq.heappush(heap, (-whole[half][0], half))
    return whole + [(0.0, [])] * (count - len(whole))


def collate(columns: Columns, indices: SampleIndices, align: int = 1, total: int = 1) -> dict[str, Any]:
    """One micro-batch: the samples `indices`, one after the other in T positions.

    A sample of S tokens takes S - 1 positions, at least 1, padded with zeros to a multiple of `align`; T is a multiple
    of both `align` and `total`, if need be by a last sequence of padding alone, which is all of an empty micro-batch.

    Returns `token_ids`, `labels` (the next token) and `position_ids` int64 [1, T]; each other column float32 [T],
    that of label i at position i; `sequence` int64 [T], the place in `indices` of the sample that position i predicts
    a token of, -1 in padding; `cu_seqlens` int32, the bounds of the sequences, padding included; `max_seqlen`, an int,
    the longest of them. ValueError where `loss_mask` includes a sample's first token: nothing predicts it.
    """
    samples = [columns["token_ids"][index] for index in indices]
    for index in indices if "loss_mask" in columns else ():
        if columns["loss_mask"][index][0] != 0:
            raise ValueError(f"sample {index}: its first token is in the loss mask, but no token precedes it")
    sizes = [-(-positions(len(sample)) // align) * align for sample in samples]
    whole = lcm(align, total)
    padding = -sum(sizes) % whole or (0 if sizes else whole)
    if padding:
        sizes.append(padding)
    starts = np.cumsum([0, *sizes])
    length = int(starts[-1])

    packed: dict[str, Any] = {name: np.zeros(length, np.float32) for name in columns if name != "token_ids"}
    token_ids, labels = np.zeros((2, 1, length), np.int64)
    sequence: np.ndarray = np.full(length, -1, np.int64)
    for place, (index, sample, start) in enumerate(zip(indices, samples, starts.tolist(), strict=False)):
        filled = slice(start, start + len(sample) - 1)
        token_ids[0, filled] = sample[:-1]
        labels[0, filled] = sample[1:]
        sequence[filled] = place
        for name in packed:
            packed[name][filled] = columns[name][index][1:]
    return packed | {
        "token_ids": token_ids,
        "labels": labels,
        "position_ids": (np.arange(length) - np.repeat(starts[:-1], sizes))[None],
        "sequence": sequence,
        "cu_seqlens": starts.astype(np.int32),
        "max_seqlen": max(sizes),
    }


def context_slice(cu_seqlens: np.ndarray, cp: int, cp_rank: int) -> np.ndarray:
    """Positions that a context-parallel rank keeps, int64 [T / cp], in the order that TransformerEngine expects.

    Each sequence is cut into 2 cp chunks, of which rank r keeps r and 2 cp - 1 - r: under a causal mask all ranks then
    have the same work. `cu_seqlens` as from `collate`; ValueError where a sequence is no multiple of 2 cp.
    """
    kept = []
    for start, end in pairwise(cu_seqlens.tolist()):
        chunk, rest = divmod(end - start, 2 * cp)
        if rest:
            raise ValueError(f"a sequence of {end - start} positions cannot be cut into 2 x {cp} chunks")
        kept += [np.arange(start + n * chunk, start + (n + 1) * chunk) for n in (cp_rank, 2 * cp - 1 - cp_rank)]
    return np.concatenate(kept)


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


def make_micro_batches(config: Config, columns: Columns, device: torch.device) -> list[MicroBatch]:
    """Pack samples into this rank's micro-batches; no collective, since every rank makes the same plan.

    Predictions are requested where the column `loss_mask` is not 0.
    """
    parallel = config.parallel
    lengths = [len(token_ids) for token_ids in columns["token_ids"]]
    plan = pack(
        [positions(length) for length in lengths],
        parallel_state.get_data_parallel_world_size(),
        config.train.tokens_per_micro_batch * parallel.cp,
        align=alignment(config)[0],
        multiple_of=parallel.pp if parallel.vpp > 1 else 1,
    )
    starts = np.cumsum([0, *lengths[:-1]])  # of all samples' tokens laid end to end
    cp, cp_rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    def micro_batch(indices: SampleIndices) -> MicroBatch:
        packed = collate(columns, indices, *alignment(config))
        cu_seqlens, sequence = packed["cu_seqlens"], packed["sequence"]
        kept = context_slice(cu_seqlens, cp, cp_rank) if cp > 1 else np.arange(cu_seqlens[-1])
        positions = np.flatnonzero(packed["loss_mask"][kept])
        chosen = kept[positions]
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

    return [micro_batch(indices) for indices in plan[parallel_state.get_data_parallel_rank()]]
