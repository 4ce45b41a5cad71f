"""Plans of micro-batches, their packed arrays, and the part of them that a context-parallel rank keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_collab.config import Config
from megatron_collab.launch.trainer_specs import network_spec
from megatron_collab.trainer import microbatches
from megatron_collab.trainer.microbatches import (
    MicroBatch,
    collate,
    context_slice,
    make_micro_batches,
    pack,
    replayed,
    requested,
)
from megatron_collab.trainer.prefix_tree import Tree, cost, plan_trees, positions, prefix_trees


@pytest.mark.seconds
@given(
    lengths=st.lists(st.integers(1, 300), max_size=80),
    ranks=st.integers(1, 5),
    budget=st.integers(1, 600),
    align=st.sampled_from([1, 2, 8]),
    multiple_of=st.integers(1, 4),
)
def test_plan(lengths: list[int], ranks: int, budget: int, align: int, multiple_of: int) -> None:
    plan = pack(lengths, ranks, budget, align=align, multiple_of=multiple_of)
    micro_batches = [micro_batch for rank in plan for micro_batch in rank]
    rounded = [-(-length // align) * align for length in lengths]

    assert sorted(index for micro_batch in micro_batches for index in micro_batch) == list(range(len(lengths)))
    assert len(plan) == ranks
    (count,) = {len(rank) for rank in plan}
    assert count % multiple_of == 0 and count > 0
    for micro_batch in micro_batches:
        assert len(micro_batch) == 1 or sum(rounded[index] for index in micro_batch) <= budget
    assert sum(not micro_batch for micro_batch in micro_batches) == max(0, len(micro_batches) - len(lengths))

    costs = cost(np.array(rounded, dtype=np.int64))
    weights = [[sum(costs[index] for index in micro_batch) for micro_batch in rank] for rank in plan]
    totals = [sum(rank) for rank in weights]
    together = list(zip(*weights, strict=True))
    assert max(totals) - min(totals) <= max(max(alike) - min(alike) for alike in together) + 1e-6
    for alike, following in pairwise(sorted(together, key=lambda alike: (max(alike), min(alike)))):
        assert max(alike) <= min(following) + 1e-6, "ranks work on alike micro-batches at the same time"
    for rank in weights:
        peak = rank.index(max(rank))
        assert rank[: peak + 1] == sorted(rank[: peak + 1]) and rank[peak:] == sorted(rank[peak:], reverse=True)
    assert plan == pack(lengths, ranks, budget, align=align, multiple_of=multiple_of)


def test_plan_by_hand() -> None:
    assert pack([4, 6, 5, 5, 3], 1, 10) == [[(4,), (1, 0), (2, 3)]], "6 + 4 costs most: up to it and down again"
    assert pack([6, 3, 6, 4], 1, 10) == [[(2, 1), (0, 3)]], "4 goes where 6 leaves 4, 3 beside the other 6"
    assert pack([3, 3, 3], 1, 8, align=4) == [[(2,), (0, 1)]], "each counts as 4"
    assert pack([5, 4, 3], 3, 100) == [[(0,)], [(1,)], [(2,)]], "one would do, three ranks need three"


def test_too_few_micro_batches_are_split_evenly_the_costliest_first() -> None:
    """One bin would hold all: the costliest first, each to the half that costs less so far."""
    assert pack([1, 1, 1], 2, 3, costs=[3.0, 2.5, 2.5]) == [[(1, 2)], [(0,)]]
    assert pack([1] * 4, 3, 4, costs=[5.0, 4.0, 3.0, 3.0]) == [[(1, 2)], [(0,)], [(3,)]], "8 and 7, then 5, 3 and 7"
    assert pack([1] * 4, 3, 2, costs=[1.0, 1.0, 3.0, 3.0]) == [[(2,)], [(3,)], [(0, 1)]], "of two bins the costlier"


def test_few_micro_batches() -> None:
    """4,096 lognormal lengths: as few micro-batches as the sum of the lengths allows, within 1 %."""
    lengths = np.random.default_rng(0).lognormal(6.0, 0.8, 4096).round().clip(16, 8192).astype(int)
    assert np.ceil(lengths.sum() / 8192) / len(pack(lengths.tolist(), 1, 8192)[0]) >= 0.99


def test_attention_costs() -> None:
    """A sequence costs more than its halves, and at 12 x 4,096 positions twice what it would without attention."""
    assert cost(np.array([100])) > 2 * cost(np.array([50]))
    assert cost(np.array([49152])) == 2 * 49152


SAMPLES = [np.array([5, 6, 7]), np.array([1, 2, 3, 4, 5, 6]), np.array([9])]


def alone(*samples: int) -> list[Tree]:
    """One tree per sample: nothing is shared."""
    return [Tree((sample,), (positions(len(SAMPLES[sample])),), (0,), (0,)) for sample in samples]


def test_collate_by_hand() -> None:
    packed = collate(SAMPLES, alone(1, 0), align=4, total=16)
    assert packed.token_ids.tolist() == [[1, 2, 3, 4, 5, 0, 0, 0, 5, 6, 0, 0, 0, 0, 0, 0]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 0, 1, 2, 3]]
    assert [row.tolist() for row in packed.rows] == [[0, 1, 2, 3, 4], [8, 9]]
    assert [path.tolist() for path in packed.keys] == [[*range(8)], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert packed.cu_seqlens.tolist() == [0, 8, 12, 16] and packed.cu_seqlens.dtype == np.int32
    assert {packed.token_ids.dtype.str, packed.position_ids.dtype.str} == {"<i8"}


def test_collate_without_samples_or_predictions() -> None:
    empty = collate(SAMPLES, [], align=4, total=6)
    assert empty.cu_seqlens.tolist() == [0, 12] and empty.token_ids.tolist() == [[0] * 12] and empty.rows == ()
    single = collate(SAMPLES, alone(2))
    assert single.token_ids.tolist() == [[0]] and [row.tolist() for row in single.rows] == [[]]


def test_shared_prefixes_are_packed_once() -> None:
    tokens = [np.array([7, 8, 9, 1]), np.array([7, 8, 9, 2, 3]), np.array([7, 8, 5, 4])]
    (tree,) = prefix_trees(tokens, [1, 1, 1], fewest=1)
    packed = collate(tokens, [tree])
    assert (tree.samples, tree.shared) == ((2, 0, 1), (0, 2, 3))
    assert packed.token_ids.tolist() == [[7, 8, 5, 9, 2]] and packed.position_ids.tolist() == [[0, 1, 2, 2, 3]]
    assert [path.tolist() for path in packed.keys] == [[0, 1, 2], [0, 1, 3], [0, 1, 3, 4]]
    assert [row.tolist() for row in packed.rows] == [[0, 1, 2], [0, 1, 3], [0, 1, 3, 4]]
    assert packed.cu_seqlens.tolist() == [0, 3, 4, 5]

    masks = [np.array([0, 0, 0, 1.0]), np.array([0, 0, 0, 1.0, 1]), np.array([0, 0, 1.0, 0])]
    predictions = requested({"token_ids": tokens, "loss_mask": masks}, tree.samples, packed.rows, np.arange(5))
    assert predictions.positions.tolist() == [1, 3, 3, 4] and predictions.labels.tolist() == [5, 1, 2, 3]
    assert predictions.sequence.tolist() == [0, 1, 2, 2] and predictions.token_index.tolist() == [11, 3, 7, 8]


def test_positions_have_the_experts_of_their_samples() -> None:
    """Those of the first sample if they are shared; padding has none."""
    routing = [np.array([[1, 2], [3, 4], [5, 6]]), np.array([[1, 2], [7, 8], [9, 9], [0, 0]])]
    lonely = [np.array([7, 8, 9])]
    packed = collate(lonely, [Tree((0,), (2,), (0,), (0,))], total=4)
    assert replayed(routing[:1], (0,), packed).tolist() == [[1, 2], [3, 4], [-1, -1], [-1, -1]]
    tokens = [*lonely, np.array([7, 8, 5, 6])]
    packed = collate(tokens, [Tree((0, 1), (2, 3), (0, 2), (0, 0))])
    assert replayed(routing, (0, 1), packed).tolist() == [[1, 2], [3, 4], [9, 9]]


def test_a_first_token_cannot_be_trained() -> None:
    columns = {"token_ids": [np.array([5, 6])] * 2, "loss_mask": [np.array([0.0, 1.0]), np.ones(2)]}
    rows = [np.array([0]), np.array([1])]
    requested(columns, (0,), rows[:1], np.arange(2))
    with pytest.raises(ValueError, match="sample 1: its first token"):
        requested(columns, (0, 1), rows, np.arange(2))


@pytest.mark.seconds
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    align=st.sampled_from([1, 2, 4, 6]),
    total=st.sampled_from([1, 2, 16]),
    seed=st.integers(0, 1000),
)
def test_collate_loses_nothing(sizes: list[int], align: int, total: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(1, 1000, size) for size in sizes]
    values = [rng.normal(size=size).astype(np.float32) for size in sizes]
    columns = {"token_ids": tokens, "loss_mask": [np.arange(size) > 0 for size in sizes], "values": values}
    samples = rng.permutation(len(sizes))[: rng.integers(1, len(sizes) + 1)].tolist()
    packed = collate(
        tokens, [Tree((index,), (positions(sizes[index]),), (0,), (0,)) for index in samples], align, total
    )

    length = packed.token_ids.shape[1]
    assert length % align == 0 and length % total == 0 and packed.cu_seqlens[-1] == length
    for index, rows in zip(samples, packed.rows, strict=True):
        np.testing.assert_array_equal(packed.token_ids[0, rows], tokens[index][:-1])
    kept = np.concatenate(packed.rows)
    assert len({*kept.tolist()}) == len(kept) and np.count_nonzero(packed.token_ids) == len(kept), "padding is zero"
    spans = list(pairwise(packed.cu_seqlens.tolist()))
    assert len(spans) - len(samples) in (0, 1) and all(start < end for start, end in spans)
    assert all((end - start) % align == 0 for start, end in spans)
    restarted = np.concatenate([np.arange(end - start) for start, end in spans])
    np.testing.assert_array_equal(packed.position_ids, [restarted])

    predictions = requested(columns, samples, packed.rows, np.arange(length))
    np.testing.assert_array_equal(predictions.positions, kept)
    np.testing.assert_array_equal(predictions.labels, np.concatenate([tokens[index][1:] for index in samples]))
    np.testing.assert_array_equal(
        predictions.columns["values"], np.concatenate([values[index][1:] for index in samples])
    )
    np.testing.assert_array_equal(predictions.labels, np.concatenate(tokens)[predictions.token_index])


def test_a_plan_fits_its_micro_batches() -> None:
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, 9, size) for size in rng.integers(1, 50, 40)]
    trees = plan_trees(tokens, [0] * 40, 128, 1, align=4)
    for micro_batch in pack([int(tree.sizes[-1]) for tree in trees], 1, 128)[0]:
        assert collate(tokens, [trees[index] for index in micro_batch], align=4).token_ids.shape[1] <= 128


def test_context_slice_by_hand() -> None:
    cu_seqlens = np.array([0, 8, 12], np.int32)
    assert context_slice(cu_seqlens, 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert context_slice(cu_seqlens, 2, 1).tolist() == [2, 3, 4, 5, 9, 10]
    assert context_slice(cu_seqlens, 1, 0).tolist() == list(range(12))
    with pytest.raises(ValueError, match="4 positions"):
        context_slice(cu_seqlens, 4, 0)


@given(chunks=st.lists(st.integers(1, 5), min_size=1, max_size=6), cp=st.integers(1, 4))
def test_context_ranks_share_positions_and_work(chunks: list[int], cp: int) -> None:
    cu_seqlens = np.cumsum([0, *(2 * cp * chunk for chunk in chunks)]).astype(np.int32)
    slices = [context_slice(cu_seqlens, cp, rank) for rank in range(cp)]
    assert sorted(np.concatenate(slices).tolist()) == list(range(cu_seqlens[-1]))
    position = np.concatenate([np.arange(2 * cp * chunk) for chunk in chunks])
    assert len({position[kept].sum() for kept in slices}) == 1, "a query at position i sees i + 1 keys"


def micro_batches_of(
    columns: Mapping[str, Sequence[np.ndarray]],
    monkeypatch: pytest.MonkeyPatch,
    *,
    dp: int = 1,
    cp: int = 1,
    pairs: bool = False,
    budget: int = 64,
    pp: int = 1,
    vpp: int = 1,
) -> dict[tuple[int, int], list[MicroBatch]]:
    """Micro-batches by data parallel and context parallel rank."""
    config = Config()
    config.parallel.cp, config.parallel.pp, config.parallel.vpp = cp, pp, vpp
    state, by_rank = microbatches.parallel_state, {}
    monkeypatch.setattr(state, "get_data_parallel_world_size", lambda: dp)
    monkeypatch.setattr(state, "get_context_parallel_world_size", lambda: cp)
    for rank in np.ndindex(dp, cp):
        monkeypatch.setattr(state, "get_data_parallel_rank", lambda rank=rank: rank[0])
        monkeypatch.setattr(state, "get_context_parallel_rank", lambda rank=rank: rank[1])
        by_rank[rank] = make_micro_batches(network_spec(config), budget, columns, torch.device("cpu"), pairs)
    return by_rank


def random_columns(count: int, seed: int) -> dict[str, list[np.ndarray]]:
    """Samples of 2 to 60 tokens; every second begins like the one before, and tokens determine their experts."""
    rng = np.random.default_rng(seed)
    tokens: list[np.ndarray] = []
    for number, length in enumerate(rng.integers(2, 41, count)):
        begun = tokens[-1][:20] if number % 2 else np.zeros(0, int)
        tokens.append(np.concatenate([begun, rng.integers(1, 500, length)]))
    return {
        "token_ids": tokens,
        "loss_mask": [(np.arange(len(row)) > 0) * rng.integers(0, 2, len(row)).astype(np.float32) for row in tokens],
        "values": [rng.normal(size=len(row)).astype(np.float32) for row in tokens],
        "routing": [np.stack([row % 200, row % 7], 1).astype(np.uint8) for row in tokens],
    }


@pytest.mark.parametrize(("dp", "cp", "pp", "vpp"), [(1, 1, 1, 1), (2, 1, 2, 2), (3, 2, 1, 1), (1, 3, 2, 1)])
def test_ranks_predict_every_trained_token_once(
    dp: int, cp: int, pp: int, vpp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the previous token, at its position in the sample, on one of the ranks, with its values of the columns."""
    columns = random_columns(17, seed=dp + cp)
    flat = {name: np.concatenate(rows) for name, rows in columns.items()}
    sample = np.repeat(np.arange(17), list(map(len, columns["token_ids"])))
    depth = np.concatenate([np.arange(len(row)) for row in columns["token_ids"]])
    ranks = micro_batches_of(columns, monkeypatch, dp=dp, cp=cp, pp=pp, vpp=vpp)
    every = [micro_batch for rank in ranks.values() for micro_batch in rank]
    assert (
        sorted(np.concatenate([micro_batch.token_index for micro_batch in every]))
        == np.flatnonzero(flat["loss_mask"]).tolist()
    )
    (number,) = {len(rank) for rank in ranks.values()}
    assert number % (pp if vpp > 1 else 1) == 0
    computed = sum(micro_batch.token_ids.shape[1] for micro_batch in every)
    assert (computed < len(depth) - 17) == (cp == 1), "what samples share is computed once, but not with cp"
    for micro_batch in every:
        at, before = micro_batch.positions, micro_batch.token_index - 1
        assert micro_batch.token_ids.shape == micro_batch.position_ids.shape == (1, len(micro_batch.routing))
        np.testing.assert_array_equal(micro_batch.token_ids[0, at], flat["token_ids"][before])
        np.testing.assert_array_equal(micro_batch.position_ids[0, at], depth[before])
        np.testing.assert_array_equal(micro_batch.routing[at], flat["routing"][before])
        np.testing.assert_array_equal(micro_batch.labels, flat["token_ids"][micro_batch.token_index])
        assert micro_batch.columns.keys() == {"loss_mask", "values"}
        np.testing.assert_array_equal(micro_batch.columns["values"], flat["values"][micro_batch.token_index])
        pairs = set(zip(micro_batch.sequence.tolist(), sample[micro_batch.token_index].tolist(), strict=True))
        assert (
            len({number for number, _ in pairs})
            == len({index for _, index in pairs})
            == len(pairs)
            <= micro_batch.samples
        )


def test_virtual_stages_alone_need_a_multiple_of_the_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {"token_ids": [np.arange(9)], "loss_mask": [np.arange(9) > 0]}
    for vpp, count in ((1, 1), (2, 2)):
        (rank,) = micro_batches_of(columns, monkeypatch, pp=2, vpp=vpp).values()
        assert len(rank) == count


def test_context_parallel_ranks_fill_a_budget_each(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {"token_ids": [np.arange(9 * n, 9 * n + 9) for n in range(4)], "loss_mask": [np.arange(9) > 0] * 4}
    (alone,) = micro_batches_of(columns, monkeypatch, budget=16).values()
    assert [micro_batch.token_ids.shape[1] for micro_batch in alone] == [16, 16] and alone[0].routing is None
    for rank in micro_batches_of(columns, monkeypatch, budget=16, cp=2).values():
        assert [micro_batch.token_ids.shape[1] for micro_batch in rank] == [16]


def test_pairs_stay_together_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [np.full(4 + number, number + 1) for number in range(6)]
    columns = {"token_ids": tokens, "loss_mask": [np.arange(len(row)) > 0 for row in tokens]}
    pairs = []
    for rank in micro_batches_of(columns, monkeypatch, dp=2, pairs=True).values():
        for micro_batch in rank:
            numbers = dict(zip(micro_batch.sequence.tolist(), (micro_batch.labels - 1).tolist(), strict=True))
            pairs += [(numbers[k], numbers[k + 1]) for k in range(0, micro_batch.samples, 2)]
    assert sorted(pairs) == [(0, 1), (2, 3), (4, 5)]
