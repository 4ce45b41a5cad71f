"""What each trained token counts for in the mean of the loss."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def token_weights(masks: Sequence[np.ndarray], average: str) -> list[np.ndarray]:
    """Weights, float32 [S] for each of the masks [S] of a mini-batch, so that its loss is sum(weight * token's loss).

    `masks` are 1 where a token is trained. They are those of the whole mini-batch, so the loss does not depend on how
    the sequences are packed, spread or cut. The weights add up to 1 and are 0 where nothing is trained.

    token     1 / T, T the trained tokens of all sequences (DAPO, arXiv:2503.14476, equation 8)
    sequence  1 / (B T_i), T_i the trained tokens of sequence i, B the sequences that have any (GRPO,
              arXiv:2402.03300, equation 3)

    ValueError where no token is trained.
    """
    tokens = np.array([mask.sum(dtype=np.float64) for mask in masks])
    if not tokens.any():
        raise ValueError("a mini-batch has no trained token; lower algo.mini_batches or look at the loss masks")
    shares = np.full(len(tokens), tokens.sum()) if average == "token" else np.count_nonzero(tokens) * tokens
    return [(mask / max(share, 1.0)).astype(np.float32) for mask, share in zip(masks, shares, strict=True)]
