"""The reward of a run, settled before it starts: its metrics, the formula of a turn's reward, malformed turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatron_collab.reward.metrics import ScoredMetric
from megatron_collab.reward.multiturn import reward_function
from megatron_collab.settings import EndpointConfig, Resolved
from megatron_collab.types import Future, Reward


@dataclass(frozen=True)
class RewardSpec(Resolved):
    """How ended conversations are scored, by `metrics`, and what reward a turn gets for the scores of its futures.

    `malformed`: reward of a malformed turn, which ends its conversation; None: the conversation is played on. `judge`:
    the model that judges. `workers` processes score, each `concurrency` times per metric at once; `timeout`: seconds of
    a score. `max_missing`: share of a step's rollouts that may have no reward, or of an evaluation's that may lack a
    score.
    """

    metrics: Mapping[str, ScoredMetric]
    mode: str
    mode_options: Mapping[str, Any]
    malformed: float | None
    malformed_worst: bool
    judge: EndpointConfig
    workers: int
    concurrency: int
    timeout: float
    max_missing: float

    @property
    def weights(self) -> dict[str, float]:
        return {name: metric.weight for name, metric in self.metrics.items()}

    @property
    def ground_truths(self) -> list[str]:
        """The metrics that facts decide."""
        return [name for name, metric in self.metrics.items() if metric.kind.ground_truth]

    @property
    def opinions(self) -> list[str]:
        """The metrics that a judge or a reward model decides."""
        metrics = {name: metric for name, metric in self.metrics.items() if not metric.kind.ground_truth}
        return [name for name, metric in metrics.items() if metric.judged or metric.kind.learned]

    @cached_property
    def formula(self) -> Callable[[Sequence[Future]], Reward]:
        """The reward of a turn from its scored futures."""
        clamp = {name: metric.clamp for name, metric in self.metrics.items() if metric.clamp is not None}
        return reward_function(self.mode, self.mode_options, self.weights, clamp)

    def played_on(self) -> RewardSpec:
        """The reward of conversations that a malformed turn or reward.mode=single_turn does not end."""
        return replace(self, malformed=None, mode="mr" if self.mode == "single_turn" else self.mode)
