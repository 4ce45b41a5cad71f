"""Settles how the groups of a run are played, before it starts."""

from __future__ import annotations

from pathlib import Path

from megatron_collab.config import Config, read_prompt
from megatron_collab.data.assistants import assistant_configs
from megatron_collab.reward.spec import reward_spec
from megatron_collab.rollout.player import PlaySpec
from megatron_collab.rollout.tools.toolbox import tool_spec
from megatron_collab.rollout.users import UserDirectory


def play_spec(config: Config) -> PlaySpec:
    """How the groups of a run are played. Raises ConfigError naming the setting that is refused."""
    build, policy = config.build, config.assistant.model or Path(config.model.path).name
    prompt = read_prompt("build.prompt", build.prompt, "collaborator", ()) if build.proactive else None
    return PlaySpec(
        config.run.seed,
        config.train.rollouts_per_prompt,
        config.rollout.player,
        dict(config.rollout.player_options),
        config.rollout,
        reward_spec(config.reward),
        UserDirectory(config),
        tool_spec(config.rollout),
        assistant_configs(config) or {policy: None},
        build.proactive,
        prompt.render().strip() if prompt else "",
    )
