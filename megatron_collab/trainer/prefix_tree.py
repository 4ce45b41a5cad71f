"""Groups samples that share a prefix into trees, so that shared positions are computed once. Pure functions.

If samples are sorted by their tokens, the prefix that one shares with any later sample is also in the next. So a tree
is a list of samples, each with the number of positions that it shares with the previous one: it follows the path of
that sample so far, and the remainder is a separate branch, which may be empty (the same sequence twice).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

# Length at which attention costs as much as the other parts of a layer: 12 times a hidden size of 4,096; see `cost`.
_EVEN_LENGTH = 12 * 4096
# Minimum length of a shared prefix, in positions and as a fraction of the sample: every branch is another call of
# attention, and the keys of its whole path are gathered for it.
FEWEST, PART = 16, 1 / 16
# Maximum number of gathered keys per computed position of a tree: their memory is then small compared to that of the
# feed-forward network of a layer.
KEYS = 8


def positions(tokens: int) -> int:
    """Positions of a sample of `tokens` tokens in the model: every token but the last predicts its successor."""
    return max(1, tokens - 1)


def cost(lengths: np.ndarray) -> np.ndarray:
    """Cost of sequences of `lengths` positions, in units of a position without attention; float64.

    A layer of hidden size h has about 12 h^2 parameters, so a position takes 24 h^2 FLOPs forward, plus 2 h S for
    causal attention in a sequence of S: S (1 + S / (12 h)) in total (Narayanan et al. 2021, arXiv:2104.04473, appendix,
    with half of the attention for the causal mask). h is taken as 4,096.
    """
    return lengths * (1.0 + lengths / _EVEN_LENGTH)


@dataclass(frozen=True)
class Tree:
    """Samples that go through the model together, sorted by their tokens.

    Per sample: its number, `lengths` (positions), `shared` (positions in common with the previous sample, 0 for the
    first) and `targets` (requested predictions).
    """

    samples: tuple[int, ...]
    lengths: tuple[int, ...]
    shared: tuple[int, ...]
    targets: tuple[int, ...]

    @property
    def sizes(self) -> np.ndarray:
        """Size of the first 1, 2, … samples in a micro-batch, int64.

        The number of computed positions of all branches, but at least the number of predictions (each needs a state
        of the head) and 1 / KEYS of the gathered keys. The size of a single sample is its length.
        """
        lengths = np.cumsum(self.lengths)
        computed = lengths - np.cumsum(self.shared)
        return np.maximum.reduce([computed, np.cumsum(self.targets, dtype=np.int64), -(-lengths // KEYS)])

    @property
    def costs(self) -> np.ndarray:
        """`cost` of the first 1, 2, … samples, with branches that attend to their paths."""
        return np.cumsum(cost(np.array(self.lengths)) - cost(np.array(self.shared)))

    def cut(self, place: int) -> tuple[Tree, Tree]:
        """The samples before `place` and the others; both parts compute the prefix that they shared."""
        first = Tree(self.samples[:place], self.lengths[:place], self.shared[:place], self.targets[:place])
        shared = (0, *self.shared[place + 1 :])
        return first, Tree(self.samples[place:], self.lengths[place:], shared, self.targets[place:])


def plan_trees(
    token_ids: Sequence[np.ndarray], targets: Sequence[int], budget: int, parts: int, *, align: int = 1
) -> list[Tree]:
    """All samples in trees, each of at most `budget` (Tree.sizes) or of one longer sample.

    Trees are cut if they exceed the budget, and as long as one costs more than an even share for `parts` ranks or
    there are fewer than `parts` trees. Both parts of a cut compute the path to it. `align`: a sample's positions are
    rounded up to a multiple of it; if > 1, nothing is shared. Trees are sorted by their lowest sample number.
    """
    lengths = [-(-positions(len(row)) // align) * align for row in token_ids]
    if align > 1:
        trees = [Tree((number,), (length,), (0,), (targets[number],)) for number, length in enumerate(lengths)]
    else:
        trees = [part for tree in prefix_trees(token_ids, targets) for part in _fitted(tree, budget)]
    return sorted(_spread(trees, parts), key=lambda tree: min(tree.samples))


def pair_trees(token_ids: Sequence[np.ndarray], targets: Sequence[int], *, align: int = 1) -> list[Tree]:
    """Samples 2 k and 2 k + 1 in tree k, which is never cut; prefixes are shared as in `prefix_trees`.

    `align` as in `plan_trees`.
    """
    trees = []
    for first in range(0, len(token_ids), 2):
        numbers = (first, first + 1)
        lengths = tuple(-(-positions(len(token_ids[number])) // align) * align for number in numbers)
        common = _common(*(np.asarray(token_ids[number])[:-1] for number in numbers))
        shared = common if align == 1 and _matters(common, lengths[1], FEWEST) else 0
        trees.append(Tree(numbers, lengths, (0, shared), tuple(targets[number] for number in numbers)))
    return trees


def prefix_trees(token_ids: Sequence[np.ndarray], targets: Sequence[int], *, fewest: int = FEWEST) -> list[Tree]:
    """Trees of samples with a sufficient prefix (`fewest` positions, PART); `targets` as in Tree."""
    inputs = [np.asarray(row)[:-1].astype(">u4") for row in token_ids]  # big-endian: bytes sort like the numbers
    order = sorted(range(len(inputs)), key=lambda number: inputs[number].tobytes())
    trees: list[Tree] = []
    members: list[tuple[int, int]] = []

    def close() -> None:
        numbers, shared = zip(*members, strict=True)
        lengths = tuple(positions(len(token_ids[number])) for number in numbers)
        trees.append(Tree(numbers, lengths, shared, tuple(targets[number] for number in numbers)))

    for place, number in enumerate(order):
        shared = _common(inputs[order[place - 1]], inputs[number]) if place else 0
        if not _matters(shared, len(inputs[number]), fewest):
            if members:
                close()
            members, shared = [], 0
        members.append((number, shared))
    if members:
        close()
    return trees


def _matters(shared: int, length: int, fewest: int) -> bool:
    """Whether a prefix of `shared` positions is worth a branch, for a sample of `length` positions."""
    return shared >= max(fewest, PART * length)


def _common(first: np.ndarray, second: np.ndarray) -> int:
    """Length of the common prefix."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length


def _fitted(tree: Tree, budget: int) -> list[Tree]:
    """Cut `tree` into parts of at most `budget`, or of one longer sample.

    A part is filled to at least three quarters; beyond that it ends at the sample that shares least with its successor.
    """
    parts = []
    while (sizes := tree.sizes)[-1] > budget and len(sizes) > 1:
        last = max(1, int(np.searchsorted(sizes, budget, side="right")))
        first = min(last, int(np.searchsorted(4 * sizes, 3 * budget)) + 1)
        place = min(range(first, last + 1), key=lambda place: (tree.shared[place], -place))
        part, tree = tree.cut(place)
        parts.append(part)
    return [*parts, tree]


def _spread(trees: Sequence[Tree], parts: int) -> list[Tree]:
    """`trees`; halves the costliest while there are fewer than `parts` or it costs more than an even share."""
    numbers = count()
    heap = [(-float(tree.costs[-1]), next(numbers), tree) for tree in trees]
    heapq.heapify(heap)
    total, done = -sum(weighed for weighed, _, _ in heap), list[Tree]()
    while heap:
        weighed, _, tree = heapq.heappop(heap)
        enough = len(done) + len(heap) + 1 >= parts
        if len(tree.samples) == 1 or (enough and -weighed * parts <= total):
            done.append(tree)
            continue
        halves = tree.cut(_middle(tree))
        costs = [float(half.costs[-1]) for half in halves]
        total += sum(costs) + weighed
        for half_cost, half in zip(costs, halves, strict=True):
            heapq.heappush(heap, (-half_cost, next(numbers), half))
    return done


def _middle(tree: Tree) -> int:
    """Cut of `tree` that minimizes the cost of its costlier half."""
    costs = tree.costs
    behind = costs[-1] - costs[:-1] + cost(np.array(tree.shared[1:]))
    return int(np.maximum(costs[:-1], behind).argmin()) + 1
