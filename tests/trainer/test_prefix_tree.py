"""Samples as trees: shared prefixes, where trees are cut, their sizes and costs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_collab.trainer.microbatches import collate
from megatron_collab.trainer.prefix_tree import FEWEST, Tree, cost, pair_trees, plan_trees, positions, prefix_trees


def of(*parts: tuple[int, int]) -> np.ndarray:
    """Each token repeated `length` times."""
    return np.concatenate([np.full(length, token) for token, length in parts])


def trees_of(*samples: np.ndarray) -> list[Tree]:
    return prefix_trees(samples, [0] * len(samples))


def test_a_sequence_that_is_a_prefix_of_another() -> None:
    (tree,) = trees_of(of((1, 40), (2, 1)), of((1, 20), (2, 1)), of((1, 40), (2, 21)))
    assert (tree.samples, tree.lengths, tree.shared) == ((1, 0, 2), (20, 40, 60), (0, 20, 40))
    assert tree.sizes.tolist() == [20, 40, 60], "each goes on from the one before"


def test_the_same_sequence_twice() -> None:
    (tree,) = prefix_trees([of((1, 41))] * 3, [25, 25, 25])
    assert tree.shared == (0, 40, 40)
    assert tree.sizes.tolist() == [40, 50, 75], "predictions count where they are more than positions"


def test_short_prefixes_are_not_shared() -> None:
    assert [tree.samples for tree in trees_of(of((1, 9)), of((2, 9)), of((3, 1)), of((1, FEWEST - 1), (4, 9)))] == [
        (2,), (0,), (3,), (1,),
    ]  # fmt: skip
    long = of((1, 20), (2, 400))
    assert len(trees_of(long, of((1, 20), (3, 30)))) == 1, "of the shorter one, which comes after it, enough"
    assert len(trees_of(of((1, 20), (3, 30)), of((1, 20), (4, 400)))) == 2


def test_a_prefix_of_16_positions_and_a_sixteenth_of_the_sample_is_shared() -> None:
    def trees(shared: int, length: int) -> int:
        return len(trees_of(of((1, shared), (2, 5)), of((1, shared), (3, length - shared + 1))))

    assert (trees(16, 60), trees(15, 60)) == (1, 2)
    assert (trees(16, 256), trees(16, 257), trees(30, 480), trees(30, 481)) == (1, 2, 1, 2)


def test_a_tree_costs_the_positions_and_the_attention_of_its_branches() -> None:
    (tree,) = trees_of(of((1, 100), (2, 51)), of((1, 100), (3, 31)))
    assert tree.sizes[-1] == 180
    assert tree.costs[-1] == pytest.approx(cost(np.array(150)) + cost(np.array(130)) - cost(np.array(100)))


def test_gathered_keys_are_bounded() -> None:
    (tree,) = trees_of(*(of((1, 1000), (token, 2)) for token in range(2, 34)))
    assert tree.sizes[-1] == -(-32 * 1001 // 8) > 1000 + 32


def test_a_pair_is_one_tree_of_any_size() -> None:
    samples = [of((1, 40), (2, 5)), of((1, 40), (3, 9)), of((1, 4), (4, 5)), of((1, 4), (5, 900)), *[of((6, 30))] * 2]
    trees = pair_trees(samples, [5, 9, 5, 900, 1, 1])
    assert [(tree.samples, tree.shared) for tree in trees] == [((0, 1), (0, 40)), ((2, 3), (0, 0)), ((4, 5), (0, 29))]
    assert [int(tree.sizes[-1]) for tree in trees] == [52, 911, 29]
    aligned = pair_trees(samples, [5, 9, 5, 900, 1, 1], align=16)
    assert [(tree.lengths, tree.shared) for tree in aligned][:2] == [((48, 48), (0, 0)), ((16, 912), (0, 0))]


FUTURES = [of((1, 100), (rollout, 20), (10 + future, 41)) for rollout in range(2, 6) for future in range(3)]


def test_a_tree_above_the_budget_is_cut_at_the_shortest_shared_prefix() -> None:
    def cut(budget: int) -> list[tuple[int, ...]]:
        return [tree.samples for tree in plan_trees(FUTURES, [0] * 12, budget, 1)]

    assert cut(700) == [tuple(range(12))], "100 + 4 (20 + 3 40)"
    assert cut(400) == [(0, 1, 2, 3, 4, 5), (6, 7, 8, 9, 10, 11)], "380 each"
    assert cut(350) == [(0, 1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11)], "240 fills less than three quarters"
    assert cut(300) == [(0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11)], "280 with a fourth sample: not in two rollouts"
    assert cut(100) == [(number,) for number in range(12)], "each is longer"


def test_a_tree_of_equal_prefixes_is_cut_as_late_as_the_budget_allows() -> None:
    samples = [of((1, 100), (10 + number, 41)) for number in range(10)]
    trees = plan_trees(samples, [0] * 10, 300, 1)
    assert [tree.samples for tree in trees] == [(0, 1, 2, 3, 4), (5, 6, 7, 8, 9)], "100 + 5 40"


def test_trees_are_cut_for_more_ranks() -> None:
    def cut(parts: int) -> list[int]:
        return [len(tree.samples) for tree in plan_trees(FUTURES, [0] * 12, 10_000, parts)]

    assert cut(1) == [12] and cut(2) == [6, 6] and cut(4) == [3, 3, 3, 3] and cut(12) == [1] * 12 == cut(20)


def test_a_tree_above_an_even_share_is_cut_although_there_are_enough_trees() -> None:
    samples = [*FUTURES, *(of((100 + number, 30)) for number in range(4))]
    for parts, count in ((1, 5), (2, 6), (4, 8)):
        trees = plan_trees(samples, [0] * 16, 10_000, parts)
        costs = [float(tree.costs[-1]) for tree in trees]
        assert max(costs) <= sum(costs) / parts
        assert len(trees) == count, "four of one sample; the others in one tree, halves or quarters"


def test_context_parallel_ranks_share_nothing() -> None:
    trees = plan_trees(FUTURES, [0] * 12, 10_000, 1, align=4)
    assert [(tree.samples, tree.lengths) for tree in trees] == [((number,), (160,)) for number in range(12)]


@st.composite
def families(draw: st.DrawFn) -> list[np.ndarray]:
    """Samples that are continued from one another at random places."""
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    samples = [rng.integers(0, 2, 30)]
    for length in draw(st.lists(st.integers(1, 60), max_size=14)):
        other = samples[rng.integers(len(samples))]
        samples.append(np.concatenate([other[: rng.integers(len(other) + 1)], rng.integers(0, 2, length)]))
    return samples


@pytest.mark.seconds
@given(samples=families(), budget=st.integers(1, 200), parts=st.integers(1, 8))
def test_trees_contain_every_sample_and_its_prefix(samples: list[np.ndarray], budget: int, parts: int) -> None:
    trees = plan_trees(samples, [len(row) // 2 for row in samples], budget, parts)
    assert sorted(index for tree in trees for index in tree.samples) == list(range(len(samples)))
    assert len(trees) >= min(parts, len(samples))
    for tree in trees:
        assert tree.sizes[-1] <= budget or len(tree.samples) == 1
        packed = collate(samples, [tree])
        assert packed.token_ids.shape[1] == sum(tree.lengths) - sum(tree.shared) <= tree.sizes[-1]
        bounds = packed.cu_seqlens.tolist()
        for path, start, end in zip(packed.keys, bounds[:-1], bounds[1:], strict=True):
            np.testing.assert_array_equal(path[start - end :], np.arange(start, end))  # the last keys: its own
            np.testing.assert_array_equal(packed.position_ids[0, path], np.arange(len(path)))
        for index, rows in zip(tree.samples, packed.rows, strict=True):
            assert len(rows) == len(samples[index]) - 1 <= positions(len(samples[index]))
            np.testing.assert_array_equal(packed.token_ids[0, rows], samples[index][:-1])
            assert any(np.array_equal(path[: len(rows)], rows) for path in packed.keys) or not len(rows)
