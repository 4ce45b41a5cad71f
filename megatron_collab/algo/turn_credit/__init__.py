"""How the rewards of a whole conversation become credits of its turns: reward.turn_credit, by name or class path.

`rollout.futures=0` trains whole conversations. Rules from papers are in the other files of this folder.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

from megatron_collab.settings import Extension, TrainingRewardConfig, build, lookup
from megatron_collab.settings.schema import TURN_CREDITS
from megatron_collab.types import EMPTY, Conversation, Task


@dataclass(frozen=True)
class Episode:
    """A played conversation of a group, with the reward of each of its turns.

    `rewards[t]`: those that users, tools and metrics of turns gave for `conversation.turns[t]`; the last includes the
    conversation's. Their sum is the value of the conversation. `turn_scores`: as in Future.
    """

    task: Task
    conversation: Conversation
    rewards: tuple[float, ...]
    turn_scores: Mapping[str, tuple[float, ...]] = EMPTY

    def returns(self, gamma: float) -> list[float]:
        """sum_{k >= t} gamma^(k-t) r_k of each turn t."""
        return [*accumulate(reversed(self.rewards), lambda following, r: r + gamma * following)][::-1]


@dataclass(frozen=True)
class Share:
    """A value that turns of a conversation share.

    `turns`: the indices of these turns, each with the factor by which its advantage is multiplied. Shares of a group
    with equal `peers` are compared with each other. If a turn has several shares, their advantages are added; a turn
    without a share is not trained.
    """

    value: float
    turns: Mapping[int, float]
    peers: str = ""


class TurnCredit(Extension, ABC):
    """Base of the rules that reward.turn_credit may name as package.module:Class.

    `rewards`: the value of a share is a reward that comes after its last turn, as a critic's estimator needs it; not a
    return. `compared`: a share says something only if it is compared with its peers. `own_rewards`: the value of a
    share is the reward of a single turn, from which algo.kl_in=reward would also subtract the KL of all that follows.
    An instance computes the shares of one group and keeps no state.
    """

    rewards: ClassVar[bool] = False
    compared: ClassVar[bool] = False
    own_rewards: ClassVar[bool] = False

    def __init__(self, options: Any, reward: TrainingRewardConfig) -> None:
        super().__init__(options)
        self.gamma = reward.turn_gamma

    @property
    def turn_metrics(self) -> Sequence[str]:
        """The metrics whose `turn_scores` it reads; the run is refused if they do not score turns."""
        return ()

    @abstractmethod
    def shares(self, episodes: Sequence[Episode]) -> Sequence[Sequence[Share]]:
        """The shares of each conversation of a group, which are compared with each other."""


def turn_credit_class(name: str) -> type[TurnCredit]:
    """The rule that reward.turn_credit=`name` is. Raises ConfigError."""
    kind: type[TurnCredit] = lookup(name, "reward.turn_credit", TURN_CREDITS, TurnCredit)
    return kind


def make_turn_credit(reward: TrainingRewardConfig) -> TurnCredit:
    """The rule reward.turn_credit with its options. Raises ConfigError."""
    kind = turn_credit_class(reward.turn_credit)
    return kind(build(kind.Options, reward.turn_credit_options, "reward.turn_credit_options."), reward)


class Last(TurnCredit):
    """The sum of all rewards, for the last turn only."""

    rewards = True

    def shares(self, episodes: Sequence[Episode]) -> Sequence[Sequence[Share]]:
        return [[Share(sum(episode.rewards), {len(episode.rewards) - 1: 1.0})] for episode in episodes]


class Equal(TurnCredit):
    """The sum of all rewards, for all turns together: GRPO as in verl's multi-turn rollout."""

    rewards = True

    def shares(self, episodes: Sequence[Episode]) -> Sequence[Sequence[Share]]:
        return [[Share(sum(e.rewards), dict.fromkeys(range(len(e.rewards)), 1.0))] for e in episodes]


class Immediate(TurnCredit):
    """Each turn gets only its own reward.

    An estimator with a critic adds up the rewards itself. Without a critic, turns do not count for what follows them.
    """

    rewards = True

    def shares(self, episodes: Sequence[Episode]) -> Sequence[Sequence[Share]]:
        return [[Share(reward, {turn: 1.0}) for turn, reward in enumerate(e.rewards)] for e in episodes]


class RewardToGo(TurnCredit):
    """Turn t gets sum_{k >= t} gamma^(k-t) r_k, gamma = reward.turn_gamma, compared with all turns of the group."""

    def shares(self, episodes: Sequence[Episode]) -> Sequence[Sequence[Share]]:
        return [[Share(value, {t: 1.0}) for t, value in enumerate(e.returns(self.gamma))] for e in episodes]
