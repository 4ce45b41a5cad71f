"""From the rewards of a group to the advantages of its rollouts."""

from __future__ import annotations

import numpy as np

EPSILON = 1e-6


def grpo(rewards_G: np.ndarray, epsilon: float = EPSILON) -> np.ndarray:
    """Group-relative advantages: (r_i - mean(r)) / (std(r) + epsilon), float64 [G].

    Outcome supervision of GRPO, with the population standard deviation (Shao et al. 2024, DeepSeekMath,
    arXiv:2402.03300, section 4.1.2). `epsilon` keeps a group without spread, whose advantages are all zero,
    from dividing by zero. Rollouts without a reward are left out before; ValueError on a reward that is no
    finite number.
    """
    rewards_G = np.asarray(rewards_G, np.float64)
    if not np.isfinite(rewards_G).all():
        raise ValueError(f"rewards must be finite numbers, not {rewards_G.tolist()}; leave out what has no reward")
    centred_G = rewards_G - rewards_G.mean()
    if np.ptp(rewards_G) == 0:  # the mean of equal floats may differ from them in the last bit
        return np.zeros_like(rewards_G)
    return centred_G / (rewards_G.std() + epsilon)
