"""GiGPO: turns are also compared with turns of other conversations at the same state.

Feng et al. 2025, Group-in-Group Policy Optimization for LLM Agent Training, arXiv:2505.10978, section 4.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_collab.algo.turn_credit import Episode, Share, TurnCredit
from megatron_collab.settings import option


class GiGpo(TurnCredit):
    """A_t = A_E + omega A_S: A_E compares the sums of rewards of the group's conversations, A_S the discounted returns
    R_t = sum_{k >= t} gamma^(k-t) r_k of all turns of the group at the same anchor state.

    A turn whose state occurs once has A_S = 0. gamma is reward.turn_gamma, 0.95 in the paper. F_norm is the standard
    deviation with algo.advantage=grpo, 1 with dr_grpo, as the paper has it for hard tasks. The paper's states are what
    an environment shows; here the message that the turn answers, or all messages before it.
    """

    compared = True

    @dataclass(frozen=True)
    class Options:
        omega: float = option(1.0, "weight of the advantage within a state", ge=0, le=1000)
        state: str = option(
            "message", "what the policy answers: a message, or the history", choices=("message", "history")
        )

    def shares(self, episodes: Sequence[Episode]) -> Sequence[Sequence[Share]]:
        return [
            [
                Share(sum(episode.rewards), dict.fromkeys(range(len(episode.rewards)), 1.0)),
                *(
                    Share(value, {turn: self.options.omega}, self._anchor(episode, turn))
                    for turn, value in enumerate(episode.returns(self.gamma))
                ),
            ]
            for episode in episodes
        ]

    def _anchor(self, episode: Episode, turn: int) -> str:
        position = episode.conversation.turn_positions[turn]
        first = max(position - 1, 0) if self.options.state == "message" else 0
        state = [(message.role, message.content) for message in episode.conversation.messages[first:position]]
        return hashlib.blake2b(repr(state).encode(), digest_size=8).hexdigest()
