"""Settles how the groups of a run are played, before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_collab.config import Config, EvaluateConfig, PlayConfig
from megatron_collab.config.schema import AssistantConfig
from megatron_collab.reward.spec import reward_spec
from megatron_collab.rollout.player import PlaySpec
from megatron_collab.rollout.tools.toolbox import tool_spec
from megatron_collab.rollout.users import UserDirectory


def play_spec(config: Config) -> PlaySpec:
    """How the groups of a training are played. Raises ConfigError naming the setting that is refused."""
    rollout = config.rollout
    experts_of = rollout.train_turns if rollout.routing_replay else None
    policy = {Path(config.model.path).name: None}
    return played(config, config.train.rollouts_per_prompt, policy, experts_of=experts_of)


def evaluation_play(config: EvaluateConfig) -> PlaySpec:
    """As `play_spec`; the number of rollouts is that of each set of data.eval."""
    assistant = config.assistant if config.assistant.model else None
    name = config.assistant.model or Path(config.model.path).name
    return played(config, 1, {name: None}, assistant=assistant)


def played(
    config: PlayConfig, rollouts: int, assistants: Mapping[str, AssistantConfig | None], **more: Any
) -> PlaySpec:
    """The part of `play_spec` that programs share; `more`: fields of PlaySpec."""
    return PlaySpec(
        config.run.seed,
        rollouts,
        config.rollout.player,
        dict(config.rollout.player_options),
        config.rollout,
        reward_spec(config.reward),
        UserDirectory(config),
        tool_spec(config.rollout),
        assistants,
        **more,
    )
