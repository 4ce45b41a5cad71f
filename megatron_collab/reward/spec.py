"""The reward of a run, settled before it starts: its metrics, the formula of a turn's reward, malformed turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatron_collab.config import Resolved, RewardConfig
from megatron_collab.reward.metrics import ScoredMetric, scored_metrics
from megatron_collab.reward.multiturn import reward_function
from megatron_collab.types import Future, Reward


@dataclass(frozen=True)
class RewardSpec(Resolved):
    """How ended conversations are scored, by `metrics`, and what reward a turn gets for the scores of its futures.

    `malformed`: reward of a malformed turn, which ends its conversation; None: the conversation is played on.
    """

    metrics: Mapping[str, ScoredMetric]
    mode: str
    mode_options: Mapping[str, Any]
    malformed: float | None
    malformed_worst: bool

    @property
    def weights(self) -> dict[str, float]:
        return {name: metric.weight for name, metric in self.metrics.items()}

    @cached_property
    def formula(self) -> Callable[[Sequence[Future]], Reward]:
        """The reward of a turn from its scored futures."""
        clamp = {name: metric.clamp for name, metric in self.metrics.items() if metric.clamp is not None}
        return reward_function(self.mode, self.mode_options, self.weights, clamp)

    def played_on(self) -> RewardSpec:
        """The reward of conversations that a malformed turn or reward.mode=single_turn does not end."""
        return replace(self, malformed=None, mode="mr" if self.mode == "single_turn" else self.mode)


def reward_spec(reward: RewardConfig) -> RewardSpec:
    """Raises ConfigError naming the setting that is refused."""
    metrics, options = scored_metrics(reward), dict(reward.mode_options)
    return RewardSpec(metrics, reward.mode, options, reward.malformed, reward.malformed_worst)
