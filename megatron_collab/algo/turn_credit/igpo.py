"""IGPO: rewards of all turns of a group are compared with each other, and each counts for the turns up to it.

Wang et al. 2025, Information Gain-based Policy Optimization, arXiv:2510.14967, section 3. The rewards of its turns are
those of the metric information_gain.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_collab.algo.turn_credit import Episode, Share, TurnCredit


class Igpo(TurnCredit):
    """A_t = sum_{k >= t} gamma^(k-t) (r_k - mean(r)) / std(r), mean and std over all turns of the group.

    gamma is reward.turn_gamma. r_k is the gain of turn k and the rest of its rewards, of the last turn the outcome's,
    which the paper normalizes together with the gains. std is 1 with algo.advantage=dr_grpo.
    """

    compared = True
    own_rewards = True

    def shares(self, episodes: Sequence[Episode]) -> Sequence[Sequence[Share]]:
        return [
            [Share(r, {t: self.gamma ** (k - t) for t in range(k + 1)}) for k, r in enumerate(episode.rewards)]
            for episode in episodes
        ]
