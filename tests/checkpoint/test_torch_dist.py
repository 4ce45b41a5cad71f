"""A range of elements of a row-major tensor, cut into rectangles."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_collab.checkpoint.torch_dist import rectangles


@pytest.mark.parametrize("shape", [(7,), (5, 3), (1, 4), (4, 1), (3, 2, 4)])
def test_every_range_is_covered_once_and_in_order(shape: tuple[int, ...]) -> None:
    numbers = np.arange(np.prod(shape)).reshape(shape)
    for start in range(numbers.size + 1):
        for end in range(start, numbers.size + 1):
            pieces = list(rectangles(start, end, shape))
            parts = [
                numbers[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
                for offsets, sizes in pieces
            ]
            assert all(part.shape == sizes for part, (_, sizes) in zip(parts, pieces, strict=True))
            assert [int(n) for part in parts for n in part.ravel()] == list(range(start, end))
            assert len(pieces) <= 2 * len(shape) - 1
