"""The user's next message is a local verdict on the turns before it.

The idea is that of FACA (arXiv:2608.17499), known here from a summary only: a segment of turns gets a local advantage
from the user's next turn, besides the advantage of the outcome. The formula is this project's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_collab.algo.turn_credit import Episode, Share, TurnCredit
from megatron_collab.settings import option


class NextUserTurn(TurnCredit):
    """A_t = A + weight A_L: A compares the values of conversations, A_L the verdicts on their segments.

    A segment is a reply with the tool calls before it. Its verdict is the score that the metric `verdict` gave its
    turns, e.g. `generative` with turns=reaction, which reads the user's answer to them. The verdict on the n-th segment
    is compared with those on the n-th segments of the group's other conversations, since these answer the user's n-th
    message too.
    """

    compared = True

    @dataclass(frozen=True)
    class Options:
        verdict: str = option("", "metric of reward.weights that scores turns; its weight may be 0")
        weight: float = option(1.0, "weight of the local advantage", ge=0, le=1000)

        def __post_init__(self) -> None:
            if not self.verdict:
                raise ValueError("verdict is not set; name a metric that scores turns")

    @property
    def turn_metrics(self) -> Sequence[str]:
        return (self.options.verdict,)

    def shares(self, episodes: Sequence[Episode]) -> Sequence[Sequence[Share]]:
        return [self._shares(episode) for episode in episodes]

    def _shares(self, episode: Episode) -> list[Share]:
        conversation, verdicts = episode.conversation, episode.turn_scores.get(self.options.verdict)
        shares = [Share(sum(episode.rewards), dict.fromkeys(range(len(episode.rewards)), 1.0))]
        segment: list[int] = []
        for turn, position in enumerate(conversation.turn_positions if verdicts else ()):
            segment.append(turn)
            if verdicts and not conversation.is_tool_call(position):
                value = sum(verdicts[at] for at in segment)
                number = len(shares)
                shares.append(Share(value, dict.fromkeys(segment, self.options.weight), f"segment {number}"))
                segment = []
        return shares
