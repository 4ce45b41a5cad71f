"""What a token counts for, against the two formulas."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_collab.algo.average import token_weights

MASKS = [np.array(mask, np.float32) for mask in ([0, 1, 1, 0, 1], [0, 0, 1], [0, 0])]


def test_by_token() -> None:
    weights = token_weights(MASKS, "token")
    assert [row.dtype for row in weights] == [np.float32] * 3
    for row, mask in zip(weights, MASKS, strict=True):
        np.testing.assert_allclose(row, mask / 4, rtol=1e-7)


def test_by_sequence() -> None:
    # Two sequences have trained tokens, three and one of them.
    first, second, third = token_weights(MASKS, "sequence")
    np.testing.assert_allclose(first, np.array([0, 1, 1, 0, 1]) / 6, rtol=1e-6)
    np.testing.assert_allclose(second, [0, 0, 0.5])
    assert third.tolist() == [0, 0]


@pytest.mark.parametrize("average", ["token", "sequence"])
def test_nothing_to_train_is_refused(average: str) -> None:
    with pytest.raises(ValueError, match="no trained token"):
        token_weights([np.zeros(3, np.float32)], average)
