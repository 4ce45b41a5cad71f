"""Settles the settings of a run once, before anything starts, into frozen, checked values for the parts of the run."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_collab.config import Config
from megatron_collab.inference.spec import ServingSpec
from megatron_collab.launch import server_specs
from megatron_collab.rollout.player import PlaySpec
from megatron_collab.rollout.spec import play_spec


@dataclass(frozen=True)
class RunSpec:
    """The settled settings of a run. `play` and `serving` are None if no conversation is played, in sft and dpo."""

    play: PlaySpec | None = None
    serving: ServingSpec | None = None


def resolve(config: Config, evaluates: bool = False) -> RunSpec:
    """The settled settings; again after Hub names are pinned. Raises ConfigError naming the setting that is refused.

    `evaluates`: the run is an evaluation, without a trainer.
    """
    if config.train.stage != "rl":
        return RunSpec()
    serving = server_specs.evaluation(config) if evaluates else server_specs.training(config)
    return RunSpec(play_spec(config), serving)
