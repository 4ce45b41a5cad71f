"""Micro-batches: assigns samples to ranks and micro-batches and packs them end to end.

Shared prefixes of samples are packed once (prefix_tree.py). Planning is a pure function of tokens, lengths and masks,
so every rank computes the same plan and takes its part of it.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_collab.models.parallel_layout import alignment
from megatron_collab.trainer.megatron.paths import packing
from megatron_collab.trainer.prefix_tree import Tree, cost, pair_trees, plan_trees, positions
from megatron_collab.trainer.spec import NetworkSpec

# Per-sample arrays by name: token_ids int64 [S], routing as in Sample, all others float32 [S].
Columns = Mapping[str, Sequence[np.ndarray]]
Indices = tuple[int, ...]
Split = Callable[[int, int, int], list[range]]  # as mini_batches
Pack = Callable[..., "list[MicroBatch]"]  # as make_micro_batches


def pack(
    lengths: Sequence[int],
    ranks: int,
    budget: int,
    *,
    align: int = 1,
    multiple_of: int = 1,
    costs: Sequence[float] | None = None,
) -> list[list[Indices]]:
    """Spread samples of `lengths` positions over `ranks` data-parallel ranks in equally many micro-batches per rank.

    A micro-batch holds at most `budget` positions, each sequence rounded up to a multiple of `align`, or a single
    longer sequence; `costs` default to those of `cost`. Each rank gets a multiple of `multiple_of` micro-batches, as
    an interleaved pipeline needs: the costliest are split; empty ones are added only if there are fewer samples than
    micro-batches.

    Micro-batches are dealt in rounds from the costliest down, one to each rank per round, the costliest to the rank
    with the lowest total. So the ranks' totals differ by at most the spread of costs in a round, and the ranks process
    similar micro-batches at the same time, as expert parallelism needs. On a rank, costs rise and then fall: pipeline
    stages process neighboring micro-batches at once and wait for the costliest; all wait for the first and last.
    """
    rounded = -(-np.asarray(lengths, np.int64) // align) * align
    costs = cost(rounded).tolist() if costs is None else costs
    step = ranks * multiple_of
    bins = _best_fit_decreasing(rounded, budget)
    count = max(1, -(-len(bins) // step)) * step
    ordered = sorted(_split(bins, costs, count), key=lambda weighed: -weighed[0])

    totals = [0.0] * ranks
    dealt: list[list[Indices]] = [[] for _ in range(ranks)]
    for start in range(0, count, ranks):
        poorest_first = sorted(range(ranks), key=totals.__getitem__)
        for rank, (total, indices) in zip(poorest_first, ordered[start : start + ranks], strict=True):
            totals[rank] += total
            dealt[rank].append(tuple(indices))
    return [[*falling[::-2], *falling[len(falling) % 2 :: 2]] for falling in dealt]


def _best_fit_decreasing(lengths: np.ndarray, budget: int) -> list[list[int]]:
    """Indices per bin: longest first, each into the bin with the least sufficient room."""
    order = np.argsort(-lengths, kind="stable")
    bins: list[list[int]] = []
    rooms: list[int] = []  # (room, number) of the bins with room, encoded in one integer, ascending
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


def _split(bins: list[list[int]], costs: Sequence[float], count: int) -> list[tuple[float, list[int]]]:
    """`count` bins with their costs: splits the costliest bins that can be split, then adds empty ones."""
    weighed = [(sum(costs[index] for index in indices), indices) for indices in bins]
    heap = [(-total, number) for number, (total, indices) in enumerate(weighed) if len(indices) > 1]
    heapq.heapify(heap)
    while heap and len(weighed) < count:
        number = heapq.heappop(heap)[1]
        halves: list[list[int]] = [[], []]
        totals = [0.0, 0.0]
        for index in weighed[number][1]:  # the longest first
            lighter = int(totals[1] < totals[0])
            halves[lighter].append(index)
            totals[lighter] += costs[index]
        weighed[number] = (totals[0], halves[0])
        weighed.append((totals[1], halves[1]))
        for half in (number, len(weighed) - 1):
            if len(weighed[half][1]) > 1:
                heapq.heappush(heap, (-weighed[half][0], half))
    return weighed + [(0.0, [])] * (count - len(weighed))


@dataclass(frozen=True)
class Packed:
    """Trees packed end to end into T positions; every branch is contiguous.

    `token_ids` and `position_ids` int64 [1, T] (padding: token 0, positions from 0); `cu_seqlens` int32 [B + 1]: bounds
    of the branches, padding included; `keys` int64 per branch: positions of its path from the root to its own end;
    `rows` int64 per sample, in the order of the trees: the positions that predict its tokens except the first.
    """

    token_ids: np.ndarray
    position_ids: np.ndarray
    cu_seqlens: np.ndarray
    keys: tuple[np.ndarray, ...]
    rows: tuple[np.ndarray, ...]


def collate(token_ids: Sequence[np.ndarray], trees: Sequence[Tree], align: int = 1, total: int = 1) -> Packed:
    """Pack the samples of `trees` into one micro-batch; shared prefixes are packed once.

    A sample of S tokens takes S - 1 positions, at least 1, padded with zeros to a multiple of `align`; if `align` > 1,
    nothing is shared. T is a multiple of both `align` and `total`; if necessary a last branch of padding is added,
    which is the only branch of an empty micro-batch.
    """
    ids, depths, keys, rows = list[np.ndarray](), list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    length = 0
    for tree in trees:
        path = np.arange(0)
        for index, shared in zip(tree.samples, tree.shared, strict=True):
            inputs = token_ids[index][:-1]
            new_positions = -(-positions(len(token_ids[index])) // align) * align - shared
            path = np.concatenate([path[:shared], np.arange(length, length + new_positions)])
            rows.append(path[: len(inputs)])
            if new_positions:
                ids.append(np.pad(inputs[shared:], (0, shared + new_positions - len(inputs))))
                depths.append(np.arange(shared, shared + new_positions))
                keys.append(path)
            length += new_positions
    multiple = lcm(align, total)
    padding = -length % multiple or (0 if length else multiple)
    if padding:
        ids.append(np.zeros(padding, np.int64))
        depths.append(np.arange(padding))
        keys.append(np.arange(length, length + padding))
    return Packed(
        token_ids=np.concatenate(ids).astype(np.int64)[None],
        position_ids=np.concatenate(depths)[None],
        cu_seqlens=np.cumsum([0, *map(len, ids)]).astype(np.int32),
        keys=tuple(keys),
        rows=tuple(rows),
    )


def context_slice(cu_seqlens: np.ndarray, cp: int, cp_rank: int) -> np.ndarray:
    """Positions that a context-parallel rank keeps, int64 [T / cp], in the order that TransformerEngine expects.

    Each sequence is cut into 2 cp chunks, of which rank r keeps r and 2 cp - 1 - r, so that all ranks have equal work
    under a causal mask. `cu_seqlens` as from `collate`. Raises ValueError if a length is no multiple of 2 cp.
    """
    chunks = []
    for start, end in pairwise(cu_seqlens.tolist()):
        chunk, remainder = divmod(end - start, 2 * cp)
        if remainder:
            raise ValueError(f"a sequence of {end - start} positions cannot be cut into 2 x {cp} chunks")
        chunks += [np.arange(start + n * chunk, start + (n + 1) * chunk) for n in (cp_rank, 2 * cp - 1 - cp_rank)]
    return np.concatenate(chunks)


@dataclass(frozen=True)
class MicroBatch:
    """Sequences on this rank's device, `packed` into T positions, shared prefixes once; N predictions are requested.

    `token_ids` and `position_ids` are int64 [1, T]. For each requested prediction: `positions` (its index in T),
    `labels` (the token it predicts) and `sequence` (its sample's number within the micro-batch), int64 [N]; `columns`
    float32 [N] by name; `token_index` the token's index in the concatenated tokens of all samples. `members`: each
    sequence's number among all samples. `routing` as for PolicyModel; a shared position has the routing of its first
    sample. `teacher_states`: the teacher's states [N, h'] for the predictions, if algo.teacher needs them.
    """

    token_ids: Tensor
    position_ids: Tensor
    packed: PackedSeqParams
    positions: Tensor
    labels: Tensor
    sequence: Tensor
    columns: dict[str, Tensor]
    token_index: np.ndarray
    members: Indices
    routing: Tensor | None = None
    teacher_states: Tensor | None = None

    @property
    def samples(self) -> int:
        """Number of sequences."""
        return len(self.members)


@dataclass(frozen=True)
class Predictions:
    """The N requested predictions of a micro-batch; for the fields see MicroBatch."""

    positions: np.ndarray
    labels: np.ndarray
    sequence: np.ndarray
    columns: dict[str, np.ndarray]
    token_index: np.ndarray


def requested(columns: Columns, samples: Sequence[int], rows: Sequence[np.ndarray], place: np.ndarray) -> Predictions:
    """The predictions of `samples` whose column `loss_mask` is not 0, sample by sample.

    `rows` as from `collate`; `place` int64 [T]: index of a position on this rank, -1 if it is on another. Several
    samples may request predictions at a position that they share, each of its own next token. Raises ValueError if
    `loss_mask` includes a sample's first token, which nothing predicts.
    """
    starts = np.cumsum([0, *map(len, columns["token_ids"])])  # offsets of the samples in their concatenated tokens
    tokens = []
    for index, sample_rows in zip(samples, rows, strict=True):
        trained = np.flatnonzero(columns["loss_mask"][index])
        if len(trained) and trained[0] == 0:
            raise ValueError(f"sample {index}: its first token is in the loss mask, but no token precedes it")
        tokens.append(trained[place[sample_rows[trained - 1]] >= 0])

    def column(name: str, dtype: type) -> np.ndarray:
        values = [columns[name][index][chosen] for index, chosen in zip(samples, tokens, strict=True)]
        return np.concatenate([np.zeros(0), *values]).astype(dtype)

    sequence: np.ndarray = np.repeat(np.arange(len(samples)), [len(chosen) for chosen in tokens])
    predicted = [place[sample_rows[chosen - 1]] for sample_rows, chosen in zip(rows, tokens, strict=True)]
    return Predictions(
        positions=np.concatenate([np.arange(0), *predicted]),
        labels=column("token_ids", np.int64),
        sequence=sequence,
        columns={name: column(name, np.float32) for name in columns if name != "token_ids"},
        token_index=np.concatenate(
            [np.arange(0), *(starts[i] + chosen for i, chosen in zip(samples, tokens, strict=True))]
        ),
    )


def replayed(routing: Sequence[np.ndarray], samples: Sequence[int], packed: Packed) -> np.ndarray:
    """The experts of each position, int16 [T, layers * experts per token], from the column `routing` of `samples`.

    A shared position has the experts of its first sample; padding has -1.
    """
    experts: np.ndarray = np.full((packed.token_ids.shape[1], routing[0].shape[1]), -1, np.int16)
    for index, sample_rows in reversed(list(zip(samples, packed.rows, strict=True))):
        experts[sample_rows] = routing[index][: len(sample_rows)]
    return experts


def mini_batches(count: int, parts: int, unit: int = 1) -> list[range]:
    """Cut rows 0 to `count` into at most `parts` consecutive ranges of nearly equal numbers of whole units."""
    units = count // unit
    bounds = (unit * np.linspace(0, units, min(parts, units) + 1).round().astype(int)).tolist()
    return [range(start, end) for start, end in pairwise(bounds)]


def make_micro_batches(
    network: NetworkSpec, tokens: int, columns: Columns, device: torch.device, pairs: bool = False
) -> list[MicroBatch]:
    """Pack samples into this rank's micro-batches; no collective, since every rank computes the same plan.

    `tokens`: budget of a micro-batch on a rank. Requests predictions for tokens whose `loss_mask` is not 0. The column
    `routing` is optional. `pairs`: samples 2 k and 2 k + 1 stay together in this order, so that samples 2 k and 2 k + 1
    of a micro-batch are a pair.
    """
    routing = columns.get("routing")
    columns = {name: rows for name, rows in columns.items() if name != "routing"}
    parallel = network.parallel
    multiple_of = parallel.pp if parallel.vpp > 1 else 1
    ranks = parallel_state.get_data_parallel_world_size()
    budget = tokens * parallel.cp
    align, total = alignment(parallel, network.model)
    targets = [int(np.count_nonzero(mask)) for mask in columns["loss_mask"]]
    if pairs:
        trees = pair_trees(columns["token_ids"], targets, align=align)
    else:
        trees = plan_trees(columns["token_ids"], targets, budget, ranks * multiple_of, align=align)
    plan = pack(
        [int(tree.sizes[-1]) for tree in trees],
        ranks,
        budget,
        costs=[float(tree.costs[-1]) for tree in trees],
        multiple_of=multiple_of,
    )
    return [
        _micro_batch([trees[index] for index in indices], columns, routing, (align, total), device)
        for indices in plan[parallel_state.get_data_parallel_rank()]
    ]


def make_local_micro_batches(
    network: NetworkSpec, tokens: int, columns: Columns, device: torch.device
) -> list[MicroBatch]:
    """As `make_micro_batches`, but `columns` are this rank's sequences, all of which stay on it; collective.

    All data-parallel ranks get as many micro-batches as the one that needs most.
    """
    align, total = alignment(network.parallel, network.model)
    budget = tokens * network.parallel.cp
    targets = [int(np.count_nonzero(mask)) for mask in columns["loss_mask"]]
    trees = plan_trees(columns["token_ids"], targets, budget, 1, align=align)
    lengths, costs = [int(tree.sizes[-1]) for tree in trees], [float(tree.costs[-1]) for tree in trees]
    parts = network.parallel.pp if network.parallel.vpp > 1 else 1
    (plan,) = pack(lengths, 1, budget, costs=costs, multiple_of=parts)
    most = torch.tensor(len(plan), device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX, parallel_state.get_data_parallel_group())
    (plan,) = pack(lengths, 1, budget, costs=costs, multiple_of=int(most))
    return [
        _micro_batch([trees[index] for index in indices], columns, None, (align, total), device) for indices in plan
    ]


def _micro_batch(
    trees: Sequence[Tree],
    columns: Columns,
    routing: Sequence[np.ndarray] | None,
    multiples: tuple[int, int],
    device: torch.device,
) -> MicroBatch:
    """The micro-batch of `trees` on this rank's device; `multiples`: `align` and `total` of `collate`."""
    cp, cp_rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    samples = tuple(sample for tree in trees for sample in tree.samples)
    packed = collate(columns["token_ids"], trees, *multiples)
    length = packed.token_ids.shape[1]
    local = context_slice(packed.cu_seqlens, cp, cp_rank) if cp > 1 else np.arange(length)
    place: np.ndarray = np.full(length, -1)
    place[local] = np.arange(len(local))
    predictions = requested(columns, samples, packed.rows, place)
    return MicroBatch(
        token_ids=tensor(packed.token_ids[:, local]),
        position_ids=tensor(packed.position_ids[:, local]),
        packed=packing(packed.cu_seqlens, packed.keys, device),
        positions=tensor(predictions.positions),
        labels=tensor(predictions.labels),
        sequence=tensor(predictions.sequence),
        columns={name: tensor(values) for name, values in predictions.columns.items()},
        token_index=predictions.token_index,
        members=samples,
        routing=None if routing is None else tensor(replayed(routing, samples, packed)[local]),
    )
