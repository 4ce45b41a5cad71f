"""How groups are played, settled before a run starts: in training, and under the settings of a set of data.eval."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_collab.config import Config, RolloutConfig, SamplingConfig, read_prompt
from megatron_collab.config.schema import AssistantConfig
from megatron_collab.data.assistants import CandidateAssistant, assistant_configs, candidate_assistants
from megatron_collab.data.evaluation import EvaluationSet
from megatron_collab.reward.spec import RewardSpec, reward_spec
from megatron_collab.rollout.tools.toolbox import ToolSpec, tool_spec
from megatron_collab.rollout.users import UserDirectory


@dataclass(frozen=True)
class PlaySpec:
    """How the groups of training are played and rewarded; `for_set` gives how those of a set of data.eval are.

    `rollouts`: of a task. `rollout`: limits and sampling of conversations. `assistants`: by name, the models that play
    the rollouts in turn, None for model.path or assistant.model. `proactive_prompt`: system message of the first
    `proactive_share` of the rollouts.
    """

    seed: int
    rollouts: int
    rollout: RolloutConfig
    reward: RewardSpec
    users: UserDirectory
    tools: ToolSpec
    assistants: Mapping[str, AssistantConfig | None]
    proactive_share: float
    proactive_prompt: str

    @property
    def candidates(self) -> list[CandidateAssistant]:
        """The assistant of each rollout, by number."""
        return candidate_assistants(list(self.assistants), self.rollouts, self.proactive_share)

    def for_set(self, eval_set: EvaluationSet) -> PlaySpec:
        """How the conversations of a set are played: each is one rollout with one future.

        Conversations that end early in training, by a malformed turn or reward.mode=single_turn, are played on as a
        user would see them.
        """
        rollout = replace(
            self.rollout,
            futures=1,
            routing_replay=False,
            turn=_sampling(self.rollout.turn, eval_set),
            future=_sampling(self.rollout.future, eval_set),
            max_user_turns=eval_set.max_user_turns or self.rollout.max_user_turns,
            max_assistant_turns=eval_set.max_assistant_turns or self.rollout.max_assistant_turns,
            max_messages=eval_set.max_messages or self.rollout.max_messages,
        )
        reward, users = self.reward.played_on(), self.users.for_set(eval_set.user)
        return replace(self, rollouts=eval_set.samples, rollout=rollout, reward=reward, users=users)


def _sampling(sampling: SamplingConfig, eval_set: EvaluationSet) -> SamplingConfig:
    temperature = sampling.temperature if eval_set.temperature is None else eval_set.temperature
    return replace(sampling, temperature=temperature, max_new_tokens=eval_set.max_new_tokens or sampling.max_new_tokens)


def play_spec(config: Config) -> PlaySpec:
    """How the groups of a run are played. Raises ConfigError naming the setting that is refused."""
    build, policy = config.build, config.assistant.model or Path(config.model.path).name
    prompt = read_prompt("build.prompt", build.prompt, "collaborator", ()) if build.proactive else None
    return PlaySpec(
        config.run.seed,
        config.train.rollouts_per_prompt,
        config.rollout,
        reward_spec(config.reward),
        UserDirectory(config),
        tool_spec(config.rollout),
        assistant_configs(config) or {policy: None},
        build.proactive,
        prompt.render().strip() if prompt else "",
    )
