"""Advantages of whole turns from a critic's values at their beginnings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_collab.algo.advantages import Advantage, Estimates, Rows, gae, rewards_of, whitened
from megatron_collab.types import Sample


class TurnGae(Advantage):
    """A_h = d_h + gamma lambda A_{h+1}, d_h = r_h + gamma V(s_{h+1}) - V(s_h), for the turns h of a conversation.

    Turn-PPO (Li et al. 2025, arXiv:2512.17008): a turn is one action. Its state s_h is everything before it; V(s_h) is
    the critic's value at the turn's first token. The tokens of a turn share its advantage. r_h is the turn's reward
    less its KL penalty: use reward.turn_credit=immediate. V and A are 0 after the last turn. Advantages are normalized
    over the batch's tokens, as in `gae`. The critic's target is A_h + V(s_h) at all tokens of the turn, so that it
    learns the same value from more positions; the paper has one state for each turn.
    """

    critic = True

    def estimate(self, samples: Sequence[Sample], costs: Rows, values: Rows | None) -> Estimates:
        assert values is not None
        advantages, returns = list[np.ndarray](), list[np.ndarray]()
        for sample, cost, value in zip(samples, costs, values, strict=True):
            starts, lengths = turns_of(sample)
            rewards = np.add.reduceat(rewards_of(sample) - cost, starts)
            turn_advantages = gae(rewards, value[starts], self.algo.gamma, self.algo.gae_lambda)
            advantages.append(np.repeat(turn_advantages, lengths))
            returns.append(np.repeat(turn_advantages + value[starts], lengths))
        return Estimates(whitened(advantages), returns)


def turns_of(sample: Sample) -> tuple[np.ndarray, np.ndarray]:
    """Of each turn, the index of its first token among the trained tokens of the sample, and its length: int64 [H]."""
    spans = sorted({span for credit in sample.credits for span in credit.spans})
    lengths = np.array([np.count_nonzero(sample.loss_mask[start:stop]) for start, stop in spans], np.int64)
    lengths = lengths[lengths > 0]  # a turn of closing marks only has no trained token
    return lengths.cumsum() - lengths, lengths
