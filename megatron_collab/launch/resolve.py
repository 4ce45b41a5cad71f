"""Settles the settings of a run once, before anything starts, into frozen, checked values for the parts of the run."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_collab.config import Config
from megatron_collab.rollout.player import PlaySpec
from megatron_collab.rollout.spec import play_spec


@dataclass(frozen=True)
class RunSpec:
    """The settled settings of a run. `play` is None if no conversation is played, in sft and dpo."""

    play: PlaySpec | None


def resolve(config: Config) -> RunSpec:
    """The settled settings; again after Hub names are pinned. Raises ConfigError naming the setting that is refused."""
    return RunSpec(play_spec(config) if config.train.stage == "rl" else None)
