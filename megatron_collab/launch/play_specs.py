"""Settles how the groups of a run are played and rewarded, before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_collab.config import Config, EvaluateConfig, PlayConfig
from megatron_collab.launch.data_specs import prompt_spec
from megatron_collab.reward.metrics import ScoredMetric
from megatron_collab.reward.spec import RewardSpec
from megatron_collab.rollout.player import PlaySpec
from megatron_collab.rollout.tools.toolbox import ToolSpec
from megatron_collab.rollout.users import UserDirectory
from megatron_collab.settings import RewardConfig, RolloutConfig
from megatron_collab.settings.schema import AssistantConfig


def play_spec(config: Config) -> PlaySpec:
    """How the groups of a training are played. Raises ConfigError naming the setting that is refused."""
    rollout = config.rollout
    experts_of = rollout.train_turns if rollout.routing_replay else None
    policy = {Path(config.model.path).name: None}
    of_training = {"experts_of": experts_of, "teacher_context": config.algo.teacher.context}
    return _played(config, config.train.rollouts_per_prompt, policy, **of_training)


def evaluation_play(config: EvaluateConfig) -> PlaySpec:
    """As `play_spec`; the number of rollouts is that of each set of data.eval."""
    assistant = config.assistant if config.assistant.model else None
    name = config.assistant.model or Path(config.model.path).name
    return _played(config, 1, {name: None}, assistant=assistant)


def _played(
    config: PlayConfig, rollouts: int, assistants: Mapping[str, AssistantConfig | None], **more: Any
) -> PlaySpec:
    """The part of `play_spec` that programs share; `more`: fields of PlaySpec."""
    return PlaySpec(
        run_dir=Path(config.run.dir),
        seed=config.run.seed,
        rollouts=rollouts,
        player=config.rollout.player,
        player_settings=dict(config.rollout.player_options),
        rollout=config.rollout,
        prompt=prompt_spec(config),
        reward=reward_spec(config.reward),
        users=user_directory(config),
        tools=tool_spec(config.rollout),
        llm=config.llm,
        assistants=assistants,
        **more,
    )


def user_directory(config: PlayConfig) -> UserDirectory:
    """Raises ConfigError for invalid settings of users."""
    return UserDirectory(config.user, config.users, config.run.seed, config.model.chat_template_args)


def tool_spec(rollout: RolloutConfig) -> ToolSpec:
    """Raises ConfigError for invalid settings."""
    return ToolSpec([*rollout.tools], {**rollout.tool_options}, {**rollout.mcp_servers})


def reward_spec(reward: RewardConfig) -> RewardSpec:
    """Raises ConfigError naming the setting that is refused."""
    metrics = {
        name: ScoredMetric(name, dict(reward.metrics.get(name, {})), weight, reward.clamp.get(name))
        for name, weight in reward.weights.items()
    }
    scoring = reward.judge, reward.workers, reward.concurrency, reward.timeout, reward.max_missing
    options = dict(reward.mode_options)
    return RewardSpec(metrics, reward.mode, options, reward.malformed, reward.malformed_worst, *scoring)
