"""Turn rewards and trajectory scores of UserRL (Qian et al. 2025, arXiv:2509.19736, section 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_collab.algo.turn_credit import Episode, Share, TurnCredit
from megatron_collab.settings import option


class UserRl(TurnCredit):
    """A_t = A c_t / mean(c), with A the advantage of the conversation's score and c_t the credit of turn t.

    The score is the mean of the rewards r_t (`sum`: the published code divides it by the number of turns) or
    sum_t gamma^t r_t (`r2g`). The credit is 1 (`equalized`), sum_{k >= t} gamma^(k-t) r_k (`r2g`), or
    1/2 + (1 - exp(-k r_t)) / (2 (1 - exp(-k))) (`em`, the exponential mapping). mean(c) is over the
    conversation's tokens with a credit above 0, as in the published code, so that A is the mean of their A_t; without
    such tokens all A_t are 0. gamma is reward.turn_gamma, 0.8 in the paper's code.

    The paper's rewards are in [0, 1]. A negative credit would flip the sign of A_t, or bring mean(c) close to 0, so a
    negative reward counts as 0 in credits, and in `em` a reward above 1 counts as 1. The score uses the rewards as they
    are. With `r2g`, therefore, nothing is learned from a conversation without a positive reward, as in the published
    code.

    `equalized` with `sum` differs from reward.turn_credit=equal in the division of the score by the number of turns.
    """

    compared = True

    @dataclass(frozen=True)
    class Options:
        turns: str = option("r2g", "credit of a turn", choices=("equalized", "r2g", "em"))
        trajectory: str = option("r2g", "score of a conversation", choices=("sum", "r2g"))
        k: float = option(2.0, "em: curvature", gt=0, le=100)

    def shares(self, episodes: Sequence[Episode]) -> Sequence[Sequence[Share]]:
        return [[self._share(episode)] for episode in episodes]

    def _share(self, episode: Episode) -> Share:
        returns, credits = episode.returns(self.gamma), self._credits(episode)
        score = returns[0] if self.options.trajectory == "r2g" else sum(episode.rewards) / len(returns)
        tokens = [turn.trained_tokens for turn in episode.conversation.turns]
        total = sum(credit * count for credit, count in zip(credits, tokens, strict=True))
        credited = sum(count for credit, count in zip(credits, tokens, strict=True) if credit)
        factors = [credit * credited / total if total else 0.0 for credit in credits]
        return Share(score, dict(enumerate(factors)))

    def _credits(self, episode: Episode) -> list[float]:
        """The credit c_t >= 0 of each turn."""
        rewards = tuple(max(reward, 0.0) for reward in episode.rewards)
        if self.options.turns == "r2g":
            return replace(episode, rewards=rewards).returns(self.gamma)
        if self.options.turns == "equalized":
            return [1.0] * len(rewards)
        k = self.options.k
        return [0.5 + math.expm1(-k * min(reward, 1.0)) / math.expm1(-k) / 2 for reward in rewards]
